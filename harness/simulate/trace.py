"""What happened when a plan ran, simulated or measured: the same type for both.

A trace is a list of spans: on which rank and stream which task was under way, from when to when.
All figures of a run come from its spans.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest
from textwrap import wrap
from typing import NamedTuple, Protocol

from harness.base.json_fields import json_text
from harness.plan.grid import label
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Collective, Task, legs_of, ranks_of


class Stream(StrEnum):
    """What a rank does one thing at a time on.

    The simulator knows every port apart. A measured run reports TRANSFER, the time in which a rank
    issues its part of a transfer, and WAIT, the time in which it is blocked until one has arrived.
    """

    __hash__ = str.__hash__  # an enum's own hash is a python function, and spans are many

    COMPUTE = "compute"
    NVLINK_OUT = "nvlink_out"
    NVLINK_IN = "nvlink_in"
    NIC_OUT = "nic_out"
    NIC_IN = "nic_in"
    HOST_OUT = "host_out"
    HOST_IN = "host_in"
    TRANSFER = "transfer"
    WAIT = "wait"
    LAUNCH = "launch"


LINK_STREAMS = frozenset(set(Stream) - {Stream.COMPUTE, Stream.LAUNCH})
"""Streams on which bytes move between places."""

_SENDING = {
    Stream.NVLINK_OUT: "nvlink",
    Stream.NIC_OUT: "nic",
    Stream.HOST_OUT: "host",
    Stream.HOST_IN: "host",  # both ends of a host link are one rank, so nothing counts twice
    Stream.TRANSFER: "transfer",
}
_TILE = "tile"


class Source(StrEnum):
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
        spans: What happened.
        peak_memory_bytes: Per rank, where the caller knows it.
    """

    strategy: str
    direction: str
    cp: int
    source: Source
    machine: str
    calibration: str
    labels: tuple[str, ...]
    spans: tuple[Span, ...]
    peak_memory_bytes: tuple[int, ...] | None = None

    @cached_property
    def makespan_s(self) -> float:
        """When the last span ends."""
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
        return tuple(_outside(moving, computing) for moving, computing in self._activity)

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
        return [(_union(m), _union(c)) for m, c in zip(moving, computing, strict=True)]

    @cached_property
    def _tiles(self) -> list[list[float]]:
        """Per rank, the seconds of its tiles in order."""
        tiles: list[dict[int, float]] = [{} for _ in range(self.cp)]
        for span in sorted(self.spans, key=lambda span: span.start_s):
            if span.stream is Stream.COMPUTE and span.kind == _TILE:
                mine = tiles[span.rank]
                mine[span.task] = mine.get(span.task, 0.0) + span.end_s - span.start_s
        return [list(mine.values()) for mine in tiles]


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _gaps(
    start: float, end: float, cover: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What disjoint ascending intervals leave uncovered of start..end; at least an empty part."""
    gaps, left = [], start
    for opens, closes in cover[bisect_right(cover, start, key=lambda c: c[1]) :]:
        if opens >= end:
            break
        if opens > left:
            gaps.append((left, opens))
        left = closes
    if left < end or not gaps:
        gaps.append((left, max(left, end)))
    return gaps


def _outside(inner: Sequence[tuple[float, float]], cover: Sequence[tuple[float, float]]) -> float:
    """Length of intervals that other, disjoint and ascending ones leave uncovered."""
    return sum(b - a for start, end in inner for a, b in _gaps(start, end, cover))


def kind_of(task: Task) -> str:
    """The kind of a task as spans name it: `tile`, `merge`, `transfer`, `all_to_all`, ..."""
    return task.kind.value if isinstance(task, Collective) else type(task).__name__.lower()


class MeasuredSpan(Protocol):
    """What an execution reports of a task (see `harness.execute.Span`)."""

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
        """When it began, by a clock that all ranks share."""

    @property
    def end_s(self) -> float:
        """When it ended, by the same clock."""


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
    blocked = {rank: _union(intervals) for rank, intervals in waits.items()}
    made = []
    for span in spans:
        if not 0 <= span.task < len(plan.tasks) or span.rank not in ranks_of(plan.tasks[span.task]):
            raise ValueError(f"span ({span}) must be of a task of the plan and one of its ranks")
        task, stream = plan.tasks[span.task], Stream(span.stream)
        sent = 0
        if stream is Stream.TRANSFER:
            sent = sum(leg_bytes(plan, leg) for leg in legs_of(task) if leg.src.rank == span.rank)
        parts = [(span.start_s, span.end_s)]
        if stream is Stream.COMPUTE:
            parts = _gaps(span.start_s, span.end_s, blocked.get(span.rank, []))
        made += [
            Span(span.rank, stream, span.task, kind_of(task), start - begin, end - begin, sent)
            for start, end in parts
        ]
    return trace_of(
        program,
        made,
        source=Source.MEASURED,
        machine=machine,
        calibration="measured",
        peak_memory_bytes=peak_memory_bytes,
    )


def trace_of(
    program: Program,
    spans: Iterable[Span],
    *,
    source: Source,
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


# Forms ---------------------------------------------------------------------------------------


def to_json(trace: Trace) -> str:
    """Write a trace as JSON."""
    body = {
        "schema": 1,
        "strategy": trace.strategy,
        "direction": trace.direction,
        "cp": trace.cp,
        "source": trace.source,
        "machine": trace.machine,
        "calibration": trace.calibration,
        "labels": trace.labels,
        "spans": trace.spans,
        "peak_memory_bytes": trace.peak_memory_bytes,
    }
    return json_text(body, compact=True, sort_keys=True)


def from_json(text: str) -> Trace:
    """Read what `to_json` wrote.

    Raises:
        ValueError: The text is no trace of schema 1.
    """
    body = json.loads(text)
    if body.get("schema") != 1 or "spans" not in body:
        raise ValueError(f"trace schema ({body.get('schema')}) must be 1; make the trace again")
    peak = body["peak_memory_bytes"]
    return Trace(
        strategy=body["strategy"],
        direction=body["direction"],
        cp=body["cp"],
        source=Source(body["source"]),
        machine=body["machine"],
        calibration=body["calibration"],
        labels=tuple(body["labels"]),
        spans=tuple(Span(rank, Stream(stream), *rest) for rank, stream, *rest in body["spans"]),
        peak_memory_bytes=None if peak is None else tuple(peak),
    )


def to_chrome(trace: Trace) -> str:
    """Write a trace in Chrome's trace event format, which Perfetto and chrome://tracing open.

    One process per rank, one thread per stream; times in microseconds.

    Source: Trace Event Format, "JSON Object Format" and "Complete Events".
    """
    lanes = {stream: number for number, stream in enumerate(Stream)}
    used = sorted({(span.rank, span.stream) for span in trace.spans})
    events = [_name("process_name", rank, 0, f"rank {rank}") for rank in range(trace.cp)]
    events += [_name("thread_name", rank, lanes[stream], stream.value) for rank, stream in used]
    events += [
        {
            "ph": "X",
            "name": trace.labels[span.task],
            "cat": span.kind,
            "pid": span.rank,
            "tid": lanes[span.stream],
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"task": span.task, "bytes": span.size_bytes},
        }
        for span in trace.spans
    ]
    other = trace.summary()
    return json_text({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}


_GLYPHS = {_TILE: "█", "linear": "█", "copy": "▒", "launch": "▒", "transfer": "━"}
_COLLECTIVE_GLYPH, _OTHER_GLYPH, _PARTLY = "═", "▓", "·"
_KEY = {
    "█": "attends or multiplies",
    "▓": "merges or finishes",
    "━": "transfers",
    "═": "collective",
    "▒": "copies or launches",
    "·": "busy for less than half of the sign's time",
}
_MIN_COLUMNS = 8
_NOTHING = 1e-9  # of a cell: what rounding leaves over


def gantt(trace: Trace, width: int = 80, ranks: int = 8, *, what: str = "") -> str:
    """Draw a trace as text: a line per rank and stream, time from left to right.

    A cell shows what its stream does for most of the cell's time; a key says which sign is what.

    Args:
        trace: What to draw.
        width: Columns of a line.
        ranks: How many ranks to draw, from rank 0.
        what: Names what ran in the heading; by default the strategy, its direction and degree.
    """
    names = [stream for stream in Stream if any(span.stream is stream for span in trace.spans)]
    gutter = 5 + max((len(stream.value) for stream in names), default=0)
    columns = max(_MIN_COLUMNS, width - gutter - 1)
    rows: dict[tuple[int, Stream], list[Span]] = {}
    for span in trace.spans:
        if span.rank < ranks and span.end_s > span.start_s:
            rows.setdefault((span.rank, span.stream), []).append(span)
    what = what or f"{trace.strategy} {trace.direction} cp={trace.cp}"
    lines = wrap(what, width)
    lines += wrap(f"on {trace.machine}: {trace.makespan_s * 1e3:.3f} ms", width)
    drawn: set[str] = set()
    previous = None
    for rank, stream in sorted(rows, key=lambda key: (key[0], names.index(key[1]))):
        head = f"{rank:>4} " if rank != previous else "     "
        previous = rank
        bar = _bar(rows[rank, stream], trace.makespan_s / columns, columns)
        drawn.update(bar)
        lines.append(f"{head}{stream.value:<{gutter - 5}} {bar}".rstrip())
    if trace.cp > ranks:
        lines.append(f"     ({trace.cp - ranks} more ranks)")
    key = ", ".join(f"{sign} {meaning}" for sign, meaning in _KEY.items() if sign in drawn)
    source = trace.source.value
    known = source if trace.calibration == source else f"{source}; {trace.calibration}"
    return "\n".join([*lines, *wrap(f"{key}; {known}" if key else known, width)])


def _bar(spans: list[Span], cell_s: float, columns: int) -> str:
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        first, last = (min(int(t / cell_s), columns - 1) for t in (span.start_s, span.end_s))
        for column in range(first, last + 1):
            covered = min(span.end_s, (column + 1) * cell_s) - max(span.start_s, column * cell_s)
            if covered > cell_s * _NOTHING:
                shares[column][span.kind] = shares[column].get(span.kind, 0.0) + covered
    return "".join(_cell(share, cell_s) for share in shares)


def _cell(share: dict[str, float], cell_s: float) -> str:
    if not share:
        return " "
    if sum(share.values()) < cell_s / 2:
        return _PARTLY
    kind = max(share, key=lambda name: (share[name], name))
    collective = "_" in kind
    return _GLYPHS.get(kind, _COLLECTIVE_GLYPH if collective else _OTHER_GLYPH)
