"""Plans from allocations: right whatever block goes to whatever rank, and nothing moves twice."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sharding import Sharding, contiguous, split
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Collective, Delta, Tensor, Tile, Transfer, legs_of
from harness.planning.block_assignment import Allocation
from harness.planning.block_transfers import gateways, plan_allocation, routes
from harness.planning.need import NeedCut
from harness.verify.proof import verify
from patterns import make_pattern
from tests.harness.numeric import table_pattern, wrong
from tests.harness.unused import unused

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


def both(
    problem: Problem,
    allocation: Allocation,
    *,
    delta: bool = True,
    gpus_per_node: int | None = None,
    cut: NeedCut = NeedCut.WHOLE,
) -> list[Plan]:
    return [
        plan_allocation(
            problem,
            "by hand",
            direction,
            allocation,
            delta=delta,
            gpus_per_node=gpus_per_node,
            cut=cut,
        )
        for direction in Direction
    ]


@given(cases(), st.booleans(), st.integers(1, 8), st.sampled_from((NeedCut.WHOLE, NeedCut.BLOCKS)))
@settings(max_examples=90)
def test_any_allocation_of_any_table_is_proved_and_right(
    case: tuple[Problem, Allocation], delta: bool, nodes: int, cut: NeedCut
) -> None:
    problem, allocation = case
    per_node = problem.cp // nodes if problem.cp % nodes == 0 else None
    plans = both(problem, allocation, delta=delta, gpus_per_node=per_node, cut=cut)
    owners = allocation.queries.owned, allocation.keys.owned
    for plan in plans:
        verify(plan, owners if cut is NeedCut.WHOLE else None)
        assert cut is NeedCut.WHOLE or not unused(plan)
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


@given(cases())
def test_a_chunk_crosses_to_a_node_once_and_comes_back_once(
    case: tuple[Problem, Allocation],
) -> None:
    problem, allocation = case
    if problem.cp % 2:
        return
    per_node = problem.cp // 2
    for plan in both(problem, allocation, gpus_per_node=per_node):
        crossings: Counter[tuple[bool, bool, int, int]] = Counter()
        for task in plan.tasks:
            for leg in legs_of(task):
                if leg.src.rank // per_node != leg.dst.rank // per_node:
                    (chunk,) = leg.pieces[0].chunks
                    tensor = leg.pieces[0].tensor
                    crossings[tensor.is_part, tensor.on_kv, chunk, leg.dst.rank // per_node] += 1
        assert set(crossings.values()) <= {1}


def test_a_way_to_another_node_is_between_gpus_of_equal_number() -> None:
    makers = {(True, 0): {0, 4, 6, 7}, (False, 0): {1, 9}}
    owner = {(True, 0): 1, (False, 0): 1}
    assert gateways(makers, owner, 4) == {(rank, (True, 0)): 5 for rank in (4, 6, 7)}
    hops = [tuple(hop[:2]) for hop in routes(makers, owner, 12, 4) if hop.chunk == (True, 0)]
    assert hops == [(1, 5), (1, 0), (5, 6), (5, 7), (5, 4)]
    assert [hop[:2] for hop in routes(makers, owner, 12, 4) if not hop.chunk[0]] == [(1, 9)]


def test_nodes_must_be_whole() -> None:
    with pytest.raises(ValueError, match=r"gpus_per_node \(2\) must divide cp \(3\)"):
        both(PROBLEM, ALLOCATION, gpus_per_node=2)


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


def test_rows_that_attend_nothing_are_no_part_of_a_block_at_their_owner() -> None:
    # Rows 20 to 27 of the last chunk attend keys of both of its blocks, rows 28 to 39 nothing.
    pattern = make_pattern("window:left=8", 40, 20, cross=True)
    quarters = Sharding(split(20, 4), ((0, 1), (2, 3)))
    one = replace(PROBLEM, pattern=pattern, cp=2)
    halves = Allocation(
        queries=contiguous(40, 2), keys=quarters, cells=((0, 0, 1, 1), (None, None, 0, 1))
    )
    for plan in both(one, halves, cut=NeedCut.BLOCKS):
        verify(plan)
        assert not unused(plan)
