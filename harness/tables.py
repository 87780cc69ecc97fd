"""Tables of a sweep for the terminal: one of simulated times per problem, one of measured cells."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.cell import Status
from harness.records import Record
from harness.summary import worst_error

_BASE = "ring"
_MIB = 2**20


def print_sweep(console: Console, records: Sequence[Record]) -> None:
    """Print all tables of a sweep, then what did not run and why."""
    for title, group in _grouped(records, "simulated"):
        console.print(simulated_table(title, group))
    for title, group in _grouped(records, "measured"):
        console.print(measured_table(title, group))
    notes: dict[str, int] = {}
    for entry in records:
        if entry["status"] != Status.OK:
            note = f"{entry['status']}: {str(entry['reason']).splitlines()[0]}"
            notes[note] = notes.get(note, 0) + 1
    for note, times in notes.items():
        console.print(f"{note} ({times} cells)" if times > 1 else note, highlight=False)


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


def simulated_table(title: str, records: Sequence[Record]) -> Table:
    """Strategies x patterns: milliseconds, times the balanced bound, the best one marked."""
    calibrations = sorted({str(e["calibration"]) for e in records if e["calibration"]})
    table = Table(
        title=title,
        title_justify="left",
        caption=f"simulated ms, × the balanced compute bound; * best. {'; '.join(calibrations)}",
        caption_justify="left",
        pad_edge=False,
    )
    table.add_column("strategy", no_wrap=True)
    patterns = list(dict.fromkeys(str(entry["pattern"]) for entry in records))
    for pattern in patterns:
        table.add_column(pattern, justify="right", overflow="fold")
    best = _best(records, "pattern")
    for name in dict.fromkeys(str(entry["strategy"]) for entry in records):
        by_pattern = {str(e["pattern"]): e for e in records if e["strategy"] == name}
        cells = [_simulated(by_pattern.get(pattern), best.get(pattern)) for pattern in patterns]
        table.add_row(name, *cells)
    return table


def _simulated(entry: Record | None, best: float | None) -> Text:
    if entry is None:
        return Text("")
    if entry["status"] != Status.OK:
        return Text(str(entry["status"]), style="dim")
    time_s, bound_s = entry["time_s"], entry["bound_s"]
    assert isinstance(time_s, float) and isinstance(bound_s, float)
    mark = "*" if time_s == best else ""
    text = f"{milliseconds(time_s)}{mark} {time_s / bound_s:.1f}×"
    return Text(text, style="bold green" if mark else "")


def measured_table(title: str, records: Sequence[Record]) -> Table:
    """One row a cell: milliseconds with their spread, speed against ring, error, bytes."""
    table = Table(
        title=title,
        title_justify="left",
        caption="median of the slowest rank, p20-p80; error relative to the float64 oracle",
        caption_justify="left",
        pad_edge=False,
    )
    for name in ("pattern", "strategy"):
        table.add_column(name, overflow="fold")
    for name in ("ms", "p20-p80", "vs ring", "error", "MiB", "wait ms", "imbal"):
        table.add_column(name, justify="right", no_wrap=True)
    best = _best(records, "pattern")
    base = {
        entry["pattern"]: entry["time_s"]
        for entry in records
        if entry["strategy"] == _BASE and entry["status"] == Status.OK
    }
    for entry in records:
        style = "bold green" if entry["time_s"] == best.get(str(entry["pattern"])) else ""
        table.add_row(
            str(entry["pattern"]), str(entry["strategy"]), *_measured(entry, base), style=style
        )
    return table


def _measured(entry: Record, base: Mapping[object, object]) -> list[str]:
    if entry["status"] != Status.OK:
        return [str(entry["status"]), *[""] * 6]
    time_s, low, high, wait_s = (
        _number(entry[name]) for name in ("time_s", "p20_s", "p80_s", "exposed_comm_s")
    )
    ring = base.get(entry["pattern"])
    return [
        milliseconds(time_s),
        f"{milliseconds(low)}-{milliseconds(high)}",
        f"{_number(ring) / time_s:.2f}×" if ring is not None else "",
        worst_error(entry),
        f"{_number(entry['bytes_sent_per_rank']) / _MIB:.2f}",
        milliseconds(wait_s),
        f"{_number(entry['imbalance']):.2f}",
    ]


def _best(records: Sequence[Record], by: str) -> dict[str, float]:
    best: dict[str, float] = {}
    for entry in records:
        if entry["status"] == Status.OK:
            key, time_s = str(entry[by]), _number(entry["time_s"])
            best[key] = min(time_s, best.get(key, time_s))
    return best


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


def milliseconds(seconds: float) -> str:
    """Format seconds as ms with three digits: `0.123`, `12.3`, `1234`."""
    value = seconds * 1e3
    if value >= 100:  # three digits are enough
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def short(tokens: int) -> str:
    """Format a number of tokens: `64k`, `1m`, `1000`."""
    for unit, size in (("m", 2**20), ("k", 2**10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)
