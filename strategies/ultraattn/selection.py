"""Which pairs of plans may be chosen, when both directions share the places of tokens.

A pair that is fast in all can be slow in one direction, which is all that counts where only that
one is run. So a pair may not be slower, in either direction, than simple plans are.
"""

from collections.abc import Mapping, Sequence

from harness.plan.problem import Direction

CLOSE = 1.01  # as fast as a simple plan, give or take what no measurement would tell

Times = Mapping[Direction, float]
"""Seconds by direction."""


def fastest(pairs: Sequence[Times]) -> Times:
    """Return the least time of each direction."""
    return {direction: min(times[direction] for times in pairs) for direction in Direction}


def fair(pairs: Sequence[Times], simple: Times) -> list[int]:
    """Return which pairs are close, in each direction, to the fastest simple plan of it.

    Where none is, the nearest are: those whose worse direction is the least slower.

    Args:
        pairs: What can be chosen; at least one.
        simple: What to compare with (see `fastest`).
    """
    worst = [_worst(times, simple) for times in pairs]
    limit = max(CLOSE, min(worst))
    return [index for index, ratio in enumerate(worst) if ratio <= limit]


def is_fair(pair: Times, simple: Times) -> bool:
    """Whether a pair is close to the fastest simple plan in each direction."""
    return _worst(pair, simple) <= CLOSE


def _worst(pair: Times, simple: Times) -> float:
    return max(pair[d] / simple[d] if simple[d] else 1.0 for d in Direction)
