"""A run as a Gantt chart: a bar for each task, a row for each stream of a few ranks."""

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Patch

from harness.page.groups import Chart, slug
from harness.page.svg import COLORS, HATCHES, INK, drawing, new_figure, svg_of
from harness.report.format import milliseconds
from harness.simulate.queues import Stream
from harness.simulate.trace import TILE, Span, Trace

_KINDS = (
    ("attention", (TILE, "linear")),
    ("transfer", ("transfer",)),
    ("collective", ("all_gather", "all_to_all", "reduce_scatter")),
    ("copy or launch", ("copy", "launch")),
    ("merge and other", ()),
)
_WIDEST = 7.2
_FINEST = 1200
"""Of a row: bars that are closer than that share of the time are drawn as one."""


def gantt_chart(trace: Trace, *, what: str = "", ranks: int = 3) -> Chart:
    """Draw a trace.

    Args:
        trace: Of a run.
        what: Its title; by default the strategy, its direction and degree.
        ranks: How many to draw: the one that ends last, then the first ones.
    """
    shown = _chosen(trace, ranks)
    title = what or f"{trace.strategy} {trace.direction} cp={trace.cp}"
    rows = [
        (rank, stream)
        for rank in shown
        for stream in Stream
        if any((span.rank, span.stream) == (rank, stream) for span in trace.spans)
    ]
    finest_s = trace.makespan_s / _FINEST
    key = f"gantt-{slug(title)}"
    with drawing():
        figure = new_figure(_WIDEST, 0.24 * len(rows) + 1.2)
        panel: Any = figure.subplots()
        handles = []
        for number, (name, kinds) in enumerate(_KINDS):
            bars = [_bars(trace.spans, row, kinds, finest_s) for row in rows]
            if not any(bars):
                continue
            style: Any = {"facecolor": COLORS[number], "hatch": HATCHES[number], "edgecolor": INK}
            style |= {"linewidth": 0.2, "alpha": 0.85}
            for at, own in enumerate(bars):
                panel.broken_barh(own, (at - 0.4, 0.8), **style)
            handles.append(Patch(label=name, **style))
        names = [f"rank {rank} {stream.value.replace('_', ' ')}" for rank, stream in rows]
        panel.set_yticks(range(len(rows)), names)
        panel.invert_yaxis()
        panel.set_xlim(0, trace.makespan_s * 1e3)
        panel.set_xlabel("ms")
        panel.grid(visible=True, axis="x")
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        summary = f"{len(shown)} of {trace.cp} ranks over {milliseconds(trace.makespan_s)} ms"
        svg = svg_of(figure, key, title, summary)
    note = f"{trace.source.value.capitalize()} on {trace.machine}; {len(shown)} of {trace.cp} "
    note += f"ranks, first the one that ends last. {trace.calibration}."
    return Chart(key, title, note, svg)


def _chosen(trace: Trace, ranks: int) -> list[int]:
    last = max(trace.spans, key=lambda span: span.end_s).rank if trace.spans else 0
    return [last, *(rank for rank in range(trace.cp) if rank != last)][:ranks]


def _bars(
    spans: Sequence[Span], row: tuple[int, Stream], kinds: Sequence[str], finest_s: float
) -> list[tuple[float, float]]:
    """Start and length of bars, in ms; those that hardly differ are joined."""
    named = {kind for _, own in _KINDS for kind in own}
    own = sorted(
        (span.start_s, span.end_s)
        for span in spans
        if (span.rank, span.stream) == row
        and span.end_s > span.start_s
        and (span.kind in kinds if kinds else span.kind not in named)
    )
    joined: list[tuple[float, float]] = []
    for start_s, end_s in own:
        if joined and start_s - joined[-1][1] < finest_s and end_s - joined[-1][0] < 8 * finest_s:
            joined[-1] = joined[-1][0], max(end_s, joined[-1][1])
        else:
            joined.append((start_s, end_s))
    return [(start_s * 1e3, (end_s - start_s) * 1e3) for start_s, end_s in joined]
