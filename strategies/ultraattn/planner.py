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
from itertools import accumulate, chain, pairwise
from typing import Any

from harness.base.cache import cache_folder
from harness.cluster.machine import Cluster, LinkClass, link_between
from harness.cluster.presets import cluster
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import PLACEMENTS, Placement, Sharding, split
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import legs_of
from harness.planning.block_assignment import Allocation, row_owner
from harness.planning.block_transfers import plan_allocation
from harness.planning.levels import Level
from harness.planning.strategy import Context
from harness.schedule.post_late import posted_late
from harness.schedule.stream_schedule import Method, instance_of, search, tick_of
from harness.simulate.timeline import graph_of
from patterns.excerpt import excerpt
from patterns.geometry import Chunk
from strategies.ultraattn.blocks import grid_of
from strategies.ultraattn.finish import Made, as_published, seconds_of, shortest
from strategies.ultraattn.layout import (
    Layout,
    by_rank,
    layouts,
    nodes_and_gpus,
    own_layout,
    parts,
)
from strategies.ultraattn.nodes import NO_SLACK, Nodes, Slack, TwoLevels, tile_nodes
from strategies.ultraattn.remap import Order
from strategies.ultraattn.report import q_bytes, tilings
from strategies.ultraattn.selection import Times, fair, fastest, is_fair
from strategies.ultraattn.solver.assign import DEFAULT_S, Assigned
from strategies.ultraattn.solver.instance import even_owners
from strategies.ultraattn.solver.store import Cache

NAME = "ultraattn"

_NEAR = 1.1  # what may come out the faster when both are refined
_CLOSE = 1.002  # times that are as good as the least: then what crosses between nodes decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How to plan.

    Attributes:
        levels: Those that are on.
        seconds: CPU seconds per distinct tiling and per schedule.
        prove: Go for proofs.
        published: Only what the paper's public code does: its own orders, diagonal blocks at their
            owners, chunks counted and not weighed, its slack, fusing at once, and nothing compared.
    """

    levels: frozenset[Level]
    seconds: float = DEFAULT_S
    prove: bool = False
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

    @property
    def seconds(self) -> float:
        """What the plan takes by its timeline."""
        seconds: float = self.report["makespan_s"]
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One layout in one direction, allocated, planned and timed."""

    order: Order | Placement
    plan: Plan
    seconds: float
    tiling: TwoLevels | None  # None: every block at its row's owner


_Pair = dict[Direction, _Trial]
_Plans = dict[Direction, Planned]


def plan_both(problem: Problem, mode: Mode, context: Context) -> dict[Direction, Planned]:
    """Plan both directions over one layout.

    Args:
        problem: What is computed.
        mode: How.
        context: The cluster.
    """
    nodes, gpus = nodes_and_gpus(problem.cp, context.gpus_per_node)
    machine = machine_of(problem, context)
    # What a calibration knows beyond the timeline: transfers slow kernels, and more.
    judge = context.evaluate if machine.fitted is not None else None
    return _Scene(problem, mode, Nodes(nodes=nodes, gpus=gpus), machine, judge).planned()


def machine_of(problem: Problem, context: Context) -> Cluster:
    """Return the cluster, or the default one, with as many nodes as the ranks need."""
    base = context.cluster or cluster()
    per_node = context.gpus_per_node
    nodes = max(-(-problem.cp // per_node), 1)
    return base if context.cluster else replace(base, gpus_per_node=per_node, nodes=nodes)


class _Scene:
    """What all steps of one planning share."""

    def __init__(
        self,
        problem: Problem,
        mode: Mode,
        shape: Nodes,
        machine: Cluster,
        judge: Callable[[Plan], float] | None = None,
    ) -> None:
        self.problem = problem
        self.mode = mode
        self.machine = machine
        self.judge = judge and _once(judge)
        self.cache = Cache(cache_folder() / "tiles")
        self.shape = shape
        self.inside_speed = machine.nvlink.bandwidth_bytes_per_s / machine.nic.bandwidth_bytes_per_s
        self.published = own_layout(
            problem, shape.nodes, shape.gpus, remap=Level.REMAP in mode.levels
        )

    def planned(self) -> _Plans:
        """Plan both directions over the layout that takes the least time in both together.

        Rows at their owners, where tokens lie as they come or, in one node, as a zigzag or a
        stripe deals them, take no planning. Neither direction may be slower than those (see
        `fair`).
        """
        mode, shape = self.mode, (self.shape.nodes, self.shape.gpus)
        remap = Level.REMAP in mode.levels
        if mode.published:
            (only,) = self._pairs(self.published)
            return self._refined(only)
        own = layouts(self.problem, *shape, remap=remap)
        laid = [list(self._pairs(each)) for each in dict.fromkeys([*own, self.published])]
        owners, placed = laid[0][-1], list(self._placed()) if remap else []
        fast = [both for both in chain(*laid) if _no_slower(both, owners)]
        best = self._best(fast)
        found = [self._refined(best)]
        if self.judge is not None:
            liked = min(fast, key=lambda both: _total(self._judged(both)))
            if liked != best:
                found.append(self._refined(liked))
        dealt = [both for both in placed if _no_slower(both, owners)]
        if dealt:
            other = self._best(dealt)
            near = _total(_times(other)) <= _NEAR * _total(_times(best))
            simple = fastest([_times(both) for both in (owners, *placed)])
            if near or not is_fair(_times(found[0]), simple):
                found.append(self._refined(other))
        return self._chosen(found, [owners, *placed])

    def _chosen(self, found: Sequence[_Plans], plain: Sequence[_Pair]) -> _Plans:
        """Return the pair of plans of the least time, of those that are fair to both directions.

        Where a calibration judges, rows at their owners may be chosen too, as they are: what they
        do not send slows no kernel. They are refined where none of the found plans is as fast.
        """
        times, simple = list(map(self._judged, found)), list(map(self._judged, plain))
        least = fastest(simple)
        if self.judge is not None:
            rows = plain[min(range(len(plain)), key=lambda index: _total(simple[index]))]
            more = [{direction: _as_it_is(trial) for direction, trial in rows.items()}]
            if not any(is_fair(each, least) for each in times):
                more.append(_faster(more[0], self._refined(rows), self.judge))
            found, times = [*found, *more], [*times, *map(self._judged, more)]
        return found[min(fair(times, least), key=lambda index: _total(times[index]))]

    def _judged(self, both: Mapping[Direction, Planned] | _Pair) -> Times:
        """Return what plans take, by the judge if there is one."""
        if self.judge is None:
            return _times(both)
        return {direction: self.judge(each.plan) for direction, each in both.items()}

    def _placed(self) -> Iterator[_Pair]:
        """Yield rows at their owners, with tokens dealt so that a causal pattern is balanced."""
        problem = self.problem
        if self.shape.nodes > 1 or problem.seqlen_q != problem.seqlen_kv:
            return
        for placement in (Placement.ZIGZAG, Placement.STRIPE):
            dealt = PLACEMENTS[placement](problem.seqlen_q, problem.cp)
            yield self._rows(placement, row_owner(dealt, dealt))

    def _best(self, pairs: Sequence[_Pair]) -> _Pair:
        """Return the pair of the least time, and of those as good, what crosses the least."""
        totals = [_total(_times(both)) for both in pairs]
        close = [both for both, s in zip(pairs, totals, strict=True) if s <= min(totals) * _CLOSE]
        return min(close, key=lambda both: sum(map(self._crossing, both.values())))

    def _refined(self, pair: _Pair) -> _Plans:
        return {direction: self._finished(trial) for direction, trial in pair.items()}

    def _crossing(self, trial: _Trial) -> int:
        """Return the bytes that cross between nodes."""
        gpus = self.shape.gpus
        return sum(
            leg_bytes(trial.plan, leg)
            for task in trial.plan.tasks
            for leg in legs_of(task)
            if link_between(leg.src, leg.dst, gpus) is LinkClass.NIC
        )

    def _pairs(self, layout: Layout) -> Iterator[_Pair]:
        """Yield trials of both directions, which must cut the tokens alike; row owners last.

        Of the tilings the fastest, and where a calibration judges the one that it likes best.
        """
        tiled = {Level.NODE, Level.DEVICE} & self.mode.levels
        if tiled:
            trials = {direction: self._trials(layout, direction) for direction in Direction}
            quick = {d: min(each, key=lambda trial: trial.seconds) for d, each in trials.items()}
            yield quick
            judge = self.judge
            if judge is not None and not self.mode.published:
                yield {d: min(each, key=lambda t: judge(t.plan)) for d, each in trials.items()}
        if not tiled or not self.mode.published:
            sides = (layout.queries, layout.keys)
            rows = row_owner(*(by_rank(s, self.shape.nodes, self.shape.gpus) for s in sides))
            yield self._rows(layout.order, rows)

    def _rows(self, order: Order | Placement, rows: Allocation) -> _Pair:
        return {direction: self._timed(order, direction, rows, None) for direction in Direction}

    def _trials(self, layout: Layout, direction: Direction) -> list[_Trial]:
        """Return the tilings, and the blocks of their grid at rows' owners.

        The public code's tiling is among them: its fixed blocks leave a search less to find, so
        that it can end with more within its time.
        """
        kinds = [True] if self.mode.published else [False] + [True] * (layout == self.published)
        tilings = [self._tiled(layout, direction, published=kind) for kind in kinds]
        trials = [self._timed(layout.order, direction, t.allocation, t) for t in tilings]
        if not self.mode.published:
            rows = row_owner(tilings[0].allocation.queries, tilings[0].allocation.keys)
            trials.append(self._timed(layout.order, direction, rows, None))
        return trials

    def _timed(
        self,
        order: Order | Placement,
        direction: Direction,
        allocation: Allocation,
        tiling: TwoLevels | None,
    ) -> _Trial:
        plan = plan_allocation(
            self.problem, NAME, direction, allocation, gpus_per_node=self.shape.gpus
        )
        return _Trial(order=order, plan=plan, seconds=self._quick_s(plan), tiling=tiling)

    def _quick_s(self, plan: Plan) -> float:
        """Return about what a plan takes: ordered by one list, if it will be scheduled."""
        if Level.SCHEDULE not in self.mode.levels:
            return self.seconds(plan)
        graph = graph_of(plan, self.machine)
        tick_s = tick_of(graph)
        found = search(instance_of(graph, tick_s), method=Method.CRITICAL_PATH)
        return found.makespan * tick_s

    def _tiled(self, layout: Layout, direction: Direction, *, published: bool) -> TwoLevels:
        """Return a tiling by the public code's rules (see `Mode.published`), or by our own.

        Between nodes ours, which leave more to search, get half of the time, so that both take
        little more than one would.
        """
        mode = self.mode
        weighed = self.shape.nodes > 1 and not published
        return tile_nodes(
            self.problem,
            direction,
            replace(self.shape, inside_speed=self.inside_speed if weighed else None),
            (layout.queries, layout.keys),
            levels=mode.levels,
            cost=None
            if self.shape.nodes == 1 or mode.published
            else partial(self._block_s, direction),
            shipped=not published,
            seconds=mode.seconds / 2 if weighed else mode.seconds,
            prove=mode.prove,
            cache=self.cache,
            slack=published_slack(self.problem, self.shape) if published else NO_SLACK,
            fix_diagonal=published,
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
        return seconds_of(self.machine, plan)

    def _finished(self, trial: _Trial) -> Planned:
        """Fuse and schedule a trial, and report on all levels.

        Late transfers, or all of it, are left out where a calibration knows better.
        """
        mode = self.mode
        finish = as_published if mode.published else shortest
        bare = Made(plan=trial.plan, seconds=trial.seconds)
        made = finish(bare, self.machine, mode.levels, mode.seconds)
        report = {**_reported(trial), **made.said, "makespan_s": made.seconds}
        found = Planned(plan=made.plan, report=report)
        if mode.published or Level.SCHEDULE not in mode.levels:
            return found
        late = replace(found, plan=posted_late(made.plan, self.machine))
        if self.judge is None:
            return late
        judge = self.judge
        return min(late, found, _as_it_is(trial), key=lambda each: judge(each.plan))


def _no_slower(one: _Pair, other: _Pair) -> bool:
    return all(one[direction].seconds <= other[direction].seconds for direction in Direction)


def _total(times: Times) -> float:
    return sum(times.values())


def _times(both: Mapping[Direction, Planned] | _Pair) -> Times:
    return {direction: each.seconds for direction, each in both.items()}


def _once(judge: Callable[[Plan], float]) -> Callable[[Plan], float]:
    """Judge each plan once: a judgement is a proof and a simulation."""
    known: dict[int, tuple[Plan, float]] = {}  # by identity, of plans that are held here

    def judged(plan: Plan) -> float:
        if id(plan) not in known:
            known[id(plan)] = plan, judge(plan)
        return known[id(plan)][1]

    return judged


def _faster(one: _Plans, other: _Plans, judge: Callable[[Plan], float]) -> _Plans:
    """Return of each direction the plan that takes less time."""
    return {d: min(one[d], other[d], key=lambda each: judge(each.plan)) for d in Direction}


def _as_it_is(trial: _Trial) -> Planned:
    return Planned(plan=trial.plan, report={**_reported(trial), "refined": False})


def _reported(trial: _Trial) -> dict[str, Any]:
    """Return what the levels up to the tiling came to."""
    return {
        Level.REMAP: _said(trial.order),
        **tilings(trial.tiling, q_bytes(trial.plan)),
        "layout_s": trial.seconds,
        "makespan_s": trial.seconds,
    }


def _said(order: Order | Placement) -> dict[str, Any]:
    if isinstance(order, Placement):
        return {"order": [], "placement": order.value}
    return {"order": list(order)}


def _dealt(lengths: Sequence[int], gpus: int) -> Sharding:
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
    size = parts(problem.pattern, 1, shape.gpus)
    chunks = [split(length, size) for length in (problem.seqlen_q, problem.seqlen_kv)]
    grid = grid_of(problem.pattern, *chunks)
    causal = problem.pattern.is_staircase
    streaming = shape.gpus == 8 and grid.full == 2 and grid.total == 2 * 22
    node = 2 * (shape.nodes == 2) if not causal else int(shape.nodes == 8)
    return Slack(device=int(causal or streaming), node=node)
