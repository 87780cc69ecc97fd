"""Tables of a sweep: simulated times per problem, measured cells, and the best of all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.planning.peers import is_peer
from harness.records.cell import CellRecord, Source
from harness.report.best import NEAR, best_tables, fastest_by_pattern
from harness.report.format import (
    ABSENT,
    alike,
    broken,
    drift_of,
    known,
    milliseconds,
    problem,
    sample_range,
    short,
    unprefixed,
    worst_error,
)
from harness.report.labels import legend, pattern_labels
from harness.report.notes import apart, crowded, drifting, refusals, same_plans, trusted, uneven
from harness.report.seeds import seed_tables
from strategies import BASE

_MIB = 2**20
_NAME = 30
"""The longest name that is not broken."""
_FIGURES = 56
"""Columns that a measured cell's figures take."""
_WIDE = 120
"""From this width on, simulated cells show the speed-up too."""
_MEASURED = (
    "ms: median of {count} iterations of the slowest rank; p20-p80: their spread; *: fastest, or "
    "statistically tied with it (p20-p80 overlap, or within the spread of identical plans); vs "
    "ring: speed-up over ring (~: tied with it); error: largest relative error of the results "
    "against the float64 oracle; MiB: sent by the rank that sends most; wait: longest time (ms) "
    "that a rank waited for transfers, in one traced run; imbal: work of the busiest rank over the "
    "mean"
)
_PEERS = (
    "NAME/NAME: another project's implementation, peer:NAME/NAME on the command line; —: unknown, "
    "because it has no plan in which bytes and work can be counted, and is not traced"
)
_BEST = (
    "best: the fastest of each row (+n: n more tied with it; ~n: n more within the simulator's "
    f"expected error ±, or within {NEAR:.0%} where it is unknown); both: forward and backward of "
    "one strategy; peak: most bytes held on a rank; error: largest relative error of the results "
    "against the float64 oracle; ±: expected error of the times, if their calibration has one"
)


_ANY_PLAN = "(any plan)"


_OVER_SEEDS = (
    "over seeds: * least mean; ~ its least reaches below the most of *; other draws may differ"
)


def print_sweep(console: Console, records: Sequence[CellRecord]) -> None:
    """Print all tables of a sweep, the reasons of cells that did not run, and the best table."""
    wide = console.width >= _WIDE
    for title, group in _grouped(records, Source.SIMULATED):
        _print(console, title, simulated_tables(group, console.width))
        _say(
            console, *(f"{label}: {text}" for label, text in legend(pattern_labels(group)).items())
        )
        _say(console, *(f"same plan: {text}" for text in same_plans(group)))
    calibrations = trusted(records)
    if calibrations:
        figures = "ms, times the compute bound evenly spread (×)"
        figures += ", speed-up over ring (r)" if wide else ""
        if any(entry.any_plan_bound_s for entry in records):
            figures += f"; {_ANY_PLAN}: no plan takes less, by docs/bounds.md"
        _say(console, f"simulated: {figures}; * best. {'; '.join(calibrations)}")
        _say(console, *apart([entry for entry in records if entry.source is Source.SIMULATED]))
    for title, group in _grouped(records, Source.MEASURED):
        for pattern in dict.fromkeys(entry.config.pattern for entry in group):
            own = [entry for entry in group if entry.config.pattern == pattern]
            _print(console, f"{title}, {pattern}", [measured_table(own, console.width)])
            _say(console, *(f"same plan: {text}" for text in same_plans(own)), *drifting(own))
    measured = [entry for entry in records if entry.source is Source.MEASURED]
    if any(entry.ok for entry in measured):
        _say(console, _MEASURED.format(count=_counts(measured)), *crowded(measured))
    if any(is_peer(entry.config.strategy) for entry in measured):
        _say(console, _PEERS)
    _say(console, *uneven(records))
    for note, times in refusals(records).items():
        _say(console, f"{note} ({times} cells)" if times > 1 else note)
    spread = list(seed_tables(records))
    for title, table in spread:
        _say(console, "")
        _print(console, title, [table])
    if spread:
        _say(console, _OVER_SEEDS)
    best = list(best_tables(records, console.width))
    for title, table in best:
        _say(console, "")
        _print(console, title, [table])
    if best:
        _say(console, _BEST)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False)


def _print(console: Console, title: str, tables: Iterable[Table]) -> None:
    console.print(Text(title, style="italic"), soft_wrap=True)
    for table in tables:
        console.print(table, markup=False)


def _counts(measured: Sequence[CellRecord]) -> str:
    counts = {len(entry.samples_s) for entry in measured} - {0}
    if not counts:
        return "no"
    return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _grouped(
    records: Sequence[CellRecord], source: Source
) -> Iterable[tuple[str, list[CellRecord]]]:
    groups: dict[str, list[CellRecord]] = {}
    for entry in records:
        if entry.source is source:
            groups.setdefault(_title(entry), []).append(entry)
    yield from groups.items()


def _title(entry: CellRecord) -> str:
    tokens = short(entry.config.seqlen_q)
    where, _, rest = problem(entry).partition(":")
    return f"{where}: cp={entry.config.cp} S={tokens}{rest} {entry.config.direction}"


def _table(space: int) -> Table:
    return Table(box=SIMPLE_HEAD, padding=(0, space, 0, 0), pad_edge=False, show_edge=False)


def _longest(header: str, names: Iterable[str], most: int = _NAME) -> int:
    """Width of a column of names: those that are longer are broken."""
    return min(max(map(len, (header, *names))), most)


def simulated_tables(records: Sequence[CellRecord], width: int) -> Iterator[Table]:
    """Strategies x patterns: milliseconds, times the balanced bound, the best one marked.

    Args:
        records: Of one problem, on several patterns.
        width: Columns of the terminal; patterns that do not fit go into another table.
    """
    wide = width >= _WIDE
    names: dict[str, str] = {}
    for entry in records:
        names[entry.config.strategy] = max(names.get(entry.config.strategy, ""), entry.label)
    labels = pattern_labels(records)
    space, cell = (1, 17) if wide else (0, 10)
    longest = _longest("strategy", names.values())
    best, base = fastest_by_pattern(records), _base(records)
    by_cell = {(e.config.strategy, e.config.pattern): e for e in records}
    widths = {pattern: max(cell, len(label)) + 1 + space for pattern, label in labels.items()}
    for shown in _side_by_side(widths, width - longest):
        table = _table(space)
        table.add_column("strategy", min_width=longest, no_wrap=True)
        for pattern in shown:
            table.add_column(labels[pattern], justify="right", no_wrap=True)
        for name, text in names.items():
            cells = [
                _simulated(by_cell.get((name, pattern)), best, base if wide else None)
                for pattern in shown
            ]
            table.add_row(broken(text, longest), *cells)
        limits = [_any_plan(records, pattern, wide=wide) for pattern in shown]
        if any(limits):
            table.add_row(_ANY_PLAN, *limits, style="dim")
        yield table


def _any_plan(records: Sequence[CellRecord], pattern: str, *, wide: bool) -> str:
    """Time that no plan of a pattern beats; empty if no record has one."""
    for entry in records:
        if entry.config.pattern == pattern and entry.bound_s and entry.any_plan_bound_s:
            factor = _factor(entry.any_plan_bound_s / entry.bound_s)
            return f"{milliseconds(entry.any_plan_bound_s)} {factor}" + " " * 7 * wide
    return ""


def _side_by_side(widths: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """Share out columns to tables, in order: as many as fit, at least one."""
    shown: list[str] = []
    for name, width in widths.items():
        if shown and sum(widths[each] for each in shown) + width > room:
            yield shown
            shown = []
        shown.append(name)
    yield shown


def _simulated(
    entry: CellRecord | None, best: Mapping[str, CellRecord], base: Mapping[str, CellRecord] | None
) -> Text:
    if entry is None:
        return Text("")
    if not entry.ok:
        return Text(entry.status, style="dim")
    time_s, pattern = entry.seconds, entry.config.pattern
    mark = "*" if alike(entry, best[pattern], 0.0) else ""
    factor = f" {_factor(time_s / entry.bound_s)}" if entry.bound_s else ""
    text = f"{milliseconds(time_s)}{mark}{factor}"
    if base is not None:
        ring = base.get(pattern)
        text += " " * 7 if ring is None else f" {ring.seconds / time_s:5.2f}r"
    return Text(text, style="bold green" if mark else "")


def _factor(value: float) -> str:
    return f"{value:.1f}×" if value < 99.95 else f"{value:.0f}×"


def measured_table(records: Sequence[CellRecord], width: int) -> Table:
    """One row a cell: milliseconds and their spread, speed against ring, error, bytes.

    Args:
        records: Of one problem on one pattern.
        width: Columns of the terminal.
    """
    table = _table(0)
    names = [unprefixed(entry.label) for entry in records]
    strategy = _longest("strategy", names, width - _FIGURES)
    table.add_column("strategy", min_width=strategy, no_wrap=True)
    for name in ("ms", "p20-p80", f"vs {BASE}", "error", "MiB", "wait", "imbal"):
        table.add_column(name, justify="right", no_wrap=True)
    best, base, drift = fastest_by_pattern(records), _base(records), drift_of(records)
    for entry, name in zip(records, names, strict=True):
        marked = entry.ok and alike(entry, best[entry.config.pattern], drift)
        style = "bold green" if marked else ""
        cells = _measured(entry, base, drift, "*" if marked else "")
        table.add_row(broken(name, strategy), *cells, style=style)
    return table


def _measured(
    entry: CellRecord, base: Mapping[str, CellRecord], drift: float, mark: str
) -> list[str]:
    if not entry.ok:
        return [entry.status]
    low, high = sample_range(entry)
    ring = base.get(entry.config.pattern)
    against = ABSENT
    if ring is not None:
        near = "~" if ring is not entry and alike(entry, ring, drift) else ""
        against = f"{near}{ring.seconds / entry.seconds:.2f}×"
    return [
        f"{milliseconds(entry.seconds)}{mark}",
        f"{milliseconds(low)}-{milliseconds(high)}",
        against,
        worst_error(entry) or ABSENT,
        known(entry.bytes_sent_per_rank, lambda size: f"{size / _MIB:.2f}"),
        known(entry.exposed_comm_s, milliseconds),
        known(entry.imbalance, lambda ratio: f"{ratio:.2f}"),
    ]


def _base(records: Sequence[CellRecord]) -> dict[str, CellRecord]:
    """By pattern, the record of the strategy that others are compared with."""
    return {e.config.pattern: e for e in records if e.config.strategy == BASE and e.ok}
