"""Two levels: shared blocks, both link classes, costs of blocks, and whole allocations."""

from collections import Counter
from collections.abc import Sequence

import pytest

from harness.plan.problem import Direction, Problem
from harness.plan.sharding import split
from harness.schedule.scip import SolverStatus
from strategies.ultraattn.nodes import Effort, Nodes, Rules, TwoLevels, tile_nodes
from strategies.ultraattn.remap import modulo
from strategies.ultraattn.solver.assign import Assigned
from strategies.ultraattn.solver.instance import account, most
from tests.support import problem


def cut_chunks(chunks: Sequence[range], pieces: int) -> tuple[tuple[range, ...], ...]:
    """Cut each coarse chunk into so many pieces, whose lengths differ by at most one token."""
    return tuple(
        tuple(
            chunk[k * len(chunk) // pieces : (k + 1) * len(chunk) // pieces] for k in range(pieces)
        )
        for chunk in chunks
    )


def tiled(p: Problem, shape: Nodes, size: int, pieces: int = 4, **options: object) -> TwoLevels:
    sides = (
        cut_chunks(split(p.seqlen_q, size), pieces),
        cut_chunks(split(p.seqlen_kv, size), pieces),
    )
    rules, effort = Rules(**options), Effort(seconds=0.5)
    return tile_nodes(p, Direction.FORWARD, shape, sides, rules, effort)


def test_every_pair_of_positions_has_one_rank_exactly_where_it_is_allowed() -> None:
    p = problem("causal", 45, cp=6, heads=(6, 6))
    plan = tiled(p, Nodes(nodes=3, gpus=2), 3, pieces=2)
    allocation = plan.allocation
    areas = p.pattern.areas(allocation.queries.chunks, allocation.keys.chunks)
    for i, row in enumerate(allocation.cells):
        for j, rank in enumerate(row):
            assert (rank is None) == (areas[i, j] == 0)
    assert sorted(t for chunk in allocation.queries.chunks for t in chunk) == list(range(45))
    work = Counter(rank for row in allocation.cells for rank in row if rank is not None)
    assert set(work) == set(range(6))


def test_equal_blocks_are_planned_once() -> None:
    plan = tiled(problem("causal", 96, cp=8, heads=(6, 6)), Nodes(nodes=4, gpus=2), 4)
    assert len(plan.blocks) == 2  # the diagonal's and the full one
    assert {k for row in plan.kind for k in row} == {None, 0, 1}


def test_the_nodes_reach_the_known_optimum_of_causal() -> None:
    p = problem("causal", 8 * 2 * 6, cp=8, heads=(6, 6))
    side = cut_chunks(split(p.seqlen_q, 8), 2)
    shape, proof = Nodes(nodes=4, gpus=2), Effort(prove=True)
    plan = tile_nodes(p, Direction.FORWARD, shape, (side, side), Rules(), proof)
    assert (plan.nodes.value, plan.nodes.status) == (8, SolverStatus.OPTIMAL)


def test_global_and_local_on_two_nodes_raise_the_cap_as_little_as_they_must() -> None:
    p = problem("global_local", 128, cp=16, heads=(6, 6))
    plan = tiled(p, Nodes(nodes=2, gpus=8), 2, pieces=8)
    assert [
        [sum(map(sum, plan.blocks[k][0].work)) // 2 for k in row if k is not None]
        for row in plan.kind
    ] == [[22, 8], [8, 8]]
    assert plan.instance.cap == 48  # 24 FULL blocks, where half of 46 cannot be kept


def test_both_link_classes_are_in_the_objective() -> None:
    p = problem("star", 96, cp=4, heads=(6, 6))
    counted = tiled(p, Nodes(nodes=2, gpus=2), 4)
    weighed = tiled(p, Nodes(nodes=2, gpus=2, inside_speed=8.0), 4)
    assert counted.instance.inside == ()
    scale = weighed.instance.weights.unit
    assert scale == 16  # 2 GPUs / 4 pieces / 8 = 1 / 16
    inside = [[0 if k is None else weighed.blocks[k][1].value for k in row] for row in weighed.kind]
    assert [list(row) for row in weighed.instance.inside] == inside
    lines = account(weighed.instance, weighed.nodes.cells)
    assert most(lines) == weighed.nodes.value


def test_blocks_may_weigh_what_a_simulator_says() -> None:
    p = problem("causal", 96, cp=4, heads=(6, 6))

    def cost(row: Sequence[range], column: Sequence[range], _: Assigned) -> float:
        return 1e-3 * int(p.pattern.areas(row, column).sum()) ** 2

    plan = tiled(p, Nodes(nodes=2, gpus=2), 4, cost=cost)
    full, half = 256, round(256 * (25 / 48) ** 2)  # a triangle of 24 rows has 25 / 48 of its square
    assert plan.instance.work[0][0] == half
    assert plan.instance.work[1][0] == full


def test_strided_in_original_order_needs_no_traffic_between_nodes_after_its_remap() -> None:
    p = problem("strided_original", 320, cp=8, heads=(6, 6))
    parts = split(320, 16)
    order = modulo(16, 4)
    for nodes in (2, 4):
        side = cut_chunks([parts[block] for block in order], 8 // nodes)
        plan = tile_nodes(
            p,
            Direction.BACKWARD,
            Nodes(nodes=nodes, gpus=8 // nodes),
            (side, side),
            Rules(),
            Effort(seconds=0.3),
        )
        assert plan.nodes.value == 0


@pytest.mark.parametrize("gpus", [2, 3])
def test_uneven_lengths_and_cross_attention_are_planned(gpus: int) -> None:
    p = problem("full", 37, seqlen_kv=61, cp=2 * gpus)
    plan = tiled(p, Nodes(nodes=2, gpus=gpus), 2, pieces=gpus)
    cells = plan.allocation.cells
    assert {rank for row in cells for rank in row} == set(range(2 * gpus))
    assert plan.instance.cap >= sum(map(sum, plan.instance.work)) / 2
