"""The levels HEADS and GATHER: who shares heads, who shares the context, and gathers of keys.

A plan of this kind is one choice of each of

    heads       i shares inside nodes x b between them; i divides the GPUs of a node, b the nodes
    tokens      how they are dealt to the cp / (i b) parts of the context
    stages      t, in which each rank attends its heads; t divides the KV heads of a share
    way         how keys come: gathered at once, gathered in two steps so that a chunk enters each
                node once, or round a ring

of which heads and tokens are the same in both directions, because backward starts from what forward
left. `docs/planner.md` states the program and what of it is enumerated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise, product
from math import lcm
from typing import Any

import numpy as np

from harness.plan.dealing import deal_tokens, head_tail, separate_documents
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement, Sharding, split
from harness.planning.builder import PlanBuilder
from harness.planning.levels import Level
from harness.planning.mesh_plans.gathers import plan_gathers
from harness.planning.mesh_plans.head_mesh import HeadMesh, plan_heads
from harness.planning.rings import cycle, rings_attention
from patterns import remap_order
from strategies.ultraattn.finish import Plans, ReportedPlan, seconds_of
from strategies.ultraattn.layout import blocks_in_order, grain
from strategies.ultraattn.planning import NAME, Planning

_MOST_PARTS = 64
"""Parts of the context: more legs than a gather of so many take long to plan."""
_MOST_CHUNKS = 1024  # of the sequence, where rows or documents are dealt one by one
_EVEN = 1.05  # times the work of the most even deal: as good
_UNEVEN = 1.2  # the same, of a deal that leaves neighbours side by side and so may move less
_STAGES = (2, 4, 8)
_LONGEST = 16  # ranks of a ring: longer ones have many small kernels
_SHAPES = 5  # that are planned, of those that move the least
_BOTH = 5  # of them, that are planned in both directions
_TRIED = 3  # of them, that are refined

_SIDE_BY_SIDE = (Placement.CONTIGUOUS.value, "order")

Dealt = tuple[Sharding, Sharding]


class KeyWay(StrEnum):
    """How the keys of the other parts of the context come."""

    GATHER = "gather"
    TWO_STEPS = "gather in two steps"
    RING = "ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """Tokens dealt to the parts of a context.

    Attributes:
        name: How.
        dealt: Who owns queries, and keys.
        imbalance: Work of the part that has most over the mean.
    """

    name: str
    dealt: Dealt
    imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshTrial:
    """One plan, planned and timed.

    Attributes:
        mesh: Who shares heads, and the stages.
        dealing: Who owns tokens.
        way: How keys come.
        plan: The plan.
        seconds: Its time.
    """

    mesh: HeadMesh
    dealing: Dealing
    way: KeyWay
    plan: Plan
    seconds: float


MeshPair = Mapping[Direction, MeshTrial]


def mesh_plans(planning: Planning) -> list[Plans]:
    """Return the plans of the best shapes, both directions of each."""
    first = [_forward(planning, mesh) for mesh in _shapes(planning)]
    fastest = sorted(first, key=lambda trial: trial.seconds)[:_BOTH]
    most = sorted(first, key=lambda trial: trial.mesh.shares)[-1:]
    both = [*fastest, *(trial for trial in most if trial not in fastest)]
    tried = [_with_backward(planning, trial) for trial in both]
    found = [_refined(planning, pair) for pair in _best(tried)]
    return [{d: _reported(planning, trial) for d, trial in pair.items()} for pair in found]


def _shapes(planning: Planning) -> list[HeadMesh]:
    """Return the shapes that move the least, and those of heads on one level or none."""
    found = sorted(_meshes(planning), key=lambda mesh: _moved_s(planning, mesh))
    shape = planning.shape
    pure = ((1, 1), (shape.gpus, 1), (1, shape.nodes), (shape.gpus, shape.nodes))
    plain = [mesh for mesh in found if (mesh.inside, mesh.between) in pure]
    return list(dict.fromkeys([*found[:_SHAPES], *plain]))


def _meshes(planning: Planning) -> Iterator[HeadMesh]:
    """Yield the shapes that the levels allow."""
    problem, shape, levels = planning.problem, planning.shape, planning.mode.levels
    heads, gather = Level.HEADS in levels, Level.GATHER in levels
    for inside, between in product(_divisors(shape.gpus), _divisors(shape.nodes)):
        mesh = HeadMesh(nodes=shape.nodes, gpus=shape.gpus, inside=inside, between=between)
        needed = (mesh.shares == 1 or heads) and (mesh.parts == 1 or gather)
        if needed and mesh.parts <= _MOST_PARTS and mesh.can(problem) and problem.cp > 1:
            yield mesh


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _moved_s(planning: Planning, mesh: HeadMesh) -> float:
    """Return about the seconds in which links move what both directions need, nothing masked.

    A trade takes all but its own share of q, k, v and out, and of their gradients; a gather all
    keys twice and, in twice their precision, the gradients, once per node.
    """
    problem, machine = planning.problem, planning.machine
    width = (problem.head_dim + problem.head_dim_v) * problem.dtype.bytes
    shares, parts, near = mesh.shares, mesh.parts, mesh.neighbours
    copies = max(1, shares // problem.heads_kv)
    own = problem.seqlen_q / problem.cp * width * (problem.heads_q + problem.heads_kv * copies)
    keys = problem.seqlen_kv / parts * width * -(-problem.heads_kv // shares)
    inside = 2 * own * (mesh.inside - 1) / shares + 4 * keys * (near - 1)
    between = 2 * own * (shares - mesh.inside) / shares + 4 * keys * (parts - near) / near
    nvlink, nic = machine.nvlink.bandwidth_bytes_per_s, machine.nic.bandwidth_bytes_per_s
    return max(inside / nvlink, between / nic)


def _forward(planning: Planning, mesh: HeadMesh) -> MeshTrial:
    """Return the fastest forward plan of a shape in one stage."""
    choices = product(_dealings(planning, mesh.parts), _ways(mesh))
    tried = [_tried(planning, Direction.FORWARD, mesh, *choice) for choice in choices]
    return min(tried, key=lambda trial: trial.seconds)


def _with_backward(planning: Planning, first: MeshTrial) -> MeshPair:
    back = _tried(planning, Direction.BACKWARD, first.mesh, first.dealing, first.way)
    return {Direction.FORWARD: first, Direction.BACKWARD: back}


def _best(tried: Sequence[MeshPair]) -> list[MeshPair]:
    """Return the pairs that are fastest in all, and the fastest of each direction."""
    ranked = sorted(tried, key=lambda pair: sum(trial.seconds for trial in pair.values()))
    of_one = [min(tried, key=lambda pair: pair[d].seconds) for d in Direction] if tried else []
    kept = ranked[:_TRIED]
    return [*kept, *(pair for pair in of_one if pair not in kept)]


def _refined(planning: Planning, pair: MeshPair) -> MeshPair:
    """Return a pair with good stages and the better gather of each direction."""
    return {direction: _staged(planning, direction, trial) for direction, trial in pair.items()}


def _staged(planning: Planning, direction: Direction, best: MeshTrial) -> MeshTrial:
    """Return the best way with the best number of stages, one after the other."""
    others = [
        _tried(planning, direction, best.mesh, best.dealing, way)
        for way in _ways(best.mesh)
        if way is not best.way
    ]
    best = min([best, *others], key=lambda trial: trial.seconds)
    for stages in _STAGES:
        mesh = replace(best.mesh, stages=stages)
        if not mesh.can(planning.problem):
            break
        other = _tried(planning, direction, mesh, best.dealing, best.way)
        if other.seconds >= best.seconds:
            break
        best = other
    return best


def _ways(mesh: HeadMesh) -> list[KeyWay]:
    """Return the ways that differ: in two steps where several ranks of a node share keys."""
    if mesh.parts == 1:
        return [KeyWay.GATHER]
    two = [KeyWay.TWO_STEPS] if 1 < mesh.neighbours < mesh.parts else []
    return [KeyWay.GATHER, *two, *([KeyWay.RING] if mesh.parts <= _LONGEST else [])]


def _tried(
    planning: Planning, direction: Direction, mesh: HeadMesh, dealing: Dealing, way: KeyWay
) -> MeshTrial:
    plan = mesh_plan(planning.problem, direction, mesh, dealing.dealt, way)
    seconds = planning.clock(plan)
    return MeshTrial(mesh=mesh, dealing=dealing, way=way, plan=plan, seconds=seconds)


def mesh_plan(
    problem: Problem, direction: Direction, mesh: HeadMesh, dealt: Dealt, way: KeyWay
) -> Plan:
    """Plan heads x context.

    Args:
        problem: The problem.
        direction: Forward or backward.
        mesh: Who shares heads, and the stages.
        dealt: Who owns queries, and keys, among the parts of the context.
        way: How keys come.
    """

    def lane(part: Problem, among: Dealt) -> Plan:
        if way is KeyWay.RING:
            return _ring(part, direction, among)
        gpus = mesh.neighbours if way is KeyWay.TWO_STEPS else None
        return plan_gathers(part, NAME, direction, among, gpus_per_node=gpus, at_once=True)

    return plan_heads(problem, NAME, direction, mesh, dealt, lane)


def _ring(problem: Problem, direction: Direction, dealt: Dealt) -> Plan:
    b = PlanBuilder(problem, NAME, direction, *dealt)
    rings_attention(b, [cycle(b, range(problem.cp))])
    return b.build()


# Tokens -------------------------------------------------------------------------------------


def _dealings(planning: Planning, parts: int) -> list[Dealing]:
    """Return ways to deal tokens to parts, without those that are too uneven."""
    found = [
        Dealing(name=name, dealt=dealt, imbalance=_imbalance(planning.problem, dealt[0]))
        for name, dealt in _deals(planning, parts)
    ]
    least = min(each.imbalance for each in found)
    even = [each for each in found if each.imbalance <= _EVEN * least]
    fewest = min(even, key=lambda each: len(each.dealt[0].chunks))
    side_by_side = [
        each for each in found if each.name in _SIDE_BY_SIDE and each.imbalance <= _UNEVEN * least
    ]
    return list({each.dealt: each for each in (fewest, *side_by_side)}.values())


def _deals(planning: Planning, parts: int) -> Iterator[tuple[str, Dealt]]:
    """Yield names and dealings, the tokens' own order first."""
    problem = planning.problem
    pattern = problem.pattern
    yield Placement.CONTIGUOUS.value, deal_tokens(pattern, parts, Placement.CONTIGUOUS)
    if not planning.remaps or parts == 1:
        return
    for placement in (Placement.ZIGZAG, Placement.BALANCED):
        chunk = -(-problem.seqlen_q // (2 * parts)) if placement is Placement.BALANCED else None
        yield placement.value, deal_tokens(pattern, parts, placement, chunk)
    if problem.seqlen_q != problem.seqlen_kv:
        return
    runs_of = {"rows alike": _rows_alike(problem), "documents": separate_documents(pattern)}
    for name, runs in runs_of.items():
        if 1 < len(runs) <= _MOST_CHUNKS // (2 * parts):
            yield name, (head_tail(runs, parts),) * 2
    own = remap_order(pattern)
    if own is not None:
        size = lcm(parts, len(own))
        pieces, each = blocks_in_order(problem.seqlen_q, size, own), size // parts
        owned = tuple(tuple(range(part * each, (part + 1) * each)) for part in range(parts))
        yield _SIDE_BY_SIDE[1], (Sharding(tuple(pieces), owned),) * 2


def _rows_alike(problem: Problem) -> list[range]:
    """Cut the sequence where the pattern's edges are and rows begin to have more or less work."""
    blocks = split(problem.seqlen_q, grain(problem.pattern))
    areas = problem.pattern.areas(blocks, [range(problem.seqlen_kv)])[:, 0].tolist()
    cuts = [at for at in range(1, len(blocks)) if areas[at] != areas[at - 1]]
    edges = [0, *(blocks[at].start for at in cuts), problem.seqlen_q]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _imbalance(problem: Problem, queries: Sharding) -> float:
    areas = np.array(problem.pattern.areas(queries.chunks, [range(problem.seqlen_kv)]))[:, 0]
    loads = [int(areas[list(mine)].sum()) for mine in queries.owned]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


# Report -------------------------------------------------------------------------------------


def _reported(planning: Planning, trial: MeshTrial) -> ReportedPlan:
    mesh = trial.mesh
    makespan_s = seconds_of(planning.machine, trial.plan)
    report: dict[str, Any] = {
        Level.REMAP: {"order": []},
        "allocation": "heads and context",
        Level.HEADS: {"inside": mesh.inside, "between": mesh.between, "stages": mesh.stages},
        Level.GATHER: {
            "parts": mesh.parts,
            "way": trial.way.value,
            "dealt": trial.dealing.name,
            "imbalance": trial.dealing.imbalance,
        },
        "layout_s": makespan_s,
        "makespan_s": makespan_s,
        "judged_s": trial.seconds,
    }
    return ReportedPlan(plan=trial.plan, report=report)
