"""The grid and the row owner: the authors' order, closed-form volumes, and what is refused."""

import pytest

from harness.errors import UnsupportedError
from harness.explain.volumes import received_bytes
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Collective, CollectiveKind, Tensor, Tile, Transfer
from harness.planning.block_assignment import least_volume
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy
from tests.harness.numeric import wrong

CP, Y, X = 12, 4, 3
PROBLEM = Problem(
    pattern=make_pattern("full", 36, 48, cross=True),
    heads_q=4,
    heads_kv=2,
    head_dim=8,
    head_dim_v=6,
    batch=3,
    dtype=Dtype.BFLOAT16,
    cp=CP,
)


def both(text: str, problem: Problem = PROBLEM) -> list[Plan]:
    return [strategy(text).plan(problem, direction) for direction in Direction]


def row(rank: int, offset: int) -> int:
    """The authors' r(off1) = lb + ((g - lb + off1) mod X)."""
    first = rank // X * X
    return first + (rank - first + offset) % X


def column(rank: int, offset: int) -> int:
    """The authors' c(off0) = (g + off0 X) mod G."""
    return (rank + offset * X) % CP


def test_a_block_is_computed_where_the_authors_formula_says() -> None:
    for plan in both(f"grid:rows={Y}"):
        tiles = [task for task in plan.tasks if isinstance(task, Tile)]
        assert len(tiles) == CP * CP
        for tile in tiles:
            (k,), (el,) = tile.q, tile.kv
            assert tile.place.rank == k // X * X + el % X


def test_tiles_and_transfers_come_in_the_authors_order() -> None:
    for plan in both(f"grid:rows={Y}"):
        backward = plan.direction is Direction.BACKWARD
        for rank in range(CP):
            tiles = [(t.q[0], t.kv[0]) for t in plan.tasks if _tile_of(t, rank)]
            assert tiles == [(row(rank, b), column(rank, a)) for a in range(Y) for b in range(X)]
            got = [t.leg for t in plan.tasks if isinstance(t, Transfer) and t.leg.dst.rank == rank]
            inputs = [(leg.src.rank, leg.pieces[0].tensor) for leg in got if _input(leg.pieces[0])]
            assert inputs == [
                *((row(rank, offset), Tensor.Q) for offset in range(1, X)),
                *((column(rank, offset), Tensor.K) for offset in range(1, Y)),
            ]
            sent = [t.leg for t in plan.tasks if isinstance(t, Transfer) and t.leg.src.rank == rank]
            home = [
                (leg.dst.rank, leg.pieces[0].tensor) for leg in sent if leg.pieces[0].tensor.is_part
            ]
            part = Tensor.DQ_PART if backward else Tensor.OUT_PART
            rows = [(row(rank, offset), part) for offset in range(1, X)]
            columns = [(column(rank, offset), Tensor.DK_PART) for offset in range(1, Y)]
            assert home == ([*columns[:-1], *rows, columns[-1]] if backward else rows)


def _tile_of(task: object, rank: int) -> bool:
    return isinstance(task, Tile) and task.place.rank == rank


def _input(piece: object) -> bool:
    return not piece.tensor.is_part


@pytest.mark.parametrize("fused", ["", ",fused=true"])
def test_a_grid_moves_x_rows_and_y_columns(fused: str) -> None:
    """Per rank, t = 3 query and T = 4 key tokens: rows out and home, columns out and home."""
    forward, backward = both(f"grid:rows={Y}{fused}")
    row_out, row_home = 3 * 4 * 8 * 2, 3 * 4 * (6 + 1) * 4
    column_out, column_home = 4 * 2 * 14 * 2, 4 * 2 * 14 * 4
    expected = 3 * ((X - 1) * (row_out + row_home) + (Y - 1) * column_out)
    assert received_bytes(forward) == (expected,) * CP
    row_out, row_home = 3 * 4 * ((8 + 6) * 2 + 2 * 4), 3 * 4 * 8 * 4
    expected = 3 * ((X - 1) * (row_out + row_home) + (Y - 1) * (column_out + column_home))
    assert received_bytes(backward) == (expected,) * CP


def test_by_default_the_grid_moves_the_fewest_bytes() -> None:
    for direction in Direction:
        sizes = {
            y: max(received_bytes(strategy(f"grid:rows={y}").plan(PROBLEM, direction)))
            for y in (1, 2, 3, 4, 6, 12)
        }
        assert sizes[least_volume(PROBLEM, direction)] == min(sizes.values())
        assert max(received_bytes(strategy("grid").plan(PROBLEM, direction))) == min(sizes.values())
        assert len(set(sizes.values())) > 3


def test_all_rows_is_the_row_owner() -> None:
    for grid, owner in zip(both("grid:rows=12"), both("owner"), strict=True):
        assert received_bytes(grid) == received_bytes(owner)
        assert not any(task.reads[-1].tensor is Tensor.DELTA for task in _tiles(grid))


def _tiles(plan: Plan) -> list[Tile]:
    return [task for task in plan.tasks if isinstance(task, Tile)]


def test_fused_is_one_tile_a_rank_and_merges_partial_outputs_exactly() -> None:
    forward, backward = both(f"grid:rows={Y},fused=true")
    for plan in (forward, backward):
        assert [task.place.rank for task in _tiles(plan)] == list(range(CP))
        assert not any(isinstance(task, Transfer) for task in plan.tasks)
    kinds = [
        {(t.legs[0].pieces[0].tensor, t.kind) for t in plan.tasks if isinstance(t, Collective)}
        for plan in (forward, backward)
    ]
    assert (Tensor.OUT_PART, CollectiveKind.ALL_TO_ALL) in kinds[0]
    assert (Tensor.DQ_PART, CollectiveKind.REDUCE_SCATTER) in kinds[1]
    assert (Tensor.DK_PART, CollectiveKind.REDUCE_SCATTER) in kinds[1]


@pytest.mark.parametrize("pattern", ["full", "causal", "star:blocks=5", "strided", "window:left=7"])
@pytest.mark.parametrize(
    "text",
    ["grid:rows=2", "grid:rows=2,fused=true", "grid:rows=1,fused=true", "owner:placement=stripe"],
)
def test_any_pattern_is_right_on_a_grid(pattern: str, text: str) -> None:
    problem = Problem(
        pattern=make_pattern(pattern, 41),
        heads_q=6,
        heads_kv=3,
        head_dim=8,
        dtype=Dtype.FLOAT64,
        cp=4,
    )
    forward, backward = both(text, problem)
    check_pair(forward, backward)
    for plan in (forward, backward):
        verify(plan)
    assert not wrong(forward, backward)


def test_rows_that_do_not_divide_cp_are_refused_with_those_that_do() -> None:
    with pytest.raises(UnsupportedError, match=r"rows \(5\) must divide cp \(12\)") as caught:
        both("grid:rows=5")
    assert caught.value.nearest == tuple(f"grid:rows={y}" for y in (1, 2, 3, 4, 6, 12))


def test_the_row_owner_sends_each_key_chunk_to_those_that_need_it() -> None:
    """Causal: rank r gets the r chunks before its own, 6, 6, ... tokens each."""
    causal = Problem(
        pattern=make_pattern("causal", 25), heads_q=2, heads_kv=1, head_dim=8, head_dim_v=4, cp=4
    )
    forward, _ = both("owner", causal)
    tokens = [0, 6, 12, 18]
    assert received_bytes(forward) == tuple(12 * 4 * n for n in tokens)
