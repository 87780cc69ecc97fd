"""Meshes of heads and context: who is where, what moves, and that any context plan stays right."""

from dataclasses import replace

import pytest

from harness.errors import UnsupportedError
from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement, Sharding
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Collective, Tensor, Tile, legs_of
from harness.planning.builder import PlanBuilder
from harness.planning.mesh_plans.gathers import plan_gathers
from harness.planning.mesh_plans.head_mesh import HeadMesh, plan_heads
from harness.planning.rings import cycle, rings_attention
from tests.harness.numeric import wrong
from tests.support import problem


def gathers(p: Problem, mesh: HeadMesh, *, two_steps: bool) -> list[Plan]:
    """Plan both directions over a mesh, keys gathered."""
    dealt = deal_tokens(p.pattern, mesh.parts, Placement.ZIGZAG)
    gpus = mesh.neighbours if two_steps else None

    def both(direction: Direction) -> Plan:
        def lane(part: Problem, among: tuple[Sharding, Sharding]) -> Plan:
            return plan_gathers(part, "x", direction, among, gpus_per_node=gpus, at_once=two_steps)

        return plan_heads(p, "x", direction, mesh, dealt, lane)

    return [both(direction) for direction in Direction]


def rings(p: Problem, mesh: HeadMesh) -> list[Plan]:
    """Plan both directions over a mesh, keys travelling a ring."""

    def both(direction: Direction) -> Plan:
        def lane(part: Problem, among: tuple[Sharding, Sharding]) -> Plan:
            b = PlanBuilder(part, "x", direction, *among)
            rings_attention(b, [cycle(b, range(part.cp))])
            return b.build()

        dealt = deal_tokens(p.pattern, mesh.parts, Placement.BALANCED, 7)
        return plan_heads(p, "x", direction, mesh, dealt, lane)

    return [both(direction) for direction in Direction]


def test_parts_of_the_context_and_shares_of_heads_lie_as_drawn() -> None:
    """The two drawings of the module: (part, share) of the ranks of two nodes of four."""
    for inside, between, drawn in (
        (2, 1, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]),
        (1, 2, [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]),
    ):
        mesh = HeadMesh(nodes=2, gpus=4, inside=inside, between=between)
        assert [mesh.rank(*where) for where in drawn] == list(range(8))


@pytest.mark.parametrize("two_steps", [False, True])
@pytest.mark.parametrize(
    ("mesh", "heads", "pattern"),
    [
        (HeadMesh(nodes=2, gpus=2, stages=2), (8, 4), "window:left=9,right=2"),
        (HeadMesh(nodes=2, gpus=2, inside=2, stages=2), (8, 4), "star"),
        (HeadMesh(nodes=3, gpus=2, between=3), (6, 2), "causal"),
        (HeadMesh(nodes=2, gpus=4, inside=2, between=2), (5, 5), "star"),
        (HeadMesh(nodes=1, gpus=4, inside=4), (6, 2), "causal"),
    ],
)
def test_gathers_over_a_mesh_are_right(
    mesh: HeadMesh, heads: tuple[int, int], pattern: str, two_steps: bool
) -> None:
    p = problem(pattern, 101, heads, cp=mesh.nodes * mesh.gpus, dims=(8, 6))
    assert not wrong(*gathers(p, mesh, two_steps=two_steps))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_ring_over_a_mesh_is_right(stages: int) -> None:
    mesh = HeadMesh(nodes=3, gpus=2, inside=2, stages=stages)
    assert not wrong(*rings(problem("causal", 101, (8, 4), cp=6, seqlen_kv=67), mesh))


def test_a_chunk_enters_a_node_once_in_two_steps() -> None:
    """Full attention: flat, each of 4 ranks of a node gets what 4 of the other have."""
    p = problem("full", 96, (4, 2), cp=8)
    mesh = HeadMesh(nodes=2, gpus=4)

    def crossing(plan: Plan) -> int:
        legs = [leg for task in plan.tasks for leg in legs_of(task)]
        return sum(leg_bytes(plan, leg) for leg in legs if leg.src.rank // 4 != leg.dst.rank // 4)

    flat, once = (gathers(p, mesh, two_steps=two) for two in (False, True))
    assert [crossing(plan) for plan in flat] == [4 * crossing(plan) for plan in once]


def test_keys_of_a_stage_come_before_the_stage_before_it_is_attended() -> None:
    p = replace(problem("causal", 64, (8, 4), cp=4))
    forward, _ = gathers(p, HeadMesh(nodes=2, gpus=2, stages=4), two_steps=False)
    moved = [task for task in forward.tasks if isinstance(task, Collective | Tile)]
    keys = [
        isinstance(task, Collective)
        for task in moved
        if isinstance(task, Tile) or task.legs[0].pieces[0].tensor is Tensor.K
    ]
    first_tiles = [at for at, is_gather in enumerate(keys) if not is_gather]
    assert keys[:2] == [True, True]
    assert first_tiles[0] == 2
    assert all(len(task.after) for task in moved if isinstance(task, Tile))


@pytest.mark.parametrize(("inside", "stages"), [(4, 1), (1, 3)])
def test_heads_that_cannot_be_shared_so_are_refused(inside: int, stages: int) -> None:
    mesh = HeadMesh(nodes=1, gpus=4, inside=inside, stages=stages)
    with pytest.raises(UnsupportedError, match=f"{inside} x 1 shares of heads in {stages} stages"):
        gathers(problem("causal", 41, (3, 1), cp=4), mesh, two_steps=False)
