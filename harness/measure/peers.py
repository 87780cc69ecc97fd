"""Errors of a measured peer's results, by the same tolerance as our own."""

from collections.abc import Sequence

from harness.measure.cell import judged_part, reference_for
from harness.peers.limits import judged_results, verdicts
from harness.peers.run import PeerRun, gathered_results
from harness.records.config import Config


def errors_of(config: Config, runs: Sequence[PeerRun]) -> tuple[dict[str, float], bool]:
    """Errors of a measured cell's results, and whether all are within the tolerance."""
    reference, results = reference_for(config.problem), gathered_results(runs)
    found = {
        name: judged_part(config.problem, tensor, results[name])
        for name, tensor in judged_results(config.direction)
    }
    own = verdicts(config, found, reference)
    return {each.name: each.error for each in own}, all(each.passed for each in own)
