"""Notes under the tables of a sweep."""

import re
from collections import Counter
from collections.abc import Sequence

from harness.plan.sharding import Placement
from harness.planning.options import placement_of
from harness.planning.peers import is_peer
from harness.records.cell import CellRecord
from harness.report.format import drift_of, short
from strategies import strategy

_UNEVEN = 1.25
"""Imbalance from which another placement is suggested."""


def crowded(measured: Sequence[CellRecord]) -> list[str]:
    """Say where more ranks ran than there were cores."""
    found = set()
    for entry in measured:
        cores = entry.environment.get("cores")
        if isinstance(cores, int) and entry.config.cp > cores:
            found.add((entry.config.cp, cores))
    return [
        f"note: {cp} ranks on {cores} cores take turns: times at cp={cp} show the total work and "
        "little of the overlap"
        for cp, cores in sorted(found)
    ]


def same_plans(records: Sequence[CellRecord]) -> list[str]:
    """Name strategies whose plans are one and the same, and for which patterns if not for all.

    Args:
        records: Of one problem and direction, on one pattern or several.
    """
    patterns = list(dict.fromkeys(entry.config.pattern for entry in records))
    groups: dict[tuple[str, ...], list[str]] = {}
    for pattern in patterns:
        alike_in: dict[str, list[str]] = {}
        for entry in records:
            if entry.config.pattern == pattern and entry.work_hash:
                alike_in.setdefault(entry.work_hash, []).append(entry.label)
        for names in alike_in.values():
            if len(names) > 1:
                groups.setdefault(tuple(names), []).append(pattern)
    return [
        " = ".join(names) + ("" if where == patterns else f" ({', '.join(where)})")
        for names, where in groups.items()
    ]


def drifting(measured: Sequence[CellRecord]) -> list[str]:
    """Say how far times of one plan are apart: smaller differences mean nothing.

    Args:
        measured: Of one problem, pattern and direction.
    """
    share = f"{drift_of(measured):.0%}"
    if share == "0%":
        return []
    return [
        f"rows of one plan differ by up to {share}: what differs by less cannot be told apart here"
    ]


def trusted(records: Sequence[CellRecord]) -> list[str]:
    """Name each calibration, kernel and runtime, the expected error, and the cells outside."""
    groups: dict[str, list[CellRecord]] = {}
    for entry in records:
        if entry.calibration:
            groups.setdefault(_predicted_by(entry, entry.calibration), []).append(entry)
    found = []
    for name, own in sorted(groups.items()):
        known = [entry.expected_error for entry in own if entry.expected_error is not None]
        span = dict.fromkeys(f"{error:.0%}" for error in (min(known), max(known))) if known else ()
        text = f"{name}; expected error {' to '.join(span) or 'unknown'}"
        most = [entry.expected_error_p90 for entry in own if entry.expected_error_p90 is not None]
        if most:
            text += f" (9 in 10 within {max(most):.0%})"
        beyond = Counter(_place(entry) for entry in own if entry.inside_range is False)
        if beyond:
            cells = ", ".join(f"{count} at {where}" for where, count in beyond.items())
            text += f"; error unknown outside its range (cells: {cells})"
        found.append(text)
    return found


def _predicted_by(entry: CellRecord, said: str) -> str:
    """Calibration, kernel and runtime: what is said of the range stands behind them."""
    by = re.split("; (?:inside|OUTSIDE) its range", said)[0]
    runtime = entry.config.runtime
    return by if runtime is None or str(runtime) in by else f"{by}; runtime {runtime}"


def _place(entry: CellRecord) -> str:
    return f"cp={entry.config.cp} S={short(entry.config.seqlen_q)}"


def apart(records: Sequence[CellRecord]) -> list[str]:
    """Name strategies that were tried in some of the simulated problems only."""
    places: dict[str, list[str]] = {}
    for entry in records:
        where = _place(entry)
        mine = places.setdefault(entry.config.strategy, [])
        if where not in mine:
            mine.append(where)
    most = {where for mine in places.values() for where in mine}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, mine in places.items():
        if len(mine) < len(most):
            groups.setdefault(tuple(mine), []).append(name)
    return [
        f"note: {', '.join(names)}: tried at {', '.join(where)} only; elsewhere the best is chosen "
        "among the others"
        for where, names in groups.items()
    ]


def uneven(records: Sequence[CellRecord]) -> list[str]:
    """Name strategies whose placement of tokens loads ranks unevenly, and the other placements."""
    rows: dict[str, set[Placement]] = {}
    worst: dict[str, float] = {}
    for entry in records:
        text = entry.config.strategy
        if is_peer(text) or entry.imbalance is None:
            continue
        chosen = strategy(text)
        name, placement = chosen.strategy.name, placement_of(chosen.options)
        if placement is not None:
            rows.setdefault(name, set()).add(placement)
            worst[name] = max(worst.get(name, 1.0), entry.imbalance)
    notes = []
    for name, had in rows.items():
        others = [other for other in Placement if other not in had]
        if worst[name] > _UNEVEN and len(had) == 1:
            notes.append(
                f"{name}: with its placement some rank has up to {worst[name]:.2f} times the mean "
                f"work; try {name}:placement={', '.join(others)}"
            )
    return notes


def refusals(records: Sequence[CellRecord]) -> Counter[str]:
    """Reasons why cells did not run or are not judged, with the number of cells of each."""
    return Counter(
        f"{entry.status}: {entry.reason.splitlines()[0]}" for entry in records if entry.reason
    )
