"""Which pairs of plans may be chosen, when both directions share the places of tokens.

A pair that is fast in all can be slow in one direction, which is all that counts where only that
one is run. So a pair may not be slower, in either direction, than simple plans are.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from harness.plan.problem import Direction

CLOSE = 1.01  # as fast as a simple plan, give or take what no measurement would tell


class Favour(StrEnum):
    """The direction that counts where both share the places of tokens.

    BOTH: Neither is slower than simple plans, then the sum. FORWARD, BACKWARD: That one alone, as
    where prompts are read and nothing is trained.
    """

    BOTH = "both"
    FORWARD = "forward"
    BACKWARD = "backward"


SecondsByDirection = Mapping[Direction, float]
"""Seconds by direction."""


def total(times: SecondsByDirection) -> float:
    """Return the seconds of both directions."""
    return sum(times.values())


def no_slower(one: SecondsByDirection, other: SecondsByDirection) -> bool:
    """Whether one pair takes at most what another takes, in each direction."""
    return all(one[direction] <= other[direction] for direction in Direction)


def fastest(pairs: Sequence[SecondsByDirection]) -> SecondsByDirection:
    """Return the least time of each direction."""
    return {direction: min(times[direction] for times in pairs) for direction in Direction}


def fair(pairs: Sequence[SecondsByDirection], simple: SecondsByDirection) -> list[int]:
    """Return which pairs are close, in each direction, to the fastest simple plan of it.

    Where none is, the nearest are: those whose worse direction is the least slower.

    Args:
        pairs: The candidates; at least one.
        simple: Plans to compare with (see `fastest`).
    """
    worst = [_worst(times, simple) for times in pairs]
    limit = max(CLOSE, min(worst))
    return [index for index, ratio in enumerate(worst) if ratio <= limit]


def is_fair(pair: SecondsByDirection, simple: SecondsByDirection) -> bool:
    """Whether a pair is close to the fastest simple plan in each direction."""
    return _worst(pair, simple) <= CLOSE


def best_fair(pairs: Sequence[SecondsByDirection], simple: SecondsByDirection) -> int:
    """Return which pair takes the least time in all, of those that are `fair`."""
    return min(fair(pairs, simple), key=lambda index: total(pairs[index]))


def favoured(pairs: Sequence[SecondsByDirection], favour: Favour) -> int:
    """Return which pair is best in the direction that counts, or for both by `best_fair`."""
    if favour is Favour.BOTH:
        return best_fair(pairs, fastest(pairs))
    return min(range(len(pairs)), key=lambda index: pairs[index][Direction(favour.value)])


def _worst(pair: SecondsByDirection, simple: SecondsByDirection) -> float:
    return max(pair[d] / simple[d] if simple[d] else 1.0 for d in Direction)
