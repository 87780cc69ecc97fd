"""Times at which the two ends of a transfer may post it.

An end that is posted waits for the other, and on GPUs what waits holds streaming multiprocessors
(SMs) that kernels beside it lack. In a plan with a schedule it is known when a transfer begins, so
each end has an edge from a kernel of its own that ends just before. Where a long kernel runs at an
end by then, the transfer comes behind it if that means less waiting and no later end of the plan.

    kernels at the receiver    [ tile 0 ][ tile 1 ][ tile 2 ][ tile 3 ]
    posted as soon as it may   waits...............[ leg ]
    with an edge from tile 1                       [ leg ]
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.cluster.machine import Cluster
from harness.plan.dependencies import reordered
from harness.plan.plan import Plan
from harness.plan.tasks import Transfer
from harness.simulate.queues import Stream, stream_of
from harness.simulate.timeline import TaskGraph, Timeline, graph_of, issued_ahead

_SLACK = 1e-9  # of the whole time: what differs by less happens at once
Ends = tuple[int, int]
"""Source and destination rank of a transfer."""


def posted_late(plan: Plan, cluster: Cluster) -> Plan:
    """Return a plan whose transfers are posted when the other end is about to be.

    Streams keep their order and the plan its time on the cluster; the edges are for that one.

    Args:
        plan: Its tasks run in their order on every stream.
        cluster: Where it runs.
    """
    if cluster.fitted is not None and not cluster.fitted.on_gpus:
        return plan  # what waits in a process holds nothing
    graph, order = graph_of(plan, cluster), range(len(plan.tasks))
    legs = {i: task.leg for i, task in enumerate(plan.tasks) if isinstance(task, Transfer)}
    ends = {i: (leg.src.rank, leg.dst.rank) for i, leg in legs.items()}
    gates, posted = gates_of(graph, order, {i: e for i, e in ends.items() if e[0] != e[1]})
    if not gates:
        return plan
    after = [(*edges, *gates.get(task, ())) for task, edges in enumerate(graph.after)]
    gated = replace(graph, after=after)
    issued = issued_ahead(gated, Timeline(gated, posted))
    place = {task: at for at, task in enumerate(issued)}
    tasks = list(reordered(plan, issued).tasks)
    for task, more in gates.items():
        at, edges = place[task], (place[kernel] for kernel in more)
        tasks[at] = replace(tasks[at], after=tuple(sorted({*tasks[at].after, *edges})))
    return replace(plan, tasks=tuple(tasks))


def gates_of(
    graph: TaskGraph, order: Sequence[int], between: Mapping[int, Ends]
) -> tuple[dict[int, tuple[int, ...]], list[int]]:
    """Return the kernels that transfers come behind, by transfer, and an order that respects them.

    Streams keep their order, and nothing ends later in all: a transfer is put off within its slack.

    Args:
        graph: Tasks.
        order: All of them, in an order that respects `after`.
        between: The ends of the transfers between ranks.
    """
    line = Timeline(graph, order)
    order, makespan = line.order(), line.makespan
    found = _Pass(graph, _tails(graph, order), makespan, _SLACK * makespan)
    for task in order:
        found.add(task, between.get(task))
    return found.gates, order


def _tails(graph: TaskGraph, order: Sequence[int]) -> list[float]:
    """Return per task what must follow its end until all has ended, on streams in this order."""
    tails = [0.0] * len(order)
    behind: dict[int, float] = {}  # per stream, what follows the task before
    for task in reversed(order):
        tails[task] = max([tails[task], *(behind.get(s, 0.0) for s in graph.streams[task])])
        whole = graph.seconds[task] + tails[task]
        behind.update(dict.fromkeys(graph.streams[task], whole))
        for earlier in graph.after[task]:
            tails[earlier] = max(tails[earlier], graph.lags[task] + whole)
    return tails


@dataclass(slots=True)
class _Pass:
    """One way through all tasks in order, with the edges found so far."""

    graph: TaskGraph
    tails: list[float]
    makespan: float
    slack_s: float
    ends: dict[int, float] = field(default_factory=dict)
    gates: dict[int, tuple[int, ...]] = field(default_factory=dict)
    free_s: dict[int, float] = field(default_factory=dict)  # per stream, when its last task ends
    kernels: dict[int, list[int]] = field(default_factory=dict)  # per rank, in order

    def add(self, task: int, between: Ends | None) -> None:
        """Find when a task starts, and the edges of a transfer."""
        graph, streams = self.graph, self.graph.streams[task]
        ready = max([self.ends[n] for n in graph.after[task]], default=0.0) + graph.lags[task]
        start = max([ready, *(self.free_s.get(stream, 0.0) for stream in streams)])
        if between is not None:
            start = self.best_start(task, between, start, ready)
            posted = [self.posted(task, rank, start, between, ready) for rank in between]
            edges = {kernel for kernel, _ in posted if kernel is not None}
            if edges:
                self.gates[task] = tuple(sorted(edges))
        self.ends[task] = start + graph.seconds[task]
        for stream in streams:
            self.free_s[stream] = self.ends[task]
            rank, kind = stream_of(stream)
            if kind is Stream.COMPUTE:
                self.kernels.setdefault(rank, []).append(task)

    def best_start(self, task: int, between: Ends, start: float, ready: float) -> float:
        """Return when to begin: as soon as can be, or behind a kernel that runs at an end then."""
        latest = self.makespan + self.slack_s - self.tails[task] - self.graph.seconds[task]
        running = [self.ends[line[-1]] for rank in between if (line := self.kernels.get(rank))]
        starts = [start, *sorted(end for end in running if start < end <= latest)]

        def waiting(at: float) -> float:
            return sum(at - self.posted(task, rank, at, between, ready)[1] for rank in between)

        return min(starts, key=waiting)

    def posted(
        self, task: int, rank: int, start: float, between: Ends, ready: float
    ) -> tuple[int | None, float]:
        """Return the kernel behind which an end is posted, None where it need not be, and when."""
        streams = [s for s in self.graph.streams[task] if stream_of(s)[0] == rank]
        could = max(
            ready if rank == between[0] else 0.0, *(self.free_s.get(s, 0.0) for s in streams)
        )
        line = self.kernels.get(rank, [])
        at = bisect_right(line, start + self.slack_s, key=self.ends.__getitem__) - 1
        if at < 0 or self.ends[line[at]] <= could + self.slack_s:
            return None, could
        return line[at], self.ends[line[at]]
