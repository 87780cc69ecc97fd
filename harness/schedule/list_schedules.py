"""Start times without a solver: list schedules, their random relatives, and a lower bound.

An instance has tasks with whole durations (ticks), what each waits for, and the streams that each
holds alone while it runs. The question is in which order each stream runs its tasks, so that all
ends early. A transfer holds two streams, the sender's and the receiver's, so ranks cannot be
ordered one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise
from random import Random

from harness.plan.dependencies import topological

Starts = tuple[int, ...]
"""Per task, when it starts, ticks."""


@dataclass(frozen=True)
class StreamInstance:
    """Tasks to be ordered, with their durations, streams and dependencies.

    Attributes:
        durations: Per task, ticks, >= 0.
        streams: Per task, the streams that it holds; those of a task of no duration are dropped.
        after: Per task, the tasks that it waits for.
        moves: Per task, whether it moves data: of two with equal keys it goes first.
    """

    durations: tuple[int, ...]
    streams: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    moves: tuple[bool, ...]

    def __post_init__(self) -> None:
        """Drop the streams of tasks that do not last: nothing can overlap with them."""
        pairs = zip(self.streams, self.durations, strict=True)
        held = tuple(streams if duration else () for streams, duration in pairs)
        object.__setattr__(self, "streams", held)

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """Per task, the tasks that wait for it."""
        found: list[list[int]] = [[] for _ in self.durations]
        for task, earlier in enumerate(self.after):
            for first in earlier:
                found[first].append(task)
        return tuple(map(tuple, found))

    @cached_property
    def mirrored(self) -> "StreamInstance":
        """The same with time running backwards."""
        return StreamInstance(self.durations, self.streams, self.before, self.moves)

    @cached_property
    def sorted(self) -> tuple[int, ...]:
        """All tasks in an order in which each follows what it waits for."""
        return tuple(topological(self.after, [()] * len(self.durations)))

    @cached_property
    def on_stream(self) -> dict[int, list[int]]:
        """Per stream, its tasks."""
        found: dict[int, list[int]] = {}
        for task, streams in enumerate(self.streams):
            for stream in streams:
                found.setdefault(stream, []).append(task)
        return found

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Per task, a time before which it cannot start.

        What a task waits for on one stream runs one after another there.
        """
        ends = [0] * len(self.durations)
        heads = [0] * len(self.durations)
        for task in self.sorted:
            queues: dict[int, list[int]] = {}
            for first in self.after[task]:
                heads[task] = max(heads[task], ends[first])
                for stream in self.streams[first]:
                    queues.setdefault(stream, []).append(first)
            for queue in queues.values():
                if len(queue) > 1:
                    now = 0
                    for first in sorted(queue, key=heads.__getitem__):
                        now = max(now, heads[first]) + self.durations[first]
                    heads[task] = max(heads[task], now)
            ends[task] = heads[task] + self.durations[task]
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """Per task, a time that must pass between its end and the end of all."""
        return self.mirrored.heads

    @cached_property
    def bound(self) -> int:
        """A time before which not all can have ended: a path, or a stream's preemptive schedule."""
        path = max(map(sum, zip(self.heads, self.durations, self.tails, strict=True)), default=0)
        return max([path, *map(self._jackson, self.on_stream.values())])

    def _jackson(self, tasks: Sequence[int]) -> int:
        """The best preemptive schedule of one stream: always the ready task of the longest tail.

        Source: Jackson's preemptive schedule; Carlier, European J. of Operational Research 11
        (1982), section 2.
        """
        waiting = sorted(tasks, key=self.heads.__getitem__, reverse=True)
        ready: list[tuple[int, int]] = []  # (-tail, ticks left)
        now = most = 0
        while waiting or ready:
            if not ready:
                now = max(now, self.heads[waiting[-1]])
            while waiting and self.heads[waiting[-1]] <= now:
                task = waiting.pop()
                heappush(ready, (-self.tails[task], self.durations[task]))
            tail, left = heappop(ready)
            run = min(left, self.heads[waiting[-1]] - now) if waiting else left
            now += run
            if run < left:
                heappush(ready, (tail, left - run))
            else:
                most = max(most, now - tail)
        return most

    def makespan(self, starts: Starts) -> int:
        """Time at which all tasks have ended."""
        return max((s + d for s, d in zip(starts, self.durations, strict=True)), default=0)

    def order(self, starts: Starts) -> list[int]:
        """All tasks by start, transfers first; equal ones as they wait for one another."""
        keys = [
            (start, start + duration, not moves)
            for start, duration, moves in zip(starts, self.durations, self.moves, strict=True)
        ]
        return topological(self.after, keys)

    def left_shifted(self, order: Sequence[int]) -> Starts:
        """Start every task as soon as the order of its streams allows."""
        starts, ends = [0] * len(self.durations), [0] * len(self.durations)
        free: dict[int, int] = {}
        for task in order:
            start = max((ends[first] for first in self.after[task]), default=0)
            start = max([start, *(free.get(stream, 0) for stream in self.streams[task])])
            starts[task], ends[task] = start, start + self.durations[task]
            free.update(dict.fromkeys(self.streams[task], ends[task]))
        return tuple(starts)

    def check(self, starts: Starts) -> None:
        """Raise ValueError if a task starts too early, or two overlap on a stream."""
        for task, earlier in enumerate(self.after):
            for first in earlier:
                if starts[task] < starts[first] + self.durations[first]:
                    raise ValueError(
                        f"task {task} starts before its dependency, task {first}, has finished"
                    )
        for stream, tasks in self.on_stream.items():
            for first, second in pairwise(sorted(tasks, key=starts.__getitem__)):
                if starts[second] < starts[first] + self.durations[first]:
                    raise ValueError(f"tasks {first} and {second} overlap on stream {stream}")


def list_starts(instance: StreamInstance, keys: Sequence[float]) -> Starts:
    """Never leave a stream idle that a ready task could use; of several, the smallest key first."""
    waits = [len(earlier) for earlier in instance.after]
    ready = [0] * len(waits)
    starts = [0] * len(waits)
    free: dict[int, int] = {}
    heap = [(0, keys[task], task) for task, count in enumerate(waits) if not count]
    heapify(heap)
    while heap:
        now, key, task = heappop(heap)
        streams = instance.streams[task]
        start = max([now, *(free.get(stream, 0) for stream in streams)])
        if start > now:
            heappush(heap, (start, key, task))
            continue
        end = now + instance.durations[task]
        starts[task] = now
        free.update(dict.fromkeys(streams, end))
        for later in instance.before[task]:
            ready[later] = max(ready[later], end)
            waits[later] -= 1
            if not waits[later]:
                heappush(heap, (ready[later], keys[later], later))
    return tuple(starts)


def critical_path(instance: StreamInstance) -> Starts:
    """List scheduling, the longest path to the end first."""
    to_end = [0] * len(instance.durations)
    for task in reversed(instance.sorted):
        ahead = max((to_end[later] for later in instance.before[task]), default=0)
        to_end[task] = ahead + instance.durations[task]
    return list_starts(instance, [-length for length in to_end])


def longest_tail_first(instance: StreamInstance) -> Starts:
    """List scheduling by tails that know that what follows on one stream runs in turn."""
    to_end = [d + t for d, t in zip(instance.durations, instance.tails, strict=True)]
    return list_starts(instance, [-length for length in to_end])


def breadth_first(instance: StreamInstance) -> Starts:
    """The published baseline: a queue by the start times known when tasks were put in.

    A task is put in when all that it waits for is done, with the time at which it could then
    start. That key is not renewed when others take its streams, so the order grows stale.

    Source: the reimplementation of FlexFlow's scheduler in the code of UltraAttn (SC'25).
    """
    waits = [len(earlier) for earlier in instance.after]
    ready = [0] * len(waits)
    starts = [0] * len(waits)
    free: dict[int, int] = {}
    queue: list[tuple[int, int, int]] = []
    pushed = 0
    for task, count in enumerate(waits):
        if not count:
            queue.append((0, pushed, task))
            pushed += 1
    heapify(queue)
    while queue:
        _, _, task = heappop(queue)
        taken = (free.get(stream, 0) for stream in instance.streams[task])
        start = max([ready[task], *taken])
        end = start + instance.durations[task]
        starts[task] = start
        free.update(dict.fromkeys(instance.streams[task], end))
        for later in instance.before[task]:
            ready[later] = max(ready[later], end)
            waits[later] -= 1
            if not waits[later]:
                held = (free.get(stream, 0) for stream in instance.streams[later])
                heappush(queue, (max([ready[later], *held]), pushed, later))
                pushed += 1
    return tuple(starts)


def forward_backward(instance: StreamInstance, starts: Starts) -> Starts:
    """Schedule backwards by ends and forwards again by starts, while that gets shorter."""
    best = instance.makespan(starts)
    while True:
        back = list_starts(
            instance.mirrored,
            [-(s + d) for s, d in zip(starts, instance.durations, strict=True)],
        )
        keys = [-(s + d) for s, d in zip(back, instance.durations, strict=True)]
        again = list_starts(instance, keys)
        length = instance.makespan(again)
        if length >= best:
            return starts
        starts, best = again, length


def random_lists(instance: StreamInstance, seed: int) -> Iterator[Starts]:
    """Yield randomised list schedules without end, each improved both ways (GRASP).

    Every second one starts from the end of time, which finds what a forward list cannot: work that
    looks urgent and only delays what more depends on.
    """
    random = Random(seed)  # nothing secret: a fixed sequence
    to_end = [d + t for d, t in zip(instance.durations, instance.tails, strict=True)]
    heads = [d + h for d, h in zip(instance.durations, instance.heads, strict=True)]
    number = 0
    while True:
        noise = (0.05, 0.15, 0.4)[number // 2 % 3]
        if number % 2:
            back = list_starts(
                instance.mirrored, [-head * random.uniform(1 - noise, 1) for head in heads]
            )
            keys: list[float] = [-(s + d) for s, d in zip(back, instance.durations, strict=True)]
        else:
            keys = [-length * random.uniform(1 - noise, 1) for length in to_end]
        yield forward_backward(instance, list_starts(instance, keys))
        number += 1
