"""Tables of strategies by patterns: times as multiples of the best, refusals with their reasons."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.records.cell import CellRecord
from harness.report.best import fastest_by_pattern
from harness.report.format import alike, drift_of, milliseconds, problem, short, unprefixed

_HOT = 3.0
"""So many times as long as the best gets the strongest shade."""


@dataclass(frozen=True, slots=True)
class HeatCell:
    """One cell: what stands in it, and how strong its shade is.

    Attributes:
        text: Milliseconds and the multiple of the best, or the status.
        shade: 0 the best, 1 three times as long or worse; None without a time.
        best: Whether it is the fastest, or cannot be told apart from it.
        reason: Why there is no time; empty where there is one.
    """

    text: str
    shade: float | None
    best: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HeatTable:
    """Strategies by patterns, of one problem and direction.

    Attributes:
        title: The problem.
        patterns: Columns, as they are typed.
        rows: The strategies.
    """

    title: str
    patterns: tuple[str, ...]
    rows: tuple["HeatRow", ...]


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One strategy.

    Attributes:
        name: As it is typed.
        cells: One for each pattern; None where it was not tried.
        refusal: Why it ran nowhere, where all patterns have one reason; empty else.
    """

    name: str
    cells: tuple[HeatCell | None, ...]
    refusal: str = ""


def heat_tables(records: Sequence[CellRecord]) -> Iterator[HeatTable]:
    """Yield a table for each problem and direction, in the order of the records."""
    groups: dict[str, list[CellRecord]] = {}
    for entry in records:
        groups.setdefault(_title(entry), []).append(entry)
    for title, group in groups.items():
        yield _table(title, group)


def _title(entry: CellRecord) -> str:
    cell = entry.config
    return f"{cell.direction.value}, cp={cell.cp}, S={short(cell.seqlen_q)}, {problem(entry)}"


def _table(title: str, group: Sequence[CellRecord]) -> HeatTable:
    patterns = tuple(dict.fromkeys(entry.config.pattern for entry in group))
    best = fastest_by_pattern(group)
    drift = drift_of(group)
    rows: dict[str, dict[str, HeatCell]] = {}
    for entry in group:
        cells = rows.setdefault(entry.config.strategy, {})
        cells[entry.config.pattern] = _cell(entry, best, drift)
    return HeatTable(
        title,
        patterns,
        tuple(
            _row(name, [cells.get(pattern) for pattern in patterns]) for name, cells in rows.items()
        ),
    )


def _row(name: str, cells: Sequence[HeatCell | None]) -> HeatRow:
    said = {(cell.text, cell.reason) for cell in cells if cell is not None and cell.shade is None}
    alone = len(said) == 1 and all(cell is not None and cell.shade is None for cell in cells)
    refusal = ": ".join(filter(None, said.pop())) if alone else ""
    return HeatRow(unprefixed(name), tuple(cells), refusal)


def _cell(entry: CellRecord, best: Mapping[str, CellRecord], drift: float) -> HeatCell:
    if not entry.ok:
        return HeatCell(entry.status.value, None, best=False, reason=entry.reason)
    first = best[entry.config.pattern]
    ratio = entry.seconds / first.seconds
    return HeatCell(
        text=f"{milliseconds(entry.seconds)} ms · {ratio:.2f}×",
        shade=min(max((ratio - 1) / (_HOT - 1), 0.0), 1.0),
        best=alike(entry, first, drift),
    )
