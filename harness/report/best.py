"""The answer of a sweep: which strategy is best, per problem and pattern, and what it costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from harness.plan.problem import Direction
from harness.records.cell import CellRecord, Source
from harness.report.format import (
    ABSENT,
    alike,
    broken,
    drift_of,
    memory,
    milliseconds,
    problem,
    short,
    unprefixed,
)
from harness.report.labels import pattern_labels

_MORE = 6
"""Columns that the numbers of ties and of those near may take beside a name."""
_LEAST = 11
_TIME, _ENDS = 7, 14
"""Columns of a time, and of memory and error."""
NEAR = 0.1
"""Share within which simulated times count as near where no error is known: the mean errors of the
fitted cluster h100-hamming are 5 to 9 % (runtime graph), and a datasheet cluster is less exact."""


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest strategy of a cell, or of the two cells of a training step.

    Attributes:
        names: The fastest and those tied with it, with the options that each chose.
        near: Simulated strategies that are slower, but by less than the expected error.
        time_s: Time of the fastest.
        peak_bytes: Most bytes that it holds on a rank; None if unknown.
        error: Measured: the largest relative error of its results. Simulated: the expected
            relative error of its time. None if unknown, as outside the calibrated range.
    """

    names: tuple[str, ...]
    near: tuple[str, ...]
    time_s: float
    peak_bytes: int | None
    error: float | None


def best_of(cells: Sequence[Sequence[CellRecord]]) -> Best | None:
    """Choose among strategies, each with its cells (one direction, or both); None if none ran."""
    ran = [group for group in cells if group and all(entry.ok for entry in group)]
    if not ran:
        return None
    first = min(ran, key=_time)
    drifts = [drift_of(column) for column in zip(*ran, strict=True)]
    ties = [other for other in ran if all(map(alike, first, other, drifts))]
    names = tuple(dict.fromkeys(_name(group) for group in [first, *ties]))
    error = _error(first)
    near: list[str] = []
    if first[0].source is Source.SIMULATED:
        least_s = _time(first)
        near = [_name(group) for group in ran if _time(group) <= least_s * (1 + _off(first, group))]
    return Best(
        names=names,
        near=tuple(name for name in dict.fromkeys(near) if name not in names),
        time_s=_time(first),
        peak_bytes=_peak(first),
        error=error,
    )


def _off(*groups: Sequence[CellRecord]) -> float:
    """Share by which simulated times may be off: the largest of the groups."""
    errors = [_error(group) for group in groups]
    return max(NEAR if error is None else error for error in errors)


def _time(group: Sequence[CellRecord]) -> float:
    return sum(entry.seconds for entry in group)


def _name(group: Sequence[CellRecord]) -> str:
    names = {entry.label for entry in group}
    return names.pop() if len(names) == 1 else group[0].config.strategy


def _peak(group: Sequence[CellRecord]) -> int | None:
    peaks = [entry.peak_bytes for entry in group]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if len(known) == len(peaks) else None


def _error(group: Sequence[CellRecord]) -> float | None:
    errors: list[float | None] = []
    for entry in group:
        errors += entry.max_rel_error.values() if entry.max_rel_error else [entry.expected_error]
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(errors) else None


def best_tables(records: Sequence[CellRecord], width: int) -> Iterator[tuple[str, Table]]:
    """A title and a table for each machine and model; rows are degree, length and pattern.

    Args:
        records: Of a sweep.
        width: Columns of the terminal.
    """
    groups: dict[str, list[CellRecord]] = {}
    for entry in records:
        groups.setdefault(problem(entry), []).append(entry)
    for title, group in groups.items():
        if any(entry.ok for entry in group):
            for ways in _columns(group, width):
                yield f"best, {title}", _table(group, ways, width)


Ways = Sequence[tuple[str, Sequence[Direction]]]
"""Columns of a table: a heading, and the directions whose times are added."""


def _columns(records: Sequence[CellRecord], width: int) -> Iterator[Ways]:
    """Share out columns to tables: all in one where every name fits whole, else one in each."""
    shown = [way for way in Direction if any(entry.config.direction is way for entry in records)]
    ways = [(way.value, [way]) for way in shown]
    if len(shown) > 1:
        ways.append(("both", shown))
    names = max(len(unprefixed(entry.label)) for entry in records) + _MORE
    patterns = max(map(len, pattern_labels(records).values()))
    if patterns + len(ways) * (names + _TIME) + _ENDS <= width:
        yield ways
    else:
        yield from ([way] for way in ways)


def _table(records: Sequence[CellRecord], ways: Ways, width: int) -> Table:
    labels = pattern_labels(records)
    room = (width - max(map(len, labels.values())) - _ENDS) // len(ways) - _TIME - _MORE
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for head, _ in ways:
        table.add_column(f" {head}", no_wrap=True)
        table.add_column("ms", justify="right", no_wrap=True)
    measured = records[0].source is Source.MEASURED
    for head in (" peak", " error" if measured else " ±"):
        table.add_column(head, justify="right", no_wrap=True)
    before = None
    for (cp, tokens, pattern), group in strategies_by_problem(records).items():
        if before != (cp, tokens):
            table.add_row(f"cp={cp} S={short(tokens)}", style="bold")
        before = cp, tokens
        cells: list[str] = []
        last = None
        for _, shown in ways:
            last = best_of([[own[way] for way in shown] for own in group if own.keys() >= {*shown}])
            cells += _cells(last, room)
        peak = ABSENT if last is None or last.peak_bytes is None else memory(last.peak_bytes)
        digits = ".1e" if measured else ".0%"
        error = ABSENT if last is None or last.error is None else f"{last.error:{digits}}"
        table.add_row(labels[pattern], *cells, f" {peak}", f" {error}")
    return table


def _cells(best: Best | None, room: int) -> list[str]:
    if best is None:
        return [f" {ABSENT}", ""]
    more = f" +{len(best.names) - 1}" if len(best.names) > 1 else ""
    more += f" ~{len(best.near)}" if best.near else ""
    lines = broken(unprefixed(best.names[0]), max(room, _LEAST)).replace("\n", "\n ")
    return [f" {lines}{more}", f" {milliseconds(best.time_s)}"]


def strategies_by_problem(
    records: Sequence[CellRecord],
) -> Mapping[tuple[int, int, str], list[dict[Direction, CellRecord]]]:
    """By degree, length and pattern: the cells of each strategy by direction."""
    rows: dict[tuple[int, int, str], dict[str, dict[Direction, CellRecord]]] = {}
    for entry in records:
        cp, tokens = entry.config.cp, entry.config.seqlen_q
        row = rows.setdefault((cp, tokens, entry.config.pattern), {})
        own = row.setdefault(entry.config.strategy, {})
        own[entry.config.direction] = entry
    return {key: list(row.values()) for key, row in rows.items()}


def fastest_by_pattern(records: Sequence[CellRecord]) -> dict[str, CellRecord]:
    """By pattern, the record of the shortest time."""
    best: dict[str, CellRecord] = {}
    for entry in (entry for entry in records if entry.ok):
        kept = best.setdefault(entry.config.pattern, entry)
        if entry.seconds < kept.seconds:
            best[entry.config.pattern] = entry
    return best
