"""Simulated times against measured ones of the same cells."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.page.groups import Chart
from harness.page.svg import COLORS, MARKERS, drawing, new_figure, plain_log, svg_of
from harness.records.cell import CellRecord
from harness.report.format import unprefixed
from harness.report.predictions import predicted_pairs, prediction_errors


def predicted_chart(records: Sequence[CellRecord], labels: Mapping[str, str]) -> Iterator[Chart]:
    """Simulated against measured times of the same cells, where a set has both."""
    del labels
    pairs = predicted_pairs(records, records)
    if len(pairs) < 2:
        return
    title = "Predicted against measured"
    with drawing():
        figure = new_figure(4.6, 4.2)
        panel: Any = figure.subplots()
        names = dict.fromkeys(pair.measured.config.strategy for pair in pairs)
        for number, name in enumerate(names):
            own = [pair for pair in pairs if pair.measured.config.strategy == name]
            panel.scatter(
                [pair.measured.seconds * 1e3 for pair in own],
                [pair.predicted.seconds * 1e3 for pair in own],
                s=18,
                label=unprefixed(name),
                marker=MARKERS[number % len(MARKERS)],
                color=COLORS[number % len(COLORS)],
            )
        ends = [e.seconds * 1e3 for pair in pairs for e in (pair.predicted, pair.measured)]
        panel.plot([min(ends), max(ends)], [min(ends), max(ends)], color="#888888", linestyle=":")
        panel.set_xscale("log")
        panel.set_yscale("log")
        plain_log(panel.xaxis)
        plain_log(panel.yaxis)
        panel.grid(visible=True, which="major")
        panel.set_xlabel("measured, ms")
        panel.set_ylabel("predicted, ms")
        figure.legend(loc="outside lower center", ncols=3)
        found = prediction_errors(pairs)
        said = (
            f"{found.cells} cells, off by {found.mean:.0%} on average, at worst {found.worst:.0%}"
        )
        svg = svg_of(figure, "predicted", title, said)
    yield Chart("predicted", title, f"{said}. The dotted line: equal.", svg)
