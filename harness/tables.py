"""Tables of a sweep for the terminal: one of simulated times per problem, one of measured cells."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.cell import Status
from harness.records import Record
from harness.summary import worst_error

_BASE = "ring"
_MIB = 2**20
_NAME = 30
"""The longest name that is not broken."""
_FIGURES = 48
"""Columns that a measured cell's figures take."""
_WIDE, _SPREAD = 120, 100
"""From these widths on, simulated cells show the speed-up too, and measured ones their spread."""


def print_sweep(console: Console, records: Sequence[Record]) -> None:
    """Print all tables of a sweep, then what did not run and why."""
    wide = console.width >= _WIDE
    for title, group in _grouped(records, "simulated"):
        _print(console, title, simulated_tables(group, console.width))
    calibrations = sorted({str(e["calibration"]) for e in records if e["calibration"]})
    if calibrations:
        figures = "ms, times the compute bound evenly spread (×)"
        figures += ", speed-up over ring (r)" if wide else ""
        console.print(f"simulated: {figures}; * best. {'; '.join(calibrations)}", highlight=False)
        console.print()
    for title, group in _grouped(records, "measured"):
        _print(console, title, [measured_table(group, console.width)])
    if any(entry["source"] == "measured" for entry in records):
        text = "measured: median of the slowest rank; * best; error relative to the float64 oracle"
        console.print(text, highlight=False)
    for note, times in _notes(records).items():
        console.print(f"{note} ({times} cells)" if times > 1 else note, highlight=False)


def _print(console: Console, title: str, tables: Iterable[Table]) -> None:
    console.print(Text(title, style="italic"), soft_wrap=True)
    for table in tables:
        console.print(table)


def _notes(records: Sequence[Record]) -> dict[str, int]:
    notes: dict[str, int] = {}
    for entry in records:
        if entry["reason"]:
            note = f"{entry['status']}: {str(entry['reason']).splitlines()[0]}"
            notes[note] = notes.get(note, 0) + 1
    return notes


def _grouped(records: Sequence[Record], source: str) -> Iterable[tuple[str, list[Record]]]:
    groups: dict[str, list[Record]] = {}
    for entry in records:
        if entry["source"] == source:
            groups.setdefault(_title(entry), []).append(entry)
    yield from groups.items()


def _title(entry: Record) -> str:
    where = entry["cluster"] or f"measured here, {entry['transport']}"
    batch = f" B={entry['batch']}" if entry["batch"] != 1 else ""
    return (
        f"{where}: cp={entry['cp']} S={short(_whole(entry['seqlen_q']))} "
        f"heads={entry['heads_q']}/{entry['heads_kv']} D={entry['head_dim']}{batch} "
        f"{entry['dtype']} {entry['direction']}"
    )


def _table(space: int) -> Table:
    return Table(box=SIMPLE_HEAD, padding=(0, space, 0, 0), pad_edge=False, show_edge=False)


def _longest(header: str, names: Iterable[str], most: int = _NAME) -> int:
    """Width of a column of names: those that are longer are broken."""
    return min(max(map(len, (header, *names))), most)


def simulated_tables(records: Sequence[Record], width: int) -> Iterator[Table]:
    """Strategies x patterns: milliseconds, times the balanced bound, the best one marked.

    Args:
        records: Of one problem, on several patterns.
        width: Columns of the terminal; what does not fit side by side goes into another table.
    """
    wide = width >= _WIDE
    names = list(dict.fromkeys(str(entry["strategy"]) for entry in records))
    patterns = list(dict.fromkeys(str(entry["pattern"]) for entry in records))
    space, cell = (1, 17) if wide else (0, 10)
    longest = _longest("strategy", names)
    room = width - longest
    fit = max(1, room // (cell + 1 + space))
    best, base = _best(records), _base(records)
    by_cell = {(str(e["strategy"]), str(e["pattern"])): e for e in records}
    for start in range(0, len(patterns), fit):
        shown = patterns[start : start + fit]
        table = _table(space)
        table.add_column("strategy", min_width=longest, no_wrap=True)
        for pattern in shown:
            table.add_column(broken(pattern, cell), justify="right", no_wrap=True)
        for name in names:
            cells = [
                _simulated(by_cell.get((name, pattern)), best, base if wide else None)
                for pattern in shown
            ]
            table.add_row(broken(name, longest), *cells)
        yield table


def broken(name: str, width: int) -> str:
    """Break a name where it is too long for a line: before an option, else after punctuation."""
    lines = [""]
    for part in re.findall(r"[^:,]+[:,]?", name):
        pieces = [part] if len(part) <= width else re.findall(r"[^_+=]*[_+=]?", part)
        for piece in pieces:
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


def _simulated(
    entry: Record | None, best: Mapping[str, float], base: Mapping[str, float] | None
) -> Text:
    if entry is None:
        return Text("")
    if entry["status"] != Status.OK:
        return Text(str(entry["status"]), style="dim")
    time_s, bound_s, pattern = _number(entry["time_s"]), _number(entry["bound_s"]), entry["pattern"]
    mark = "*" if time_s == best.get(str(pattern)) else ""
    text = f"{milliseconds(time_s)}{mark} {_factor(time_s / bound_s)}" if bound_s else ""
    if base is not None:
        ring = base.get(str(pattern))
        text += f" {ring / time_s:5.2f}r" if ring is not None else " " * 7
    return Text(text, style="bold green" if mark else "")


def _factor(value: float) -> str:
    return f"{value:.1f}×" if value < 99.95 else f"{value:.0f}×"


def measured_table(records: Sequence[Record], width: int) -> Table:
    """One row a cell: milliseconds, speed against ring, error, bytes; with room, the spread.

    Args:
        records: Of one problem, on several patterns.
        width: Columns of the terminal.
    """
    table = _table(1)
    spread = width >= _SPREAD
    room = width - (_FIGURES + 14 if spread else _FIGURES)
    pattern = _longest("pattern", (str(entry["pattern"]) for entry in records), room // 2)
    strategy = _longest("strategy", (str(e["strategy"]) for e in records), room - pattern)
    table.add_column("pattern", min_width=pattern, no_wrap=True)
    table.add_column("strategy", min_width=strategy, no_wrap=True)
    headers = ["ms", *(["p20-p80"] if spread else []), "vs ring", "error", "MiB", "wait", "imbal"]
    for name in headers:
        table.add_column(name, justify="right", no_wrap=True)
    best, base = _best(records), _base(records)
    for entry in records:
        marked = entry["status"] == Status.OK and entry["time_s"] == best.get(str(entry["pattern"]))
        cells = _measured(entry, base, marked=marked, spread=spread)
        style = "bold green" if marked else ""
        names = broken(str(entry["pattern"]), pattern), broken(str(entry["strategy"]), strategy)
        table.add_row(*names, *cells, style=style)
    return table


def _measured(entry: Record, base: Mapping[str, float], *, marked: bool, spread: bool) -> list[str]:
    if entry["status"] != Status.OK:
        return [str(entry["status"])]
    time_s, low, high = (_number(entry[name]) for name in ("time_s", "p20_s", "p80_s"))
    ring = base.get(str(entry["pattern"]))
    return [
        f"{milliseconds(time_s)}{'*' if marked else ''}",
        *([f"{milliseconds(low)}-{milliseconds(high)}"] if spread else []),
        f"{ring / time_s:.2f}×" if ring is not None else "",
        worst_error(entry),
        _known(entry["bytes_sent_per_rank"], lambda size: f"{size / _MIB:.2f}"),
        _known(entry["exposed_comm_s"], milliseconds),
        _known(entry["imbalance"], lambda ratio: f"{ratio:.2f}"),
    ]


def _known(value: object, shown: Callable[[float], str]) -> str:
    """A figure, or a dash: other projects' code has no plan that would say."""
    return "—" if value is None else shown(_number(value))


def _best(records: Sequence[Record]) -> dict[str, float]:
    """By pattern, the shortest time."""
    best: dict[str, float] = {}
    for entry in records:
        if entry["status"] == Status.OK:
            key, time_s = str(entry["pattern"]), _number(entry["time_s"])
            best[key] = min(time_s, best.get(key, time_s))
    return best


def _base(records: Sequence[Record]) -> dict[str, float]:
    """By pattern, the time of the strategy that others are compared with."""
    return {
        str(entry["pattern"]): _number(entry["time_s"])
        for entry in records
        if entry["strategy"] == _BASE and entry["status"] == Status.OK
    }


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


def milliseconds(seconds: float) -> str:
    """Format seconds as ms with three digits: `0.12`, `12.3`, `1234`."""
    value = seconds * 1e3
    if value >= 99.95:  # three digits are enough
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def short(tokens: int) -> str:
    """Format a number of tokens: `64k`, `1m`, `1000`."""
    for unit, size in (("m", 2**20), ("k", 2**10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
