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

from harness.records.cell import CellRecord, Source

THRESHOLD = 0.1
"""The least relative change of a median that counts."""

_BANDS_FROM, _RANGES_FROM = 20, 5  # samples
_CELLS_FOR_SCATTER, _OF_A_STRATEGY = 8, 3
_SCATTER_SHARE, _SCATTER_FACTOR = 0.9, 2.0
_ROUNDING = 1e-9
_ERROR_GROWTH = 2.0
_CONTEXT = ("python", "system", "cpu", "cores", "threads_per_rank", "commit", "dirty")
_NESTED_CONTEXT = ("packages", "variables")


class ChangeKind(StrEnum):
    """Kind of a change in a cell."""

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
class CellChange:
    """One thing that changed in one cell.

    Attributes:
        kind: What.
        config_hash: Of the cell.
        strategy: Of the cell, with its options.
        cell: The rest of its configuration, as a line.
        before: The value in the first set; None where it has none.
        after: The value in the second.
        detail: Further facts: bands, the tensor, the reason.
    """

    kind: ChangeKind
    config_hash: str
    strategy: str
    cell: str
    before: object
    after: object
    detail: str = ""

    @property
    def ratio(self) -> float | None:
        """After over before, of times and errors."""
        if self.kind not in (ChangeKind.SLOWER, ChangeKind.FASTER, ChangeKind.ERROR):
            return None
        before, after = self.before, self.after
        if not (isinstance(before, float) and isinstance(after, float) and before):
            return None
        ratio = after / before
        return ratio if math.isfinite(ratio) else None

    @property
    def worse(self) -> bool:
        """Whether the second set is worse: slower, wrong, gone, or with more bytes or memory."""
        match self.kind:
            case ChangeKind.SLOWER | ChangeKind.ERROR | ChangeKind.MISSING:
                return True
            case ChangeKind.STATUS:
                return self.before == "ok"
            case ChangeKind.BYTES_SENT_PER_RANK | ChangeKind.PEAK_BYTES:
                more, less = self.after, self.before
                return isinstance(more, int) and isinstance(less, int) and more > less
            case ChangeKind.FASTER | ChangeKind.EXTRA | ChangeKind.PLAN_HASH:
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
    """Result of comparing two sets of records.

    Attributes:
        threshold: The least relative change of a median that was asked to count.
        scatter: Relative change that the scatter between the two runs alone may give a cell, which
            counted instead where larger; None where there are too few cells to tell.
        matched: Cells that are in both sets.
        unchanged: Of these, cells in which nothing changed.
        not_judged: Of these, cells whose times have too few samples, as text.
        changes: The changes, in the order of the first set's cells, then of the second's.
        environment: Facts of machine and checkout that differ, before and after; no change by
            themselves.
    """

    threshold: float
    scatter: float | None
    matched: int
    unchanged: int
    not_judged: tuple[str, ...]
    changes: tuple[CellChange, ...]
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
    before: Sequence[CellRecord], after: Sequence[CellRecord], *, threshold: float = THRESHOLD
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
    changes: list[CellChange] = []
    unchanged, not_judged = 0, []
    for key, old in first.items():
        if key not in second:
            changes.append(_change(ChangeKind.MISSING, old, old.status, None))
            continue
        new = second[key]
        found = list(_changes(old, new, least))
        changes += found
        unchanged += not found
        if _spread(old, new) is None and not _exact(old, new) and _timed(old, new):
            not_judged.append(f"{old.config.strategy} {_cell(old)}")
    changes += [
        _change(ChangeKind.EXTRA, new, None, new.status)
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


def _by_cell(records: Iterable[CellRecord]) -> dict[str, CellRecord]:
    return {entry.config_hash: entry for entry in records}


def _changes(old: CellRecord, new: CellRecord, threshold: float) -> Iterable[CellChange]:
    if old.status != new.status:
        reason = new.reason or old.reason
        yield _change(ChangeKind.STATUS, new, old.status, new.status, reason)
    after = _computed(new)
    for kind, value in _computed(old).items():
        if None not in (value, after[kind]) and value != after[kind]:
            yield _change(kind, new, value, after[kind])
    time = _time(old, new, threshold)
    if time is not None:
        yield time
    errors, grown = old.max_rel_error or {}, new.max_rel_error or {}
    for tensor in sorted(errors.keys() & grown.keys()):
        was, now = errors[tensor], grown[tensor]
        if was is not None and (now is None or now > was * _ERROR_GROWTH):
            yield _change(ChangeKind.ERROR, new, was, now, tensor)


def _computed(entry: CellRecord) -> dict[ChangeKind, str | int | None]:
    """Values of a cell that are computed and not measured: any difference is a change."""
    return {
        ChangeKind.PLAN_HASH: entry.plan_hash,
        ChangeKind.BYTES_SENT_PER_RANK: entry.bytes_sent_per_rank,
        ChangeKind.PEAK_BYTES: entry.peak_bytes,
    }


def _scatter(pairs: Iterable[tuple[CellRecord, CellRecord]]) -> float | None:
    """How far measured times of one strategy scatter about its own median change."""
    logs: dict[str, list[float]] = {}
    for old, new in pairs:
        if old.time_s is not None and new.time_s is not None and not _exact(old, new):
            change = math.log(new.time_s / old.time_s)
            logs.setdefault(old.config.strategy, []).append(change)
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


def _timed(old: CellRecord, new: CellRecord) -> bool:
    return old.time_s is not None and new.time_s is not None


def _exact(old: CellRecord, new: CellRecord) -> bool:
    """Whether both times are computed, not measured."""
    return Source.MEASURED not in (old.source, new.source)


def _time(old: CellRecord, new: CellRecord, threshold: float) -> CellChange | None:
    """Judge the times of a cell by the rule above."""
    was, now = old.time_s, new.time_s
    if was is None or now is None:
        return None
    kind = ChangeKind.SLOWER if now > was else ChangeKind.FASTER
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


def _spread(
    old: CellRecord, new: CellRecord
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Bands of the samples of both, or None where one has too few."""
    first, second = old.samples_s, new.samples_s
    fewest = min(len(first), len(second))
    if fewest < _RANGES_FROM:
        return None
    if fewest < _BANDS_FROM:
        return (min(first), max(first)), (min(second), max(second))
    return _band(first), _band(second)


def _band(samples: Sequence[float]) -> tuple[float, float]:
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return fifths[0], fifths[-1]


def _change(
    kind: ChangeKind, entry: CellRecord, before: object, after: object, detail: str = ""
) -> CellChange:
    return CellChange(
        kind,
        entry.config_hash,
        entry.config.strategy,
        _cell(entry),
        before,
        after,
        detail,
    )


def _cell(entry: CellRecord) -> str:
    cell = entry.config
    where = cell.cluster or cell.transport
    keys = "" if cell.seqlen_kv == cell.seqlen_q else f"/{cell.seqlen_kv}"
    return (
        f"{cell.pattern} cp={cell.cp} S={cell.seqlen_q}{keys} "
        f"heads={cell.heads_q}/{cell.heads_kv} D={cell.head_dim} "
        f"B={cell.batch} {cell.dtype} {cell.direction} on {where}"
    )


def _environment(
    before: Sequence[CellRecord], after: Sequence[CellRecord]
) -> dict[str, tuple[object, object]]:
    """Facts that differ between the last records of the two sets."""
    old, new = _facts(before[-1]), _facts(after[-1])
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _facts(entry: CellRecord) -> dict[str, object]:
    found = entry.environment
    facts = {name: found[name] for name in _CONTEXT if name in found}
    for group in _NESTED_CONTEXT:
        nested = found.get(group)
        if isinstance(nested, Mapping):
            facts |= nested
    return facts
