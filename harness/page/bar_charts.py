"""Where time goes, and most memory: a bar a strategy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.cluster.presets import cluster
from harness.page.groups import Chart, by_problem, slug
from harness.page.svg import COLORS, HATCHES, INK, drawing, new_figure, plain_log, svg_of
from harness.records.cell import CellRecord
from harness.report.format import milliseconds, short, unprefixed

_MOST_BARS = 16
_GIB = 2**30


def where_time_goes(records: Sequence[CellRecord], labels: Mapping[str, str]) -> Iterator[Chart]:
    """Stacked bars of the hardest problem of each group: its largest degree and length."""
    for (where, way), group in by_problem(records).items():
        cp = max(entry.config.cp for entry in group)
        tokens = max(entry.config.seqlen_q for entry in group if entry.config.cp == cp)
        hardest = [e for e in group if (e.config.cp, e.config.seqlen_q) == (cp, tokens)]
        rows: dict[str, list[CellRecord]] = {}
        for entry in hardest:
            if time_parts(entry):
                rows.setdefault(entry.config.pattern, []).append(entry)
        pattern = max(rows, key=lambda each: _spread(rows[each]), default=None)
        if pattern is not None and len(rows[pattern]) > 1:
            place = f"{labels[pattern]}, {way.value}, cp={cp}, S={short(tokens)}, {where}"
            yield _bars(f"Where time goes, {place}", rows[pattern])


def _spread(records: Sequence[CellRecord]) -> float:
    """Of the slowest over the fastest: the pattern that tells most is drawn."""
    times = [entry.seconds for entry in records]
    return max(times) / min(times)


def time_parts(entry: CellRecord) -> dict[str, float]:
    """Split a time into parts that add up to it, in seconds; empty where the record has too little.

    The bound is the work, evenly spread, at the kernels' best rate; imbalance is what the busiest
    rank has beyond it; exposed transfers are what a rank waits for at most; the rest is kernels
    below their best rate, merges, starts and launches. Where the waits of one rank and the work of
    another overlap, the rest would be negative: the exposed part is then cut.
    """
    if not entry.ok or entry.bound_s is None or entry.imbalance is None:
        return {}
    left = entry.seconds
    parts = {}
    for name, value in (
        ("even compute bound", entry.bound_s),
        ("imbalance", entry.bound_s * max(entry.imbalance - 1, 0.0)),
        ("exposed transfers", entry.exposed_comm_s or 0.0),
    ):
        parts[name] = min(value, left)
        left -= parts[name]
    return {**parts, "kernels below best rate, merges, starts": left}


def _bars(title: str, records: Sequence[CellRecord]) -> Chart:
    own = sorted(records, key=lambda entry: entry.seconds)[:_MOST_BARS]
    parts = [time_parts(entry) for entry in own]
    key = f"parts-{slug(title)}"
    with drawing():
        figure = new_figure(7.2, 0.34 * len(own) + 1.3)
        panel: Any = figure.subplots()
        start = [0.0] * len(own)
        names = [unprefixed(entry.config.strategy) for entry in own]
        for number, name in enumerate(parts[0]):
            width = [part[name] * 1e3 for part in parts]
            panel.barh(
                names,
                width,
                left=start,
                label=name,
                color=COLORS[number],
                hatch=HATCHES[number],
                edgecolor=INK,
                linewidth=0.4,
                alpha=0.85,
            )
            start = [a + b for a, b in zip(start, width, strict=True)]
        panel.invert_yaxis()
        panel.set_xlabel("ms")
        figure.legend(loc="outside lower center", ncols=2)
        first = f"{names[0]} takes {milliseconds(own[0].seconds)} ms"
        svg = svg_of(figure, key, title, f"{len(own)} strategies, fastest first; {first}")
    return Chart(key, title, "Parts add up to the time of the slowest rank.", svg)


def most_memory(records: Sequence[CellRecord], labels: Mapping[str, str]) -> Iterator[Chart]:
    """Most bytes that a rank holds, beside what its card has."""
    del labels
    for (where, way), group in by_problem(records).items():
        peaks: dict[str, int] = {}
        for entry in group:
            name = unprefixed(entry.config.strategy)
            if entry.peak_bytes is not None:
                peaks[name] = max(peaks.get(name, 0), entry.peak_bytes)
        if len(peaks) > 1:
            card = _card_bytes(group[0])
            yield _memory_bars(f"Most memory of a rank, {way.value}, {where}", peaks, card)


def _card_bytes(entry: CellRecord) -> int | None:
    if entry.config.cluster is None:
        return None
    try:
        return cluster(entry.config.cluster).gpu.memory_bytes
    except (ValueError, OSError):
        return None  # a file that is gone


def _memory_bars(title: str, peaks: Mapping[str, int], card: int | None) -> Chart:
    names = sorted(peaks, key=lambda name: peaks[name])[:_MOST_BARS]
    key = f"memory-{slug(title)}"
    with drawing():
        figure = new_figure(7.2, 0.34 * len(names) + 1.1)
        panel: Any = figure.subplots()
        width = [peaks[name] / _GIB for name in names]
        panel.barh(names, width, color=COLORS[0], edgecolor=INK, linewidth=0.4, alpha=0.85)
        panel.invert_yaxis()
        panel.set_xscale("log")
        plain_log(panel.xaxis)
        panel.set_xlabel("GiB, of all its problems the largest")
        if card is not None:
            panel.axvline(card / _GIB, color=COLORS[1], linestyle="--", label="the card's memory")
            figure.legend(loc="outside lower center")
        least, most = milliseconds(width[0] / 1e3), milliseconds(width[-1] / 1e3)
        svg = svg_of(figure, key, title, f"From {least} to {most} GiB on the fullest rank")
    note = "What the plan holds at its fullest moment, by the ledger; a log axis."
    return Chart(key, title, note, svg)
