"""Simulated times against measured ones of the same cells."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.page.groups import Chart
from harness.page.svg import COLORS, MARKERS, drawing, new_figure, plain_log, svg_of
from harness.records.cell import CellRecord, Source
from harness.report.format import unprefixed


def predicted_chart(records: Sequence[CellRecord], labels: Mapping[str, str]) -> Iterator[Chart]:
    """Simulated against measured times of the same cells, where a set has both."""
    del labels
    pairs = predicted_pairs(records)
    if len(pairs) < 2:
        return
    title = "Predicted against measured"
    with drawing():
        figure = new_figure(4.6, 4.2)
        panel: Any = figure.subplots()
        for number, name in enumerate(dict.fromkeys(old.config.strategy for old, _ in pairs)):
            own = [
                (new.seconds * 1e3, old.seconds * 1e3)
                for old, new in pairs
                if old.config.strategy == name
            ]
            style = {"marker": MARKERS[number % 8], "color": COLORS[number % 8]}
            panel.scatter(*zip(*own, strict=True), s=18, label=unprefixed(name), **style)
        ends = [time_s * 1e3 for pair in pairs for time_s in (pair[0].seconds, pair[1].seconds)]
        panel.plot([min(ends), max(ends)], [min(ends), max(ends)], color="#888888", linestyle=":")
        panel.set_xscale("log")
        panel.set_yscale("log")
        plain_log(panel.xaxis)
        plain_log(panel.yaxis)
        panel.grid(visible=True, which="major")
        panel.set_xlabel("measured, ms")
        panel.set_ylabel("predicted, ms")
        figure.legend(loc="outside lower center", ncols=3)
        missed = [old.seconds / new.seconds - 1 for old, new in pairs]
        mean = sum(map(abs, missed)) / len(missed)
        svg = svg_of(
            figure, "predicted", title, f"{len(pairs)} cells, off by {mean:.0%} on average"
        )
    note = f"{len(pairs)} cells; off by {mean:.0%} on average. The dotted line: equal."
    yield Chart("predicted", title, note, svg)


def predicted_pairs(records: Sequence[CellRecord]) -> list[tuple[CellRecord, CellRecord]]:
    """Pair simulated records with measured ones of the same problem and strategy."""

    def cell(entry: CellRecord) -> tuple[object, ...]:
        c = entry.config
        own = (c.strategy, c.pattern, c.cp, c.seqlen_q, c.seqlen_kv, c.heads_q, c.heads_kv)
        return (*own, c.head_dim, c.batch, c.dtype, c.direction, c.scope, c.hidden)

    measured = {cell(e): e for e in records if e.source is Source.MEASURED}
    simulated = [e for e in records if e.source is Source.SIMULATED]
    return [(e, measured[cell(e)]) for e in simulated if cell(e) in measured]
