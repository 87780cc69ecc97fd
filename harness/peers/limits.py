"""Judgement of a peer's results, by the one tolerance."""

from collections.abc import Mapping

import torch

from harness.oracle.reference import RESULTS
from harness.oracle.tolerance import Tolerance, Verdict, judge
from harness.plan.problem import Direction
from harness.plan.tasks import Tensor
from harness.planning.peers import peer
from harness.records.config import Config


def judged_results(direction: Direction) -> tuple[tuple[str, Tensor], ...]:
    """Results of a direction; no peer hands out the log-sum-exp of the whole softmax."""
    return tuple(each for each in RESULTS[direction] if each[1] is not Tensor.LSE)


def verdicts(
    config: Config, results: Mapping[str, torch.Tensor], reference: Tolerance
) -> tuple[Verdict, ...]:
    """Judge a peer's results by the tolerance of our own."""
    merges = peer(config.strategy).partial_results(config.problem) - 1
    return judge(results, reference, merges=merges)
