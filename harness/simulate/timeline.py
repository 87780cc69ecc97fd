"""The tasks of a plan as a graph with times, and a timeline that stays right while tasks merge.

A task holds its streams for its whole duration; each stream runs its tasks first in, first out. A
collective is one node here: after a lag, its latency, it holds every port that one of its legs
uses, for as long as the busiest. So times equal the simulator's where a plan has no collectives,
and are close with them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf

from harness.cluster.machine import Cluster, Runtime
from harness.plan.dependencies import needs, resolved, topological
from harness.plan.plan import Plan
from harness.plan.tasks import Collective, Transfer
from harness.simulate.queues import Stream, stream_of
from harness.simulate.streams import work_of

_ROUNDS = 64
"""Times that a start may change in one update before it must be going round in a circle."""


@dataclass(slots=True)
class TaskGraph:
    """Tasks, what they truly wait for, and what they hold.

    Attributes:
        seconds: Per task, its duration.
        lags: Per task, seconds that pass before it holds its streams, once it need not wait.
        streams: Per task, the numbers of the streams that it holds (see `queues.stream_of`).
        after: Per task, the tasks that it waits for in every order.
        moves: Per task, whether it moves data; of two that could start, it goes first.
    """

    seconds: list[float]
    lags: list[float]
    streams: list[tuple[int, ...]]
    after: list[tuple[int, ...]]
    moves: list[bool]


def graph_of(plan: Plan, cluster: Cluster) -> TaskGraph:
    """Price a plan's tasks on a cluster by the quick clock (`task_costs`)."""
    work = work_of(resolved(plan), cluster, Runtime.GRAPH)
    count = len(plan.tasks)
    seconds, lags = [0.0] * count, [0.0] * count
    streams: list[tuple[int, ...]] = [()] * count
    busy: dict[int, dict[int, float]] = {}
    for activity in work.activities:
        task = activity.task
        if isinstance(plan.tasks[task], Collective):
            ports = busy.setdefault(task, {})
            if not activity.streams:
                lags[task] += activity.seconds
            for stream in activity.streams:
                ports[stream] = ports.get(stream, 0.0) + activity.seconds
        else:
            seconds[task], streams[task] = activity.seconds, activity.streams
    for task, ports in busy.items():
        seconds[task] = max(ports.values(), default=0.0)
        streams[task] = tuple(sorted(ports))
    moves = [isinstance(task, Transfer | Collective) for task in plan.tasks]
    return TaskGraph(seconds, lags, streams, needs(plan), moves)


class Timeline:
    """Start times on first-in-first-out streams, kept right while nodes replace others.

    Args:
        graph: Tasks; more nodes are added as tasks merge.
        order: All tasks in an order that respects `graph.after`; streams run in it.
    """

    def __init__(self, graph: TaskGraph, order: Sequence[int] | None = None) -> None:
        count = len(graph.seconds)
        self.seconds = list(graph.seconds)
        self.lags = list(graph.lags)
        self.streams = list(graph.streams)
        self.after: list[set[int]] = [set(earlier) for earlier in graph.after]
        self.before: list[set[int]] = [set() for _ in range(count)]
        for node, earlier in enumerate(self.after):
            for first in earlier:
                self.before[first].add(node)
        self.alive = [True] * count
        self.left: list[dict[int, int]] = [{} for _ in range(count)]
        self.right: list[dict[int, int]] = [{} for _ in range(count)]
        self.last: dict[int, int] = {}
        self.end = [0.0] * count
        order = range(count) if order is None else order
        queues: dict[int, list[int]] = {}
        for node in order:
            for stream in self.streams[node]:
                queues.setdefault(stream, []).append(node)
        for stream, queue in queues.items():
            self.last[stream] = queue[-1]
            for first, second in pairwise(queue):
                self.right[first][stream], self.left[second][stream] = second, first
        for node in order:
            self.end[node] = self.start(node) + self.seconds[node]

    def start(self, node: int) -> float:
        """Time from which a node holds its streams: dependencies ended, lag over."""
        ends = self.end
        ready = max([ends[first] for first in self.after[node]], default=0.0) + self.lags[node]
        free = max([ends[first] for first in self.left[node].values()], default=0.0)
        return max(ready, free)

    @property
    def makespan(self) -> float:
        """Time at which all tasks have ended."""
        return max(self.end, default=0.0)

    @property
    def idle(self) -> float:
        """The sum of the times at which streams fall idle for good."""
        return sum([self.end[node] for node in self.last.values()])

    def order(self) -> list[int]:
        """The nodes that are there, in an order that respects edges and streams."""
        nodes = [node for node, there in enumerate(self.alive) if there]
        place = {node: at for at, node in enumerate(nodes)}
        before = [
            [place[first] for first in (*self.after[node], *self.left[node].values())]
            for node in nodes
        ]
        keys = [(self.end[node] - self.seconds[node],) for node in nodes]
        return [nodes[at] for at in topological(before, keys)]

    def replace(
        self,
        members: Sequence[int],
        seconds: float,
        streams: tuple[int, ...],
        *,
        late: bool,
        lag_s: float = 0.0,
        limit_s: float = inf,
    ) -> "Change | None":
        """Let one new node stand for several.

        It waits for all that they waited for, and what waited for one of them waits for it. On
        each stream it takes the place of the last member there, or of the first.

        Returns:
            The change, to be undone or kept; None, and all as before, if something would end
            after `limit_s` or wait for itself.
        """
        gone = set(members)
        if any(not gone.isdisjoint(self.after[member]) for member in members):
            return None
        change = Change(self, members)
        node = change.node
        self.seconds.append(seconds)
        self.lags.append(lag_s)
        self.streams.append(streams)
        self.alive.append(True)
        self.left.append({})
        self.right.append({})
        # About when it will end: nodes are settled in the order of their old ends.
        self.end.append((max if late else min)(self.end[member] for member in members))
        self.after.append({n for m in members for n in self.after[m]} - gone)
        self.before.append({n for m in members for n in self.before[m]} - gone)
        for earlier in self.after[node]:
            self.before[earlier] -= gone
            self.before[earlier].add(node)
        for later in self.before[node]:
            self.after[later] -= gone
            self.after[later].add(node)
        dirty = {node, *self.before[node]}
        for stream in {s for m in members for s in self.streams[m]}:
            here = sorted((m for m in members if stream in self.streams[m]), key=self._at)
            anchor = here[-1] if late else here[0]
            for member in here:
                if member != anchor:
                    dirty |= self._link(
                        stream, self.left[member].get(stream), self.right[member].get(stream)
                    )
            first, second = self.left[anchor].get(stream), self.right[anchor].get(stream)
            if stream in streams:
                dirty |= self._link(stream, first, node)
                dirty |= self._link(stream, node, second)
            else:
                dirty |= self._link(stream, first, second)
        for member in members:
            self.alive[member] = False
            change.keep(member)
            self.end[member] = 0.0
        if not self._settle(dirty, change, limit_s):
            change.undo()
            return None
        return change

    def _at(self, node: int) -> tuple[float, int]:
        return self.end[node] - self.seconds[node], node

    def _link(self, stream: int, first: int | None, second: int | None) -> set[int]:
        """Let one follow the other on a stream; return whose start may change."""
        if first is not None:
            if second is None:
                self.right[first].pop(stream, None)
                self.last[stream] = first
            else:
                self.right[first][stream] = second
        if second is None:
            if first is None:
                self.last.pop(stream, None)
            return set()
        if first is None:
            self.left[second].pop(stream, None)
        else:
            self.left[second][stream] = first
        return {second}

    def _settle(self, dirty: Iterable[int], change: "Change", limit_s: float) -> bool:
        """Make all ends right again, from the nodes that may be wrong onwards."""
        heap = [(self.end[node], node) for node in set(dirty) if self.alive[node]]
        heapify(heap)
        waiting = {node for _, node in heap}
        turns: dict[int, int] = {}
        while heap:
            _, node = heappop(heap)
            if node not in waiting:
                continue
            waiting.discard(node)
            end = self.start(node) + self.seconds[node]
            if end == self.end[node]:
                continue
            turns[node] = turns.get(node, 0) + 1
            if end > limit_s or turns[node] > _ROUNDS:
                return False
            change.keep(node)
            self.end[node] = end
            for later in (*self.before[node], *self.right[node].values()):
                if later not in waiting:
                    waiting.add(later)
                    heappush(heap, (max(self.end[later], end), later))
        return True


class Change:
    """Record of a replacement, so that it can be undone."""

    def __init__(self, timeline: Timeline, members: Sequence[int]) -> None:
        self.timeline = timeline
        self.members = tuple(members)
        self.node = len(timeline.seconds)
        self._ends: dict[int, float] = {}
        self._sides: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
        self._edges: dict[int, tuple[set[int], set[int]]] = {}
        self._last: dict[int, int | None] = {}
        for node in set(self._touched()):
            self._sides[node] = dict(timeline.left[node]), dict(timeline.right[node])
            self._edges[node] = set(timeline.after[node]), set(timeline.before[node])
        for member in self.members:
            for stream in timeline.streams[member]:
                self._last[stream] = timeline.last.get(stream)

    def _touched(self) -> Iterator[int]:
        line = self.timeline
        for member in self.members:
            yield member
            yield from line.after[member]
            yield from line.before[member]
            yield from line.left[member].values()
            yield from line.right[member].values()

    def keep(self, node: int) -> None:
        """Remember when a node ended before."""
        self._ends.setdefault(node, self.timeline.end[node])

    def undo(self) -> None:
        """Restore the timeline."""
        line, node = self.timeline, self.node
        for values in (
            line.seconds,
            line.lags,
            line.streams,
            line.alive,
            line.left,
            line.right,
            line.end,
        ):
            del values[node:]
        del line.after[node:], line.before[node:]
        for touched, (left, right) in self._sides.items():
            line.left[touched], line.right[touched] = left, right
        for touched, (after, before) in self._edges.items():
            line.after[touched], line.before[touched] = after, before
        for stream, last in self._last.items():
            if last is None:
                line.last.pop(stream, None)
            else:
                line.last[stream] = last
        for touched, end in self._ends.items():
            if touched < node:
                line.end[touched] = end
        for member in self.members:
            line.alive[member] = True


def issued_ahead(graph: TaskGraph, line: Timeline) -> list[int]:
    """Let whoever computes while a transfer begins issue it before, not after, that computation.

    Streams keep their order, so on streams that run beside one another no time changes. Where one
    thread issues and computes, as on a CPU, a transfer no longer waits for a kernel to return; its
    buffer is held for as much longer.

    Args:
        graph: Tasks.
        line: When they run in some order; none of them replaced.

    Returns:
        All tasks, in an order that respects `after` and the streams of `line`.
    """
    tasks = range(len(graph.seconds))
    starts, ends = [line.start(task) for task in tasks], line.end
    before = [(*graph.after[task], *line.left[task].values()) for task in tasks]
    computing: dict[int, list[int]] = {}  # rank -> its computations, in order
    for task in sorted(tasks, key=lambda task: (starts[task], ends[task])):
        for stream in graph.streams[task]:
            rank, kind = stream_of(stream)
            if kind is Stream.COMPUTE:
                computing.setdefault(rank, []).append(task)
    keys = [(start, not moves) for start, moves in zip(starts, graph.moves, strict=True)]
    for task, moves in enumerate(graph.moves):
        for rank in {stream_of(stream)[0] for stream in graph.streams[task]} if moves else ():
            queue = computing.get(rank, [])
            at = bisect_left(queue, starts[task], key=starts.__getitem__) - 1
            if at >= 0 and ends[queue[at]] > starts[task]:
                keys[task] = min(keys[task], (starts[queue[at]], False))
    return topological(before, keys)
