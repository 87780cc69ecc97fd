"""Records as one HTML page that needs nothing else: no network, no server, no other file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

from harness.page.answer import AnswerRow, answers, headline
from harness.page.charts import charts
from harness.page.comparison import Changes
from harness.page.groups import Chart
from harness.page.heat import heat_tables
from harness.page.provenance import commands, provenance
from harness.records.cell import CellRecord, Source
from harness.report.format import ABSENT, known, short, unprefixed, worst_error
from harness.report.labels import legend, pattern_labels
from harness.report.notes import crowded, refusals, trusted, uneven

_NUMBER, _NAME, _PLAIN = "n", "name", ""
_MIB, _GIB = 2**20, 2**30
_ANSWER_HEADS = (
    *(("cp", _NUMBER), ("tokens", _NUMBER), ("pattern", _NAME), ("fastest", _NAME)),
    *(("ms", _NUMBER), ("± or error", _NUMBER), ("peak GiB", _NUMBER), ("tied with", _PLAIN)),
    *(("next", _NAME), ("slower by", _NUMBER), ("known by", _NAME), ("where", _NAME)),
)
_CELL_HEADS = (
    *(("strategy", _NAME), ("pattern", _NAME), ("cp", _NUMBER), ("tokens", _NUMBER)),
    *(("heads", _NAME), ("direction", _PLAIN), ("status", _PLAIN), ("ms", _NUMBER)),
    *(("× bound", _NUMBER), ("± or error", _NUMBER), ("sent MiB", _NUMBER)),
    *(("waits ms", _NUMBER), ("imbalance", _NUMBER), ("peak GiB", _NUMBER), ("where", _PLAIN)),
)
TextCells = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A page, and its figures one by one.

    Attributes:
        html: The whole file.
        charts: The figures that are in it.
    """

    html: str
    charts: tuple[Chart, ...]


def build_page(
    records: Sequence[CellRecord],
    *,
    title: str = "Context-parallel attention",
    notes: Sequence[str] = (),
    changes: Changes | None = None,
    runs: Sequence[Chart] = (),
) -> Page:
    """Make a page of records; of none at all it says so.

    Args:
        records: The newest of each cell, in order.
        title: Of the page.
        notes: What is to be said about the records, such as how many could not be read.
        changes: A comparison with other results.
        runs: Further charts, of single runs.
    """
    labels = pattern_labels(records)
    drawn, found = [*charts(records, labels), *runs], answers(records)
    text = _template().render(
        title=title,
        css=_read("page.css"),
        js=_read("page.js"),
        headline=headline(found) if records else "There are no results yet.",
        notes=[*notes, *_notes(records)],
        labels=labels,
        legend=legend(labels),
        answers=[_answer_cells(row, labels) for row in found],
        answer_heads=_ANSWER_HEADS,
        places=list(dict.fromkeys(f"{row.where}: {row.source.value}" for row in found)),
        heats=list(heat_tables(records)),
        charts=drawn,
        changes=changes,
        refusals=refusals(records),
        rows=[_cell_cells(entry, labels) for entry in records],
        cell_heads=_CELL_HEADS,
        provenance=provenance(records),
        commands=commands(records),
    )
    return Page(text, tuple(drawn))


def _notes(records: Sequence[CellRecord]) -> list[str]:
    measured = [entry for entry in records if entry.source is Source.MEASURED]
    said = [f"simulated: {text}" for text in trusted(records)]
    return [*said, *crowded(measured), *uneven(records)]


def _answer_cells(row: AnswerRow, labels: Mapping[str, str]) -> TextCells:
    best = row.best
    tied = [*best.names[1:], *best.near]
    measured = row.source is Source.MEASURED
    margin = ABSENT if row.margin is None else f"{row.margin:.1%}"
    values = (
        *(str(row.cp), str(row.seqlen), labels[row.pattern], unprefixed(best.names[0])),
        *(_ms(best.time_s), known(best.error, lambda e: f"{e:.1e}" if measured else f"{e:.0%}")),
        *(_gib(best.peak_bytes), ", ".join(map(unprefixed, tied)) or ABSENT),
        *(unprefixed(row.second) if row.second else ABSENT, margin, row.source.value, row.where),
    )
    return tuple(zip(values, (kind for _, kind in _ANSWER_HEADS), strict=True))


def _cell_cells(entry: CellRecord, labels: Mapping[str, str]) -> TextCells:
    cell = entry.config
    times = entry.seconds / entry.bound_s if entry.ok and entry.bound_s else None
    error = worst_error(entry) or known(entry.expected_error, lambda e: f"{e:.0%}")
    tokens = cell.seqlen_q
    keys = f" ({short(cell.seqlen_kv)} keys)" if cell.seqlen_kv != tokens else ""
    values = (
        *(unprefixed(entry.label), labels[cell.pattern], str(cell.cp), f"{tokens}{keys}"),
        *(f"{cell.heads_q}/{cell.heads_kv}", cell.direction.value, entry.status.value),
        *(_ms(entry.time_s), known(times, lambda ratio: f"{ratio:.2f}"), error),
        known(entry.bytes_sent_per_rank, lambda size: f"{size / _MIB:.2f}"),
        known(entry.exposed_comm_s, lambda time_s: f"{time_s * 1e3:.3g}"),
        known(entry.imbalance, lambda ratio: f"{ratio:.2f}"),
        *(_gib(entry.peak_bytes), cell.cluster or cell.transport.value),
    )
    return tuple(zip(values, (kind for _, kind in _CELL_HEADS), strict=True))


def _ms(time_s: float | None) -> str:
    return known(
        time_s, lambda value: f"{value * 1e3:.4g}" if value < 100 else f"{value * 1e3:.0f}"
    )


def _gib(size: int | None) -> str:
    return known(size, lambda value: f"{value / _GIB:.3g}")


def _read(name: str) -> str:
    return (files("harness.page") / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(_read("page.html"))
