"""Charts of a set of results: times, where they go, memory, predictions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from harness.page.bar_charts import most_memory, where_time_goes
from harness.page.groups import Chart
from harness.page.line_charts import over_degree, over_length
from harness.page.predicted import predicted_chart
from harness.records.cell import CellRecord

_MOST = 6
"""Figures of one kind: the table below them has the rest."""
Drawer = Callable[[Sequence[CellRecord], Mapping[str, str]], Iterator[Chart]]


def charts(records: Sequence[CellRecord], labels: Mapping[str, str]) -> list[Chart]:
    """Draw all charts for which there are enough results.

    Args:
        records: All, in order.
        labels: See `pattern_labels`.
    """
    ran = [entry for entry in records if entry.ok]
    drawers: Sequence[Drawer] = (
        over_length,
        over_degree,
        where_time_goes,
        most_memory,
        predicted_chart,
    )
    return [chart for draw in drawers for chart in islice(draw(ran, labels), _MOST)]
