"""How the numbers and names of records are written in tables."""

import re
from collections.abc import Callable, Iterable

from harness.cluster.machine import Runtime
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Scope
from harness.records.cell import CellRecord, Source

ABSENT = "—"
"""Stands where a record has no such number."""


def milliseconds(seconds: float) -> str:
    """Format seconds as ms with three digits: `0.12`, `12.3`, `1234`."""
    value = seconds * 1e3
    if value >= 99.95:  # three digits are enough
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def memory(count: float) -> str:
    """Format bytes in powers of 1024 with two digits or more: `18K`, `3.4M`, `0.56G`, `71G`."""
    units = ("K", 2**10), ("M", 2**20), ("G", 2**30)
    unit, size = next((pair for pair in units[:2] if count < pair[1] * 2**10 / 2), units[2])
    value = count / size
    if value >= 9.95:
        return f"{value:.0f}{unit}"
    return f"{value:.1f}{unit}" if value >= 0.995 else f"{value:.2g}{unit}"


def short(tokens: int) -> str:
    """Format a number of tokens: `64k`, `1m`, `1000`."""
    for unit, size in (("m", 2**20), ("k", 2**10)):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def broken(name: str, width: int) -> str:
    """Break a name where it is too long for a line: before an option, else after punctuation."""
    lines = [""]
    for part in re.findall(r"[^:,/]+[:,/]?", name):
        pieces = [part] if len(part) <= width else re.findall(r"[^_+=-]*[_+=-]?", part)
        for piece in pieces:
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(lines)


def known(value: float | None, shown: Callable[[float], str]) -> str:
    """Format a number, or a dash for None."""
    return ABSENT if value is None else shown(value)


def unprefixed(name: str) -> str:
    """A name in a table: of others' code without the prefix that all of them have."""
    return name.removeprefix("peer:")


def problem(entry: CellRecord) -> str:
    """Where a record is from and what it is of, but for lengths, degree and direction."""
    cell = entry.config
    where = cell.cluster or f"measured here, {cell.transport}"
    batch = f" B={cell.batch}" if cell.batch != 1 else ""
    layer = ""
    if cell.scope is Scope.LAYER:
        turned = f" rotary={cell.rotary:.0f}" if cell.rotary else ""
        layer = f" layer hidden={cell.hidden or cell.heads_q * cell.head_dim}{turned}"
    keys = f" keys={short(cell.seqlen_kv)}" if cell.seqlen_kv != cell.seqlen_q else ""
    eager = f" {cell.runtime}" if cell.runtime not in (None, Runtime.GRAPH) else ""
    return (
        f"{where}:{eager}{layer} heads={cell.heads_q}/{cell.heads_kv} D={cell.head_dim}"
        f"{batch}{keys} {cell.dtype}"
    )


def worst_error(entry: CellRecord) -> str:
    """Largest error of a record's results, as text; empty if it has none."""
    if not entry.max_rel_error:
        return ""
    found = [error for error in entry.max_rel_error.values() if error is not None]
    return f"{max(found):.3g}" if len(found) == len(entry.max_rel_error) else "not finite"


def sample_range(entry: CellRecord) -> tuple[float, float]:
    """Where most samples of a time lie: p20 to p80; a time without samples is exact."""
    time_s = entry.seconds
    low, high = entry.p20_s, entry.p80_s
    return (time_s if low is None else low, time_s if high is None else high)


def alike(one: CellRecord, other: CellRecord, drift: float) -> bool:
    """Whether two times are not to be told apart: their spreads overlap, or rows drift as much.

    Args:
        one: A record.
        other: Another of the same table.
        drift: Of that table; see `drift_of`.
    """
    (low, high), (other_low, other_high) = sample_range(one), sample_range(other)
    slack = 1 + 1e-9  # rounding of simulated times
    least_s, most_s = sorted((one.seconds, other.seconds))
    overlap = low <= other_high * slack and other_low <= high * slack
    return overlap or most_s <= least_s * (1 + drift) * slack


def drift_of(records: Iterable[CellRecord]) -> float:
    """Largest share by which measured times of one and the same plan differ; 0 without such rows.

    A row's samples are taken at once, and other rows at other times: what a busy machine did in
    between is in no row's spread. Rows that did the same work show it.

    Args:
        records: Of one problem, pattern and direction.
    """
    times: dict[str, list[float]] = {}
    for entry in records:
        if entry.source is Source.MEASURED and entry.work_hash and entry.ok:
            times.setdefault(entry.work_hash, []).append(entry.seconds)
    return max((max(own) / min(own) - 1 for own in times.values()), default=0.0)


def cell_heading(strategy: str, problem: Problem, direction: Direction) -> str:
    """Name one cell as a heading: all that decides a plan but for the cluster."""
    tokens = short(problem.seqlen_q)
    keys = f" keys={short(problem.seqlen_kv)}" if problem.seqlen_kv != problem.seqlen_q else ""
    batch = f" B={problem.batch}" if problem.batch != 1 else ""
    layer = f" layer hidden={problem.hidden}" if problem.hidden is not None else ""
    return (
        f"{strategy} {problem.pattern.text} cp={problem.cp} S={tokens}{keys}{batch}{layer} "
        f"heads={problem.heads_q}/{problem.heads_kv} D={problem.head_dim} {problem.dtype.value} "
        f"{direction.value}"
    )
