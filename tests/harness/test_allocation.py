"""Plans from allocations: right whatever block goes to whatever rank, and nothing moves twice."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.allocation import plan_allocation
from harness.plan import Collective, Delta, Plan, Tensor, Tile, Transfer, legs_of
from harness.problem import Direction, Dtype, Problem
from harness.schedule import in_plan_order, verify_schedule
from harness.sharding import Sharding
from harness.sizes import leg_bytes
from harness.tiling import Allocation
from harness.verify import verify
from patterns import make_pattern
from tests.harness.numeric import table_pattern, wrong

HEADS = ((6, 2), (5, 5), (3, 1), (1, 1))


@st.composite
def shardings(draw: st.DrawFn, seqlen: int, cp: int, parts: int) -> Sharding:
    """Cut anywhere, also into nothing, and deal to anyone; some ranks may own nothing."""
    cuts = sorted(draw(st.lists(st.integers(0, seqlen), min_size=parts - 1, max_size=parts - 1)))
    edges = [0, *cuts, seqlen]
    owners = draw(st.lists(st.integers(0, cp - 1), min_size=parts, max_size=parts))
    return Sharding(
        tuple(range(a, b) for a, b in pairwise(edges)),
        tuple(tuple(c for c, owner in enumerate(owners) if owner == r) for r in range(cp)),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Allocation]:
    cp = draw(st.integers(1, 8))
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    cells = draw(
        st.lists(
            st.lists(st.sampled_from((0, 1, 1, 2)), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        )
    )
    seqlen_q, seqlen_kv = draw(st.integers(1, 41)), draw(st.integers(1, 43))
    heads_q, heads_kv = draw(st.sampled_from(HEADS))
    problem = Problem(
        pattern=table_pattern(cells, seqlen_q, seqlen_kv),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=8,
        batch=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from((Dtype.FLOAT64, Dtype.FLOAT64, Dtype.BFLOAT16))),
        cp=cp,
    )
    queries = draw(shardings(seqlen_q, cp, rows))
    keys = draw(shardings(seqlen_kv, cp, columns))
    ranks = st.lists(st.integers(0, cp - 1), min_size=columns, max_size=columns).map(tuple)
    given_to = tuple(draw(st.lists(ranks, min_size=rows, max_size=rows)))
    return problem, Allocation(queries=queries, keys=keys, cells=given_to)


def both(problem: Problem, allocation: Allocation, *, delta: bool = True) -> list[Plan]:
    return [
        plan_allocation(problem, "by hand", direction, allocation, delta=delta)
        for direction in Direction
    ]


@given(cases(), st.booleans())
@settings(max_examples=60)
def test_any_allocation_of_any_table_is_proved_and_right(
    case: tuple[Problem, Allocation], delta: bool
) -> None:
    problem, allocation = case
    plans = both(problem, allocation, delta=delta)
    owners = allocation.queries.owned, allocation.keys.owned
    for plan in plans:
        verify(plan, owners)
        verify_schedule(in_plan_order(plan))
    assert not wrong(*plans)


@given(cases())
def test_each_block_is_one_tile_at_its_rank(case: tuple[Problem, Allocation]) -> None:
    problem, allocation = case
    areas = problem.pattern.areas(allocation.queries.chunks, allocation.keys.chunks)
    wanted = {
        (rank, (i,), (j,))
        for i, row in enumerate(allocation.cells)
        for j, rank in enumerate(row)
        if areas[i, j]
    }
    for plan in both(problem, allocation):
        tiles = [task for task in plan.tasks if isinstance(task, Tile)]
        assert sorted(wanted) == sorted((t.place.rank, t.q, t.kv) for t in tiles)


@given(cases())
def test_a_chunk_goes_to_a_rank_once_and_comes_home_once(
    case: tuple[Problem, Allocation],
) -> None:
    problem, allocation = case
    rows, columns = allocation.queries.owner(), allocation.keys.owner()
    areas = problem.pattern.areas(allocation.queries.chunks, allocation.keys.chunks)
    away: set[tuple[bool, int, int]] = set()
    for i, row in enumerate(allocation.cells):
        for j, rank in enumerate(row):
            if rank is not None and areas[i, j]:
                away |= {(False, i, rank)} if rows[i] != rank else set()
                away |= {(True, j, rank)} if columns[j] != rank else set()
    for plan in both(problem, allocation):
        out: Counter[tuple[bool, int, int]] = Counter()
        home: Counter[tuple[bool, int, int]] = Counter()
        for task in plan.tasks:
            for leg in legs_of(task):
                (chunk,) = leg.pieces[0].chunks
                tensor = leg.pieces[0].tensor
                if tensor.is_part:
                    home[tensor.on_kv, chunk, leg.src.rank] += 1
                else:
                    out[tensor.on_kv, chunk, leg.dst.rank] += 1
        returning = away
        if plan.direction is Direction.FORWARD:
            returning = {each for each in away if not each[0]}
        assert out == Counter(away)
        assert home == Counter(returning)


# One case, by hand --------------------------------------------------------------------------

# Rank 1 computes a block of row 2 (of rank 2) and rank 0 the last one of row 1 (of rank 1).
PROBLEM = Problem(
    pattern=make_pattern("causal", 22),
    heads_q=4,
    heads_kv=2,
    head_dim=8,
    head_dim_v=6,
    batch=3,
    dtype=Dtype.BFLOAT16,
    cp=3,
)
CHUNKS = (range(7), range(7, 12), range(12, 22))
SHARDING = Sharding(CHUNKS, ((0,), (1,), (2,)))
ALLOCATION = Allocation(
    queries=SHARDING, keys=SHARDING, cells=((0, None, None), (0, 1, None), (2, 1, 2))
)


def moved(plan: Plan) -> list[tuple[int, int, str, int]]:
    """(source, destination, tensors, bytes) of each transfer, in order."""
    return [
        (
            task.leg.src.rank,
            task.leg.dst.rank,
            " ".join(piece.tensor.value for piece in task.leg.pieces),
            leg_bytes(plan, task.leg),
        )
        for task in plan.tasks
        if isinstance(task, Transfer)
    ]


def test_forward_moves_these_bytes_and_no_others() -> None:
    forward, _ = both(PROBLEM, ALLOCATION)
    assert sorted(moved(forward)) == [
        (0, 1, "out_part lse_part", 3 * 4 * 5 * (6 + 1) * 4),
        (0, 2, "k v", 3 * 2 * 7 * (8 + 6) * 2),
        (1, 0, "q", 3 * 4 * 5 * 8 * 2),
        (1, 2, "out_part lse_part", 3 * 4 * 10 * (6 + 1) * 4),
        (2, 1, "q", 3 * 4 * 10 * 8 * 2),
    ]


def test_backward_ships_delta_or_out_and_prices_what_it_ships() -> None:
    home = [
        (0, 1, "dq_part", 3 * 4 * 5 * 8 * 4),
        (1, 2, "dq_part", 3 * 4 * 10 * 8 * 4),
        (2, 0, "dk_part dv_part", 3 * 2 * 7 * (8 + 6) * 4),
    ]
    keys = [(0, 2, "k v", 3 * 2 * 7 * (8 + 6) * 2)]
    for delta, last, size in ((True, "delta", 4), (False, "out", 6 * 2)):
        _, backward = both(PROBLEM, ALLOCATION, delta=delta)
        rows = [
            (src, dst, f"q lse dout {last}", 3 * 4 * tokens * (8 * 2 + 4 + 6 * 2 + size))
            for src, dst, tokens in ((1, 0, 5), (2, 1, 10))
        ]
        assert sorted([*home, *keys, *rows]) == sorted(moved(backward))
        assert delta == any(isinstance(task, Delta) for task in backward.tasks)


def test_out_is_read_where_no_row_leaves_its_owner() -> None:
    own = Allocation(
        queries=SHARDING, keys=SHARDING, cells=((0, None, None), (1, 1, None), (2, 2, 2))
    )
    _, backward = both(PROBLEM, own)
    assert not any(isinstance(task, Delta) for task in backward.tasks)
    assert all(
        task.reads[-1].tensor is Tensor.OUT for task in backward.tasks if isinstance(task, Tile)
    )


def test_a_rank_computes_what_it_has_before_what_arrives() -> None:
    forward, _ = both(PROBLEM, ALLOCATION)
    blocks = [(t.q, t.kv) for t in forward.tasks if isinstance(t, Tile) and t.place.rank == 1]
    assert blocks == [((1,), (1,)), ((2,), (1,))]
    assert not any(isinstance(task, Collective) for task in forward.tasks)


def test_a_block_that_nobody_computes_is_refused() -> None:
    nobody = Allocation(
        queries=SHARDING, keys=SHARDING, cells=((0, None, None), (0, None, None), (2, 1, 2))
    )
    with pytest.raises(ValueError, match=r"block \(1, 1\) has 15 allowed pairs"):
        both(PROBLEM, nobody)
