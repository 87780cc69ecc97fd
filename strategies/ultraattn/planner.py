"""All levels in turn: remap, nodes, devices, kernels, streams.

    layout      the order of blocks and who owns them            REMAP
    allocation  which rank computes each block                   NODE, DEVICE
    plan        a tile per block, chunks and results on the way
    fused       fewer, larger kernels and transfers              KERNEL
    ordered     when each begins                                 SCHEDULE

Each layout is allocated and timed, and so are its blocks at their rows' owners, of which the other
levels are improvements. Both directions share the layout that is fastest for the two together. A
level that is off leaves what it gets as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from harness.allocation import plan_allocation
from harness.caching import cache_folder
from harness.cluster import Cluster, cluster
from harness.errors import UnsupportedError
from harness.levels import Level
from harness.passes.fuse import fused_at_once
from harness.passes.kernels import tile_kernels
from harness.plan import Plan, legs_of
from harness.problem import Direction, Problem
from harness.sharding import Sharding, split
from harness.sizes import leg_bytes
from harness.strategy import Context
from harness.stream_schedule import Method, instance_of, schedule_streams, search, tick_of
from harness.taskgraph import Timeline, graph_of
from harness.tiling import Allocation, row_owner
from patterns.excerpt import excerpt
from patterns.geometry import Chunk
from strategies.ultraattn.account import Instance, even_owners
from strategies.ultraattn.cache import Cache
from strategies.ultraattn.device import DEFAULT_S, Assigned
from strategies.ultraattn.grid import grid_of
from strategies.ultraattn.layout import Layout, by_rank, layouts, nodes_and_gpus, parts
from strategies.ultraattn.node import NO_SLACK, Nodes, Slack, TwoLevels, tile_nodes

NAME = "ultraattn"

_CLOSE = 1.002  # times that are as good as the least: then what crosses between nodes decides

FALLBACKS = ("ring", "zigzag", "stripe", "ulysses", "usp", "allgather", "owner", "grid")
"""Strategies whose plans stand beside the planner's own, with `candidates`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How to plan.

    Attributes:
        levels: Those that are on.
        seconds: CPU seconds per distinct tiling and per schedule.
        prove: Go for proofs.
        candidates: Stand other strategies' plans beside the own.
        published: Only what the paper's public code does: its own orders, diagonal blocks at their
            owners, chunks counted and not weighed, its slack, fusing at once, and nothing compared.
    """

    levels: frozenset[Level]
    seconds: float = DEFAULT_S
    prove: bool = False
    candidates: bool = False
    published: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and what each level came to.

    Attributes:
        plan: The plan.
        report: Per level, figures for people and for JSON.
    """

    plan: Plan
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One layout in one direction, allocated, planned and timed."""

    layout: Layout
    plan: Plan
    seconds: float
    tiling: TwoLevels | None  # None: every block at its row's owner


def plan_both(problem: Problem, mode: Mode, context: Context) -> dict[Direction, Planned]:
    """Plan both directions over one layout.

    Args:
        problem: What is computed.
        mode: How.
        context: The cluster, and other strategies' plans.
    """
    nodes, gpus = nodes_and_gpus(problem.cp, context.gpus_per_node)
    scene = _Scene(problem, mode, Nodes(nodes=nodes, gpus=gpus), _machine(problem, context))
    chosen = scene.best()
    found = {direction: scene.refined(trial) for direction, trial in chosen.items()}
    if mode.candidates and context.others is not None:
        return _or_others(scene, found, context.others)
    return found


def _machine(problem: Problem, context: Context) -> Cluster:
    """Return the cluster, or the default one, with as many nodes as the ranks need."""
    base = context.cluster or cluster()
    per_node = context.gpus_per_node
    nodes = max(-(-problem.cp // per_node), 1)
    return base if context.cluster else replace(base, gpus_per_node=per_node, nodes=nodes)


class _Scene:
    """What all steps of one planning share."""

    def __init__(self, problem: Problem, mode: Mode, shape: Nodes, machine: Cluster) -> None:
        self.problem = problem
        self.mode = mode
        self.machine = machine
        self.cache = Cache(cache_folder() / "tiles")
        ratio = machine.nvlink.bandwidth_bytes_per_s / machine.nic.bandwidth_bytes_per_s
        weighed = shape.nodes > 1 and not mode.published
        self.shape = replace(shape, inside_speed=ratio if weighed else None)

    def best(self) -> dict[Direction, _Trial]:
        """Return the trials of the layout that takes the least time in both directions."""
        remap = Level.REMAP in self.mode.levels
        found = layouts(self.problem, self.shape.nodes, self.shape.gpus, remap=remap)
        tried = [pair for layout in self._published(list(found)) for pair in self._pairs(layout)]
        times = [sum(trial.seconds for trial in both.values()) for both in tried]
        close = [both for both, s in zip(tried, times, strict=True) if s <= min(times) * _CLOSE]
        return min(close, key=lambda both: sum(map(self._crossing, both.values())))

    def _crossing(self, trial: _Trial) -> int:
        """Return the bytes that cross between nodes."""
        gpus = self.shape.gpus
        return sum(
            leg_bytes(trial.plan, leg)
            for task in trial.plan.tasks
            for leg in legs_of(task)
            if leg.src.rank // gpus != leg.dst.rank // gpus
        )

    def _published(self, found: list[Layout]) -> list[Layout]:
        """Return the one layout of the public code: the pattern's own order, if it has one."""
        if not self.mode.published:
            return found
        own = self.problem.pattern.remap
        given = [layout for layout in found if own is not None and layout.order == own]
        return given or found[:1]

    def _pairs(self, layout: Layout) -> Iterator[dict[Direction, _Trial]]:
        """Yield trials of both directions, which must cut the tokens alike."""
        tiled = {Level.NODE, Level.DEVICE} & self.mode.levels
        if tiled:
            yield {direction: self._tiled_trial(layout, direction) for direction in Direction}
        if not tiled or not self.mode.published:
            sides = (layout.queries, layout.keys)
            rows = row_owner(*(by_rank(s, self.shape.nodes, self.shape.gpus) for s in sides))
            yield {direction: self._timed(layout, direction, rows, None) for direction in Direction}

    def _tiled_trial(self, layout: Layout, direction: Direction) -> _Trial:
        """Return the tiling, or the blocks of its grid at their rows' owners if that is faster."""
        tiling = self._tiled(layout, direction)
        trial = self._timed(layout, direction, tiling.allocation, tiling)
        if self.mode.published:
            return trial
        rows = row_owner(tiling.allocation.queries, tiling.allocation.keys)
        return min(trial, self._timed(layout, direction, rows, None), key=lambda t: t.seconds)

    def _timed(
        self,
        layout: Layout,
        direction: Direction,
        allocation: Allocation,
        tiling: TwoLevels | None,
    ) -> _Trial:
        plan = plan_allocation(
            self.problem, NAME, direction, allocation, gpus_per_node=self.shape.gpus
        )
        return _Trial(layout=layout, plan=plan, seconds=self._quick_s(plan), tiling=tiling)

    def _quick_s(self, plan: Plan) -> float:
        """Return about what a plan takes: ordered by one list, if it will be scheduled."""
        if Level.SCHEDULE not in self.mode.levels:
            return self.seconds(plan)
        graph = graph_of(plan, self.machine)
        tick_s = tick_of(graph)
        found = search(instance_of(graph, tick_s), method=Method.CRITICAL_PATH)
        return found.makespan * tick_s

    def _tiled(self, layout: Layout, direction: Direction) -> TwoLevels:
        mode = self.mode
        return tile_nodes(
            self.problem,
            direction,
            self.shape,
            (layout.queries, layout.keys),
            levels=mode.levels,
            cost=None if self.shape.nodes == 1 else partial(self._block_s, direction),
            shipped=not mode.published,
            seconds=mode.seconds,
            prove=mode.prove,
            cache=self.cache,
            slack=published_slack(self.problem, self.shape) if mode.published else NO_SLACK,
            fix_diagonal=mode.published,
        )

    def _block_s(
        self, direction: Direction, row: Sequence[Chunk], column: Sequence[Chunk], found: Assigned
    ) -> float:
        """Return the simulated seconds of a node's block, as if it were all that there is."""
        gpus = self.shape.gpus
        pattern = excerpt(self.problem.pattern, row, column)
        part = replace(self.problem, pattern=pattern, cp=gpus)
        queries, keys = (_dealt([len(piece) for piece in side], gpus) for side in (row, column))
        allocation = Allocation(queries=queries, keys=keys, cells=found.cells)
        return self.seconds(plan_allocation(part, "block", direction, allocation))

    def seconds(self, plan: Plan) -> float:
        """Return the makespan of a plan in its order."""
        return Timeline(graph_of(plan, self.machine)).makespan

    def refined(self, trial: _Trial) -> Planned:
        """Fuse and schedule a trial, and report on all levels."""
        mode, plan, makespan_s = self.mode, trial.plan, trial.seconds
        if Level.SCHEDULE in mode.levels:
            listed = schedule_streams(plan, self.machine, method=Method.CRITICAL_PATH)
            plan = listed.scheduled.plan
        report: dict[str, Any] = {
            Level.REMAP: {"order": list(trial.layout.order)},
            **_tilings(trial.tiling),
            "layout_s": trial.seconds,
        }
        if Level.KERNEL in mode.levels:
            if mode.published:
                before, plan = plan, fused_at_once(plan)
                makespan_s, kept = self.seconds(plan), len(before.tasks) - len(plan.tasks)
            else:
                improved = tile_kernels(plan, self.machine)
                plan, makespan_s, kept = improved.plan, improved.after_s, len(improved.kept)
            report[Level.KERNEL] = {"kept": kept, "makespan_s": makespan_s}
        if Level.SCHEDULE in mode.levels:
            found = schedule_streams(plan, self.machine, time_limit_s=mode.seconds)
            plan, makespan_s = found.scheduled.plan, found.makespan_s
            report[Level.SCHEDULE] = {
                "makespan_s": found.makespan_s,
                "bound_s": found.bound_s,
                "gap": found.gap,
                "proved": found.proved,
                "source": found.source,
                "seconds": found.seconds,
            }
        elif mode.published:
            first = schedule_streams(plan, self.machine, method=Method.BREADTH_FIRST)
            plan, makespan_s = first.scheduled.plan, first.makespan_s
        report["makespan_s"] = makespan_s
        return Planned(plan=plan, report=report)


def _dealt(lengths: Sequence[int], gpus: int) -> Sharding:
    """Return pieces of these lengths, side by side and dealt evenly in order."""
    edges = [0, *accumulate(lengths)]
    owners = even_owners(len(lengths), gpus)
    return Sharding(
        tuple(range(a, b) for a, b in pairwise(edges)),
        tuple(tuple(i for i, owner in enumerate(owners) if owner == g) for g in range(gpus)),
    )


def _tilings(tiling: TwoLevels | None) -> dict[str, Any]:
    """Return what the tilings of nodes and devices came to."""
    if tiling is None:
        return {"allocation": "row owner"}
    return {
        "allocation": "tiled",
        Level.NODE: _solved(tiling.instance, tiling.nodes),
        Level.DEVICE: [_solved(*block) for block in tiling.blocks],
    }


def _solved(instance: Instance, found: Assigned) -> dict[str, Any]:
    unit = instance.weights.unit
    return {
        "blocks": len(instance.blocks),
        "devices": instance.devices,
        "cap": instance.cap,
        "value": found.value / unit,
        "bound": found.bound / unit,
        "volume": found.volume / unit,
        "gap": found.gap,
        "status": found.status.value,
        "source": found.source,
        "seconds": found.seconds,
    }


def published_slack(problem: Problem, shape: Nodes) -> Slack:
    """Return the work beyond the cap that the public code allows, in half blocks.

    Source: UltraAttn (SC'25), the public code, `workload_partition.py:270-470`: inside a node half
    a block for 8 GPUs and 22 blocks of work, and for causal; between nodes a block for 2 nodes
    unless causal, and half a block for 8 nodes if causal.
    """
    size = parts(problem.pattern, 1, shape.gpus)
    chunks = [split(length, size) for length in (problem.seqlen_q, problem.seqlen_kv)]
    grid = grid_of(problem.pattern, *chunks)
    causal = problem.pattern.text.startswith("causal")
    streaming = shape.gpus == 8 and grid.full == 2 and grid.total == 2 * 22
    node = 2 * (shape.nodes == 2) if not causal else int(shape.nodes == 8)
    return Slack(device=int(causal or streaming), node=node)


def _or_others(
    scene: _Scene,
    own: dict[Direction, Planned],
    others: Callable[[str, Problem, Direction], Plan],
) -> dict[Direction, Planned]:
    """Return the plans of another strategy if they take less time in both directions together."""
    times = {NAME: sum(each.report["makespan_s"] for each in own.values())}
    plans = {}
    for name in FALLBACKS:
        try:
            both = {direction: others(name, scene.problem, direction) for direction in Direction}
        except UnsupportedError:
            continue
        plans[name] = both
        times[name] = sum(map(scene.seconds, both.values()))
    best = min(times, key=times.__getitem__)
    considered = {"candidates_s": times, "fallback": None if best == NAME else best}
    if best == NAME:
        return {
            direction: replace(each, report={**each.report, **considered})
            for direction, each in own.items()
        }
    return {
        direction: Planned(
            plan=plan,
            report={**considered, "makespan_s": scene.seconds(plan)},
        )
        for direction, plan in plans[best].items()
    }
