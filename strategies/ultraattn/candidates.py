"""The levels REMAP, NODE and DEVICE: allocations of blocks to ranks, planned and timed.

    remap          layouts: in which order the blocks lie, and who owns them
    node, device   tilings of a layout: which rank computes each block
    row owner      the blocks of a layout at the owners of their rows, which the tilings improve

Both directions of a problem share one layout, so a candidate has a trial of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import accumulate, pairwise

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import PLACEMENTS, Placement, Sharding, split
from harness.planning.block_assignment import Allocation, row_owner
from harness.planning.block_transfers import plan_allocation
from harness.schedule.stream_schedule import Method, search, stream_instance, tick_of
from harness.simulate.timeline import graph_of
from patterns.excerpt import excerpt
from patterns.geometry import Chunk
from strategies.ultraattn.blocks import grid_of
from strategies.ultraattn.finish import seconds_of
from strategies.ultraattn.layout import Layout, by_rank, sequence_parts
from strategies.ultraattn.nodes import (
    ROW_OWNER,
    Effort,
    Nodes,
    Rules,
    Slack,
    TwoLevels,
    tile_nodes,
)
from strategies.ultraattn.planning import NAME, Judge, Planning
from strategies.ultraattn.remap import BlockOrder
from strategies.ultraattn.solver.assign import Assigned
from strategies.ultraattn.solver.instance import even_owners


class Origin(StrEnum):
    """How a candidate came about."""

    TILED = "tiled"  # the tiling of the least time by the timeline, in each direction
    JUDGED = "tiled, by the calibration"  # the tiling of the least time by the judge
    ROW_OWNER = ROW_OWNER
    DEALT = "dealt"  # row owner, with tokens dealt as a zigzag or a stripe


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One allocation in one direction, planned and timed.

    Attributes:
        order: In which order the blocks lie, or how tokens are dealt.
        plan: A tile per block, and what is sent.
        seconds: Time of the plan, ordered by one list if it will be scheduled.
        tiling: None: every block at its row's owner.
    """

    order: BlockOrder | Placement
    plan: Plan
    seconds: float
    tiling: TwoLevels | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Trials of both directions over one layout.

    Attributes:
        origin: How it came about.
        trials: A trial of each direction.
    """

    origin: Origin
    trials: Mapping[Direction, Trial]


def tilings(planning: Planning, layout: Layout) -> Iterator[Candidate]:
    """Yield the fastest tilings of a layout, and where a calibration judges its favourites."""
    trials = {direction: _tilings(planning, layout, direction) for direction in Direction}
    fastest = {d: min(each, key=lambda trial: trial.seconds) for d, each in trials.items()}
    yield Candidate(Origin.TILED, fastest)
    judge = planning.judge
    if judge is not None and not planning.mode.published:
        liked = {d: min(each, key=partial(_judged_s, judge)) for d, each in trials.items()}
        yield Candidate(Origin.JUDGED, liked)


def row_owners(planning: Planning, layout: Layout) -> Candidate:
    """Return the blocks of a layout at their rows' owners."""
    shape = planning.shape
    sides = (by_rank(side, shape.nodes, shape.gpus) for side in (layout.queries, layout.keys))
    return _at_row_owners(planning, Origin.ROW_OWNER, layout.order, row_owner(*sides))


def dealt(planning: Planning) -> Iterator[Candidate]:
    """Yield rows at their owners, with tokens dealt so that a causal pattern is balanced."""
    problem = planning.problem
    if planning.shape.nodes > 1 or problem.seqlen_q != problem.seqlen_kv:
        return
    for placement in (Placement.ZIGZAG, Placement.STRIPE):
        sharding = PLACEMENTS[placement](problem.seqlen_q, problem.cp)
        yield _at_row_owners(planning, Origin.DEALT, placement, row_owner(sharding, sharding))


def _at_row_owners(
    planning: Planning, origin: Origin, order: BlockOrder | Placement, rows: Allocation
) -> Candidate:
    trials = {direction: _timed(planning, order, direction, rows, None) for direction in Direction}
    return Candidate(origin, trials)


def _judged_s(judge: Judge, trial: Trial) -> float:
    return judge(trial.plan)


def _tilings(planning: Planning, layout: Layout, direction: Direction) -> list[Trial]:
    """Return the tilings of a layout, and the blocks of their grid at rows' owners.

    The public code's tiling is among them: its fixed blocks leave a search less to find, so
    that it can end with more within its time.
    """
    if planning.mode.published:
        tiled = [_as_published(planning, layout, direction)]
    else:
        tiled = [_tiled(planning, layout, direction)]
        if layout == planning.public_layout:
            tiled.append(_as_published(planning, layout, direction))
    trials = [_timed(planning, layout.order, direction, t.allocation, t) for t in tiled]
    if not planning.mode.published:
        rows = row_owner(tiled[0].allocation.queries, tiled[0].allocation.keys)
        trials.append(_timed(planning, layout.order, direction, rows, None))
    return trials


def _tiled(planning: Planning, layout: Layout, direction: Direction) -> TwoLevels:
    """Return a tiling by our own rules, which weigh what is sent and both classes of links.

    Between nodes it leaves more to search than the public code's, and gets half of the time, so
    that both take little more than one would.
    """
    mode, shape, several = planning.mode, planning.shape, planning.shape.nodes > 1
    links = planning.machine
    speed = links.nvlink.bandwidth_bytes_per_s / links.nic.bandwidth_bytes_per_s
    cost = partial(_block_s, planning, direction) if several else None
    return tile_nodes(
        planning.problem,
        direction,
        replace(shape, inside_speed=speed if several else None),
        (layout.queries, layout.keys),
        Rules(levels=mode.levels, cost=cost, shipped=True),
        _effort(planning, mode.seconds / 2 if several else mode.seconds),
    )


def _as_published(planning: Planning, layout: Layout, direction: Direction) -> TwoLevels:
    """Return a tiling by the public code's rules, see `PlanningMode.published`.

    Beside our own tilings, blocks of several nodes cost what a simulation says of them.
    """
    mode, shape = planning.mode, planning.shape
    simulated = shape.nodes > 1 and not mode.published
    rules = Rules(
        levels=mode.levels,
        cost=partial(_block_s, planning, direction) if simulated else None,
        slack=published_slack(planning.problem, shape),
        fix_diagonal=True,
    )
    sides = (layout.queries, layout.keys)
    effort = _effort(planning, mode.seconds)
    return tile_nodes(planning.problem, direction, shape, sides, rules, effort)


def _effort(planning: Planning, seconds: float) -> Effort:
    return Effort(seconds=seconds, prove=planning.mode.prove, cache=planning.cache)


def _timed(
    planning: Planning,
    order: BlockOrder | Placement,
    direction: Direction,
    allocation: Allocation,
    tiling: TwoLevels | None,
) -> Trial:
    """Return the plan of an allocation, and its approximate time."""
    gpus = planning.shape.gpus
    plan = plan_allocation(
        planning.problem,
        NAME,
        direction,
        allocation,
        gpus_per_node=gpus,
        cut=planning.cut,
        align=planning.align,
    )
    return Trial(order=order, plan=plan, seconds=_quick_s(planning, plan), tiling=tiling)


def _quick_s(planning: Planning, plan: Plan) -> float:
    """Return the approximate time of a plan: ordered by one list, if it will be scheduled."""
    if not planning.schedules:
        return seconds_of(planning.machine, plan)
    graph = graph_of(plan, planning.machine)
    tick_s = tick_of(graph)
    found = search(stream_instance(graph, tick_s), method=Method.CRITICAL_PATH)
    return found.makespan * tick_s


def _block_s(
    planning: Planning,
    direction: Direction,
    row: Sequence[Chunk],
    column: Sequence[Chunk],
    found: Assigned,
) -> float:
    """Return the simulated seconds of a node's block, as if it were all that there is."""
    gpus = planning.shape.gpus
    pattern = excerpt(planning.problem.pattern, row, column)
    part = replace(planning.problem, pattern=pattern, cp=gpus)
    queries, keys = (_side_by_side([len(piece) for piece in side], gpus) for side in (row, column))
    allocation = Allocation(queries=queries, keys=keys, cells=found.cells)
    plan = plan_allocation(
        part, "block", direction, allocation, cut=planning.cut, align=planning.align
    )
    return seconds_of(planning.machine, plan)


def _side_by_side(lengths: Sequence[int], gpus: int) -> Sharding:
    """Return pieces of these lengths, side by side and dealt evenly in order."""
    edges = [0, *accumulate(lengths)]
    owners = even_owners(len(lengths), gpus)
    return Sharding(
        tuple(range(a, b) for a, b in pairwise(edges)),
        tuple(tuple(i for i, owner in enumerate(owners) if owner == g) for g in range(gpus)),
    )


def published_slack(problem: Problem, shape: Nodes) -> Slack:
    """Return the work beyond the cap that the public code allows, in half blocks.

    Source: UltraAttn (SC'25), the public code, `workload_partition.py:270-470`: inside a node half
    a block for 8 GPUs and 22 blocks of work, and for causal; between nodes a block for 2 nodes
    unless causal (a block of its GPUs: global+local has node blocks of 22 and 3 x 8, which only
    24 beside ceil(46 / 2) = 23 lets fall into two), and half a block for 8 nodes if causal.
    """
    size = sequence_parts(problem.pattern, 1, shape.gpus)
    chunks = [split(length, size) for length in (problem.seqlen_q, problem.seqlen_kv)]
    grid = grid_of(problem.pattern, *chunks)
    causal = problem.pattern.is_staircase
    streaming = shape.gpus == 8 and grid.full == 2 and grid.total == 2 * 22
    node = 2 * (shape.nodes == 2) if not causal else int(shape.nodes == 8)
    return Slack(device=int(causal or streaming), node=node)
