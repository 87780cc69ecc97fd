"""Trace of a plan's run: the same type for simulated and measured runs.

A trace is a list of spans: on which rank and stream which task was under way, from when to when.
All figures of a run come from its spans.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest
from typing import NamedTuple, Protocol

from harness.plan.grid import label
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Collective, Task, legs_of, ranks_of
from harness.simulate.intervals import gaps, outside, union
from harness.simulate.queues import LINK_STREAMS, Stream

_SENDING = {
    Stream.NVLINK_OUT: "nvlink",
    Stream.NIC_OUT: "nic",
    Stream.HOST_OUT: "host",
    Stream.HOST_IN: "host",  # both ends of a host link are one rank, so nothing counts twice
    Stream.TRANSFER: "transfer",
}
TILE = "tile"
"""The kind of a span that attends."""


class TraceSource(StrEnum):
    """How a trace was made."""

    SIMULATED = "simulated"
    MEASURED = "measured"


class Span(NamedTuple):
    """One task on one stream of one rank.

    Attributes:
        rank: Whose stream.
        stream: Which.
        task: The task's id in its plan.
        kind: The task's kind (`kind_of`), or `copy` and `launch` for its parts of these kinds.
        start_s: Seconds since the run began.
        end_s: The same; not before `start_s`.
        size_bytes: Bytes that it moves over a link, at both ends; on TRANSFER, those that the rank
            sends. 0 for compute.
    """

    rank: int
    stream: Stream
    task: int
    kind: str
    start_s: float
    end_s: float
    size_bytes: int = 0


@dataclass(frozen=True)
class Trace:
    """A whole run.

    Attributes:
        strategy: Name of the plan's strategy, with its options.
        direction: Forward or backward, as text.
        cp: Ranks.
        source: Simulated or measured.
        machine: Cluster or machine that it ran on.
        calibration: Where its seconds come from.
        labels: A short name of every task, by id.
        spans: Its spans.
        peak_memory_bytes: Per rank, where the caller knows it.
    """

    strategy: str
    direction: str
    cp: int
    source: TraceSource
    machine: str
    calibration: str
    labels: tuple[str, ...]
    spans: tuple[Span, ...]
    peak_memory_bytes: tuple[int, ...] | None = None

    @cached_property
    def makespan_s(self) -> float:
        """End of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def busy_s(self) -> dict[tuple[int, Stream], float]:
        """Seconds that each used stream of each rank is busy."""
        busy: dict[tuple[int, Stream], float] = {}
        for span in self.spans:
            key = (span.rank, span.stream)
            busy[key] = busy.get(key, 0.0) + span.end_s - span.start_s
        return busy

    @cached_property
    def transfer_s(self) -> tuple[float, ...]:
        """Per rank, the time during which some transfer that it takes part in is under way."""
        return tuple(sum(b - a for a, b in moving) for moving, _ in self._activity)

    @cached_property
    def exposed_comm_s(self) -> tuple[float, ...]:
        """Per rank, the part of `transfer_s` during which it computes nothing.

        Local copies count as computing. A rank that has finished and only passes on what others
        need is exposed too: its time is lost to communication all the same.
        """
        return tuple(outside(moving, computing) for moving, computing in self._activity)

    @property
    def exposed_comm_max_s(self) -> float:
        """The most exposed rank's seconds."""
        return max(self.exposed_comm_s, default=0.0)

    @property
    def exposed_comm_mean_s(self) -> float:
        """The mean over ranks."""
        return sum(self.exposed_comm_s) / self.cp

    @property
    def overlap(self) -> float | None:
        """Share of all ranks' transfer time that runs beside compute; None without transfers."""
        total = sum(self.transfer_s)
        return 1.0 - sum(self.exposed_comm_s) / total if total else None

    @property
    def imbalance_total(self) -> float:
        """Seconds of tiles of the busiest rank over the mean of all ranks, >= 1; 1 without any."""
        work = [sum(seconds) for seconds in self._tiles]
        return max(work) * self.cp / sum(work) if sum(work) else 1.0

    @property
    def imbalance_lockstep(self) -> float:
        """The same if ranks waited for one another after each rank's n-th tile."""
        total = sum(map(sum, self._tiles))
        longest = sum(map(max, zip_longest(*self._tiles, fillvalue=0.0)))
        return longest * self.cp / total if total else 1.0

    @cached_property
    def link_bytes(self) -> dict[str, int]:
        """Bytes that crossed each class of links, counted once."""
        total: dict[str, int] = {}
        for span in self.spans:
            if (link := _SENDING.get(span.stream)) is not None:
                total[link] = total.get(link, 0) + span.size_bytes
        return total

    def utilisation(self, streams: Iterable[Stream], ranks: int | None = None) -> float:
        """Mean share of the makespan during which streams of these kinds are busy.

        Args:
            streams: Which, on every rank.
            ranks: Over how many ranks; all of the run's by default.
        """
        kinds = frozenset(streams)
        busy = sum(seconds for (_, stream), seconds in self.busy_s.items() if stream in kinds)
        whole = self.makespan_s * len(kinds) * (ranks or self.cp)
        return busy / whole if whole else 0.0

    def summary(self) -> dict[str, object]:
        """Everything above as plain values, for JSON."""
        busy: dict[str, float] = {}
        for (_, stream), seconds in self.busy_s.items():
            busy[stream.value] = max(busy.get(stream.value, 0.0), seconds)
        peak = self.peak_memory_bytes
        return {
            "strategy": self.strategy,
            "direction": self.direction,
            "cp": self.cp,
            "source": self.source.value,
            "machine": self.machine,
            "calibration": self.calibration,
            "makespan_s": self.makespan_s,
            "busy_max_s": busy,
            "exposed_comm_max_s": self.exposed_comm_max_s,
            "exposed_comm_mean_s": self.exposed_comm_mean_s,
            "overlap": self.overlap,
            "imbalance_total": self.imbalance_total,
            "imbalance_lockstep": self.imbalance_lockstep,
            "link_bytes": self.link_bytes,
            "peak_memory_bytes": max(peak) if peak else None,
        }

    @cached_property
    def _activity(self) -> list[tuple[list[tuple[float, float]], list[tuple[float, float]]]]:
        """Per rank, when it moves and when it computes, as disjoint ascending intervals."""
        moving: list[list[tuple[float, float]]] = [[] for _ in range(self.cp)]
        computing: list[list[tuple[float, float]]] = [[] for _ in range(self.cp)]
        for span in self.spans:
            if span.stream in LINK_STREAMS:
                moving[span.rank].append((span.start_s, span.end_s))
            elif span.stream is Stream.COMPUTE:
                computing[span.rank].append((span.start_s, span.end_s))
        return [(union(m), union(c)) for m, c in zip(moving, computing, strict=True)]

    @cached_property
    def _tiles(self) -> list[list[float]]:
        """Per rank, the seconds of its tiles in order."""
        tiles: list[dict[int, float]] = [{} for _ in range(self.cp)]
        for span in sorted(self.spans, key=lambda span: span.start_s):
            if span.stream is Stream.COMPUTE and span.kind == TILE:
                mine = tiles[span.rank]
                mine[span.task] = mine.get(span.task, 0.0) + span.end_s - span.start_s
        return [list(mine.values()) for mine in tiles]


def task_kind(task: Task) -> str:
    """The kind of a task as spans name it: `tile`, `merge`, `transfer`, `all_to_all`, ..."""
    return task.kind.value if isinstance(task, Collective) else type(task).__name__.lower()


class MeasuredSpan(Protocol):
    """An execution's report of a task (see `harness.execute.Span`)."""

    @property
    def task(self) -> int:
        """The task's id."""

    @property
    def rank(self) -> int:
        """The rank that did its part of it."""

    @property
    def stream(self) -> str:
        """`compute`, `transfer` or `wait`."""

    @property
    def start_s(self) -> float:
        """Start, by a clock that all ranks share."""

    @property
    def end_s(self) -> float:
        """End, by the same clock."""


def measured_trace(
    program: Program,
    spans: Sequence[MeasuredSpan],
    machine: str,
    peak_memory_bytes: tuple[int, ...] | None = None,
) -> Trace:
    """Make a trace of the spans that an execution recorded, those of all ranks together.

    Time begins with the first span. A wait inside a compute task interrupts that task's span.

    Raises:
        ValueError: A span names a task, rank or stream that the plan does not have.
    """
    plan = program.plan
    begin = min((span.start_s for span in spans), default=0.0)
    waits: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        if span.stream == Stream.WAIT.value:
            waits.setdefault(span.rank, []).append((span.start_s, span.end_s))
    blocked = {rank: union(intervals) for rank, intervals in waits.items()}
    made = []
    for span in spans:
        if not 0 <= span.task < len(plan.tasks) or span.rank not in ranks_of(plan.tasks[span.task]):
            raise ValueError(f"span ({span}) must name a task of the plan and one of its ranks")
        task, stream = plan.tasks[span.task], Stream(span.stream)
        sent = 0
        if stream is Stream.TRANSFER:
            sent = sum(leg_bytes(plan, leg) for leg in legs_of(task) if leg.src.rank == span.rank)
        parts = [(span.start_s, span.end_s)]
        if stream is Stream.COMPUTE:
            parts = gaps(span.start_s, span.end_s, blocked.get(span.rank, []))
        made += [
            Span(span.rank, stream, span.task, task_kind(task), start - begin, end - begin, sent)
            for start, end in parts
        ]
    return trace_of(
        program,
        made,
        source=TraceSource.MEASURED,
        machine=machine,
        calibration="measured",
        peak_memory_bytes=peak_memory_bytes,
    )


def trace_of(
    program: Program,
    spans: Iterable[Span],
    *,
    source: TraceSource,
    machine: str,
    calibration: str,
    peak_memory_bytes: tuple[int, ...] | None = None,
) -> Trace:
    """Make a trace of a plan's spans, in order of time."""
    plan = program.plan
    return Trace(
        strategy=plan.strategy,
        direction=plan.direction.value,
        cp=plan.problem.cp,
        source=source,
        machine=machine,
        calibration=calibration,
        labels=tuple(map(label, plan.tasks)),
        spans=tuple(sorted(spans, key=lambda s: (s.start_s, s.end_s, s.rank, s.stream, s.task))),
        peak_memory_bytes=peak_memory_bytes,
    )
