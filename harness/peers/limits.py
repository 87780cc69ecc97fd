"""What a peer is judged on, and how far off each of its results may be."""

from harness.oracle.reference import RESULTS
from harness.oracle.tolerance import Tolerance, limit
from harness.plan.problem import Direction
from harness.plan.tasks import Tensor
from harness.planning.peers import peer
from harness.records.config import Config


def judged(direction: Direction) -> tuple[tuple[str, Tensor], ...]:
    """Results of a direction; no peer hands out the log-sum-exp of the whole softmax."""
    return tuple(each for each in RESULTS[direction] if each[1] is not Tensor.LSE)


def limits(config: Config, reference: Tolerance) -> dict[str, float]:
    """The most that each result of a peer may be off, by the tolerance of our own."""
    merges = peer(config.strategy).partial_results(config.problem) - 1
    return {name: limit(name, reference, merges=merges) for name, _ in judged(config.direction)}
