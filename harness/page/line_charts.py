"""Times over length and over degree: a panel a pattern, a line a strategy, on log axes."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from matplotlib.ticker import NullLocator

from harness.page.groups import Chart, by_problem, slug
from harness.page.svg import COLORS, DASHES, MARKERS, drawing, new_figure, plain_log, svg_of
from harness.records.cell import CellRecord, Source
from harness.report.format import milliseconds, problem, sample_range, short, unprefixed

_MOST_LINES = 8
_MOST_PANELS = 6


def over_length(records: Sequence[CellRecord], labels: Mapping[str, str]) -> Iterator[Chart]:
    """Times over the length, at the largest degree."""
    for (where, way), group in by_problem(records).items():
        cp = max(entry.config.cp for entry in group)
        own = [entry for entry in group if entry.config.cp == cp]
        title = f"Time over length, {way.value}, cp={cp}, {where}"
        yield from _lines("length", title, own, labels, lambda e: e.config.seqlen_q, "tokens")


def over_degree(records: Sequence[CellRecord], labels: Mapping[str, str]) -> Iterator[Chart]:
    """Times over the degree, at the longest length."""
    for (where, way), group in by_problem(records).items():
        tokens = max(entry.config.seqlen_q for entry in group)
        own = [entry for entry in group if entry.config.seqlen_q == tokens]
        title = f"Time over degree, {way.value}, S={short(tokens)}, {where}"
        yield from _lines("degree", title, own, labels, lambda e: e.config.cp, "GPUs (cp)")


def _lines(
    kind: str,
    title: str,
    records: Sequence[CellRecord],
    labels: Mapping[str, str],
    at: Callable[[CellRecord], int],
    axis: str,
) -> Iterator[Chart]:
    """One panel a pattern; nothing where all results lie at one place of the axis."""
    places = sorted({at(entry) for entry in records})
    if len(places) < 2:
        return
    patterns = list(dict.fromkeys(entry.config.pattern for entry in records))
    names = _fastest_names(records)
    shown, panels = names[:_MOST_LINES], patterns[:_MOST_PANELS]
    key = f"{kind}-{slug(title)}"
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    with drawing():
        figure = new_figure(3.1 * columns + 0.4, 2.6 * rows + 0.5)
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for panel, pattern in zip(axes.flat, panels, strict=False):
            own = [entry for entry in records if entry.config.pattern == pattern]
            _panel(panel, own, shown, at)
            panel.set_title(labels[pattern])
            panel.set_xticks(places, [short(place) for place in places])
            panel.xaxis.set_minor_locator(NullLocator())
        for panel in list(axes.flat)[len(panels) :]:
            panel.axis("off")
        for panel in axes[-1]:
            panel.set_xlabel(axis)
        for row in axes:
            row[0].set_ylabel("ms")
        handles = axes.flat[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3)
        svg = svg_of(figure, key, title, _summary(records, shown, places))
    note = "Log axes. Bands: p20 to p80 where measured, the expected error where simulated and "
    note += "known. Grey dots: the compute bound, evenly spread."
    if len(names) > len(shown):
        note += f" The {len(shown)} fastest of {len(names)} strategies."
    if len(patterns) > len(panels):
        note += f" {len(panels)} of {len(patterns)} patterns."
    yield Chart(key, title, note, svg)


def _panel(
    panel: Any,  # noqa: ANN401  # matplotlib's axes have no types
    records: Sequence[CellRecord],
    names: Sequence[str],
    at: Callable[[CellRecord], int],
) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    plain_log(panel.yaxis)
    panel.grid(visible=True, which="major")
    bound = sorted({(at(e), e.bound_s * 1e3) for e in records if e.bound_s})
    if bound:
        panel.plot(*zip(*bound, strict=True), color="#888888", linestyle=":", label="bound")
    for number, name in enumerate(names):
        own = sorted((e for e in records if e.config.strategy == name), key=at)
        style = {
            "color": COLORS[number],
            "marker": MARKERS[number],
            "linestyle": DASHES[number],
            "markersize": 4,
            "linewidth": 1.3,
        }
        x, times = [at(e) for e in own], [e.seconds * 1e3 for e in own]
        panel.plot(x, times, label=unprefixed(name), **style)
        bands = [_band(entry) for entry in own]
        if any(low < high for low, high in bands):
            low, high = zip(*bands, strict=True)
            panel.fill_between(x, low, high, color=COLORS[number], alpha=0.15, linewidth=0)


def _band(entry: CellRecord) -> tuple[float, float]:
    """Milliseconds between which a time may well lie."""
    if entry.source is Source.MEASURED:
        low, high = sample_range(entry)
        return low * 1e3, high * 1e3
    error = entry.expected_error or 0.0
    return entry.seconds * 1e3 * (1 - min(error, 0.99)), entry.seconds * 1e3 * (1 + error)


def _fastest_names(records: Sequence[CellRecord]) -> list[str]:
    """Strategies by the mean of their times over the best of each problem, the fastest first."""
    best: dict[tuple[object, ...], float] = {}
    for entry in records:
        cell = _place(entry)
        best[cell] = min(best.get(cell, math.inf), entry.seconds)
    ratios: dict[str, list[float]] = {}
    for entry in records:
        own = ratios.setdefault(entry.config.strategy, [])
        own.append(math.log(entry.seconds / best[_place(entry)]))
    return sorted(ratios, key=lambda name: sum(ratios[name]) / len(ratios[name]))


def _place(entry: CellRecord) -> tuple[object, ...]:
    cell = entry.config
    return (cell.pattern, cell.cp, cell.seqlen_q, cell.direction, problem(entry))


def _summary(records: Sequence[CellRecord], names: Sequence[str], places: Sequence[int]) -> str:
    last = [e for e in records if e.config.strategy == names[0]]
    times = sorted(entry.seconds for entry in last)
    return (
        f"{len(names)} strategies at {len(places)} places; {unprefixed(names[0])} is the fastest "
        f"on average, {milliseconds(times[0])} to {milliseconds(times[-1])} ms"
    )
