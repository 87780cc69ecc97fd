"""Two sets of results: what changed beyond the spread of their samples.

Cells are matched by the hash of their configuration; of a cell that ran twice the last record
counts. The rule for a measured time: it changed if the two medians differ by more than a threshold
(10 % by default) and the p20-p80 bands of the samples do not overlap. Samples of one run lean on
one another, so a test that takes them for independent would see changes that are not there; bands
that are apart need a shift of 1.7 standard deviations of a single sample, which for 20 samples of
normal noise happens by chance in one cell of 30 000. With 5 to 19 samples their whole ranges must
be apart; with fewer the time is not judged, and said to be so.

What moves a whole run of a cell (a neighbour's load, clocks) is not in its samples, but in how the
cells of one strategy scatter about that strategy's own median change: the threshold is raised to
twice the 90th percentile of that scatter over all strategies, where it is larger. A strategy that
is slower as a whole adds nothing to it. Sweeps of fewer than 8 such cells tell nothing of it, so
run those on a quiet machine; a load that lasts through a whole sweep is a change like any other.

Simulated times have no spread: any difference beyond rounding is a change. So is any difference of
a status, a plan's hash, bytes or memory. A numerical error grew if it is more than twice what it
was; less can come from another processor's order of additions.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.records.store import Record

THRESHOLD = 0.1
"""The least relative change of a median that counts."""

_BANDS_FROM, _RANGES_FROM = 20, 5  # samples
_CELLS_FOR_SCATTER, _OF_A_STRATEGY = 8, 3
_SCATTER_SHARE, _SCATTER_FACTOR = 0.9, 2.0
_ROUNDING = 1e-9
_ERROR_GROWTH = 2.0
_EXACT = ("plan_hash", "bytes_sent_per_rank", "peak_bytes")
_CONTEXT = ("python", "system", "cpu", "cores", "threads_per_rank", "commit", "dirty")
_NESTED_CONTEXT = ("packages", "variables")


class Kind(StrEnum):
    """What changed in a cell."""

    MISSING = "missing"
    EXTRA = "extra"
    STATUS = "status"
    SLOWER = "slower"
    FASTER = "faster"
    ERROR = "error grew"
    PLAN_HASH = "plan_hash"
    BYTES_SENT_PER_RANK = "bytes_sent_per_rank"
    PEAK_BYTES = "peak_bytes"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that changed in one cell.

    Attributes:
        kind: What.
        config_hash: Of the cell.
        strategy: Of the cell, with its options.
        cell: The rest of its configuration, as a line.
        before: The value in the first set; None where it has none.
        after: The value in the second.
        detail: What else there is to say: bands, the tensor, the reason.
    """

    kind: Kind
    config_hash: str
    strategy: str
    cell: str
    before: object
    after: object
    detail: str = ""

    @property
    def ratio(self) -> float | None:
        """After over before, of times and errors."""
        if self.kind not in (Kind.SLOWER, Kind.FASTER, Kind.ERROR):
            return None
        before, after = _number(self.before), _number(self.after)
        return after / before if before else None

    @property
    def worse(self) -> bool:
        """Whether the second set is worse: slower, wrong, gone, or with more bytes or memory."""
        match self.kind:
            case Kind.SLOWER | Kind.ERROR | Kind.MISSING:
                return True
            case Kind.STATUS:
                return self.before == "ok"
            case Kind.BYTES_SENT_PER_RANK | Kind.PEAK_BYTES:
                return _number(self.after) > _number(self.before)
            case Kind.FASTER | Kind.EXTRA | Kind.PLAN_HASH:
                return False

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return {
            "kind": self.kind.value,
            "worse": self.worse,
            "config_hash": self.config_hash,
            "strategy": self.strategy,
            "cell": self.cell,
            "before": self.before,
            "after": self.after,
            "ratio": self.ratio,
            "detail": self.detail,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """What comparing two sets gave.

    Attributes:
        threshold: The least relative change of a median that was asked to count.
        scatter: Relative change that the scatter between the two runs alone may give a cell, which
            counted instead where larger; None where there are too few cells to tell.
        matched: Cells that are in both sets.
        unchanged: Of these, cells in which nothing changed.
        not_judged: Of these, cells whose times have too few samples, as text.
        changes: What changed, in the order of the first set's cells, then of the second's.
        environment: Facts of machine and checkout that differ, before and after; no change by
            themselves.
    """

    threshold: float
    scatter: float | None
    matched: int
    unchanged: int
    not_judged: tuple[str, ...]
    changes: tuple[Change, ...]
    environment: Mapping[str, tuple[object, object]]

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return {
            "threshold": self.threshold,
            "scatter": self.scatter,
            "matched": self.matched,
            "unchanged": self.unchanged,
            "not_judged": list(self.not_judged),
            "changes": [change.as_json() for change in self.changes],
            "environment": {name: list(pair) for name, pair in self.environment.items()},
        }


def compare(
    before: Sequence[Record], after: Sequence[Record], *, threshold: float = THRESHOLD
) -> Comparison:
    """Compare two sets of records.

    Args:
        before: The first set.
        after: The second set.
        threshold: The least relative change of a median that counts, > 0; of the smaller median.

    Raises:
        ValueError: One set is empty, or the threshold is not positive.
    """
    if not threshold > 0:
        raise ValueError(f"threshold ({threshold}) must be positive, for instance {THRESHOLD}")
    if not before or not after:
        raise ValueError("compare needs two sets with records; one of them is empty")
    first, second = _by_cell(before), _by_cell(after)
    scatter = _scatter([(first[key], second[key]) for key in first if key in second])
    least = max(threshold, scatter or 0.0)
    changes: list[Change] = []
    unchanged, not_judged = 0, []
    for key, old in first.items():
        if key not in second:
            changes.append(_change(Kind.MISSING, old, old["status"], None))
            continue
        new = second[key]
        found = list(_changes(old, new, least))
        changes += found
        unchanged += not found
        if _spread(old, new) is None and not _exact(old, new) and _timed(old, new):
            not_judged.append(f"{old['strategy']} {_cell(old)}")
    changes += [
        _change(Kind.EXTRA, new, None, new["status"])
        for key, new in second.items()
        if key not in first
    ]
    return Comparison(
        threshold,
        scatter,
        len(first.keys() & second.keys()),
        unchanged,
        tuple(not_judged),
        tuple(changes),
        _environment(list(first.values()), list(second.values())),
    )


def _by_cell(records: Iterable[Record]) -> dict[str, Record]:
    return {str(entry["config_hash"]): entry for entry in records}


def _changes(old: Record, new: Record, threshold: float) -> Iterable[Change]:
    if old["status"] != new["status"]:
        reason = str(new["reason"] or old["reason"])
        yield _change(Kind.STATUS, new, old["status"], new["status"], reason)
    for name in _EXACT:
        if None not in (old.get(name), new.get(name)) and old[name] != new[name]:
            yield _change(Kind(name), new, old[name], new[name])
    if _timed(old, new):
        time = _time(old, new, threshold)
        if time is not None:
            yield time
    errors, grown = old.get("max_rel_error") or {}, new.get("max_rel_error") or {}
    assert isinstance(errors, Mapping) and isinstance(grown, Mapping)
    for tensor in sorted(errors.keys() & grown.keys()):
        if not grown[tensor] <= errors[tensor] * _ERROR_GROWTH:  # true of NaN as well
            yield _change(Kind.ERROR, new, errors[tensor], grown[tensor], tensor)


def _scatter(pairs: Iterable[tuple[Record, Record]]) -> float | None:
    """How far measured times of one strategy scatter about its own median change."""
    logs: dict[str, list[float]] = {}
    for old, new in pairs:
        if _timed(old, new) and not _exact(old, new):
            change = math.log(_number(new["time_s"]) / _number(old["time_s"]))
            logs.setdefault(str(old["strategy"]), []).append(change)
    residuals = sorted(
        abs(change - statistics.median(own))
        for own in logs.values()
        if len(own) >= _OF_A_STRATEGY
        for change in own
    )
    if len(residuals) < _CELLS_FOR_SCATTER:
        return None
    high = residuals[math.ceil(_SCATTER_SHARE * len(residuals)) - 1]
    return math.expm1(_SCATTER_FACTOR * high)


def _timed(old: Record, new: Record) -> bool:
    return old["time_s"] is not None and new["time_s"] is not None


def _exact(old: Record, new: Record) -> bool:
    """Whether both times are computed, not measured."""
    return "measured" not in (old["source"], new["source"])


def _time(old: Record, new: Record, threshold: float) -> Change | None:
    """Judge the times of a cell by the rule above."""
    was, now = _number(old["time_s"]), _number(new["time_s"])
    kind = Kind.SLOWER if now > was else Kind.FASTER
    if _exact(old, new):
        same = abs(now - was) <= _ROUNDING * max(was, now)
        return None if same else _change(kind, new, was, now)
    bands = _spread(old, new)
    if bands is None:
        return None
    (low, high), (new_low, new_high) = bands
    apart = new_low > high or new_high < low
    if not apart or abs(now - was) <= threshold * min(was, now):
        return None
    detail = f"{low:.3g} to {high:.3g} s before, {new_low:.3g} to {new_high:.3g} s after"
    return _change(kind, new, was, now, detail)


def _spread(old: Record, new: Record) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Bands of the samples of both, or None where one has too few."""
    first, second = _samples(old), _samples(new)
    fewest = min(len(first), len(second))
    if fewest < _RANGES_FROM:
        return None
    if fewest < _BANDS_FROM:
        return (min(first), max(first)), (min(second), max(second))
    return _band(first), _band(second)


def _band(samples: Sequence[float]) -> tuple[float, float]:
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return fifths[0], fifths[-1]


def _samples(entry: Record) -> list[float]:
    samples = entry["samples_s"]
    assert isinstance(samples, Sequence)
    return [_number(sample) for sample in samples]


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _change(kind: Kind, entry: Record, before: object, after: object, detail: str = "") -> Change:
    return Change(
        kind,
        str(entry["config_hash"]),
        str(entry["strategy"]),
        _cell(entry),
        before,
        after,
        detail,
    )


def _cell(entry: Record) -> str:
    where = entry["cluster"] or entry["transport"]
    keys = "" if entry["seqlen_kv"] == entry["seqlen_q"] else f"/{entry['seqlen_kv']}"
    return (
        f"{entry['pattern']} cp={entry['cp']} S={entry['seqlen_q']}{keys} "
        f"heads={entry['heads_q']}/{entry['heads_kv']} D={entry['head_dim']} "
        f"B={entry['batch']} {entry['dtype']} {entry['direction']} on {where}"
    )


def _environment(
    before: Sequence[Record], after: Sequence[Record]
) -> dict[str, tuple[object, object]]:
    """Facts that differ between the last records of the two sets."""
    old, new = _facts(before[-1]), _facts(after[-1])
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _facts(entry: Record) -> dict[str, object]:
    found = entry.get("environment")
    assert isinstance(found, Mapping)
    facts = {name: found[name] for name in _CONTEXT if name in found}
    for group in _NESTED_CONTEXT:
        facts |= found.get(group, {})
    return facts
