"""Choose among priced candidates: the fastest, what cannot be told apart from it, and the second.

Times that differ by less than their expected error are tied. A tie is broken by memory, in steps of
a tenth of what a rank may hold, then by simplicity, which is fewer options, then by time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.recommend.price import Priced
from harness.report.best import NEAR

_STEPS = 10


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen.

    Attributes:
        best: The answer.
        ties: The others that are tied, fastest first.
        second: The fastest of all others; None if there is none.
    """

    best: Priced
    ties: tuple[Priced, ...]
    second: Priced | None


def choose_among(priced: Sequence[Priced], memory_bytes: int) -> Choice | None:
    """Choose; None if nothing runs.

    Args:
        priced: Candidates that run.
        memory_bytes: What a rank may hold.
    """
    ranked = sorted(distinct(priced), key=lambda one: (one.time_s, one.order))
    if not ranked:
        return None
    fastest = ranked[0]
    tied = [one for one in ranked if one.time_s <= fastest.time_s * (1 + _off(fastest, one))]
    best = min(tied, key=lambda one: (one.peak_bytes * _STEPS // memory_bytes, one.options))
    others = [one for one in ranked if one is not best]
    ties = tuple(one for one in tied if one is not best)
    return Choice(best, ties, others[0] if others else None)


def distinct(priced: Sequence[Priced]) -> list[Priced]:
    """Leave out candidates that take the time and the memory of a simpler one, to many digits."""
    found: dict[tuple[str, int], Priced] = {}
    for one in sorted(priced, key=lambda one: (one.options, one.order)):
        found.setdefault((f"{one.time_s:.9e}", one.peak_bytes), one)
    return list(found.values())


def _off(*priced: Priced) -> float:
    """Share by which times may be off: the largest of them."""
    return max(NEAR if one.error is None else one.error for one in priced)
