"""What travels a ring, queries or keys: by the bytes of a block, or by predicted time."""

from collections.abc import Callable
from enum import StrEnum

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.planning.block_assignment import line_bytes
from harness.planning.strategy import Context


class Traveller(StrEnum):
    """What travels."""

    QUERIES = "queries"
    KEYS = "keys"


class Carry(StrEnum):
    """What travels forward, or who decides on both directions."""

    QUERIES = "queries"
    KEYS = "keys"
    AUTO = "auto"


def fewest_bytes(problem: Problem, direction: Direction) -> Traveller:
    """Return what is fewer bytes, with all that comes home.

    Source: Meta, arXiv:2411.01783, section 3.5; BurstAttention, arXiv:2509.19836.
    """
    queries, keys = line_bytes(problem, direction)
    return Traveller.QUERIES if queries <= keys else Traveller.KEYS


def faster_traveller(
    problem: Problem,
    direction: Direction,
    context: Context,
    planned: Callable[[Traveller], Plan],
) -> Traveller:
    """Return what is predicted to be faster; what is fewer bytes where nothing predicts."""
    if context.evaluate is None:
        return fewest_bytes(problem, direction)
    times = {each: context.evaluate(planned(each)) for each in Traveller}
    return min(times, key=lambda each: times[each])
