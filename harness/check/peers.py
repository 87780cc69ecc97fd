"""Hold a peer's results against the same oracle, by the same tolerance, as our own."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.check.cell import SEEDS, JudgedCell
from harness.oracle.reference import reference_of
from harness.oracle.tolerance import errors
from harness.peers.limits import judged, limits
from harness.peers.run import PeerRun, gathered
from harness.records.check_record import Outcome
from harness.records.config import Config


def judge_peer(config: Config, run: Callable[[int], Sequence[PeerRun]]) -> JudgedCell:
    """Judge a cell of `check`.

    Args:
        config: The cell, of one direction.
        run: Runs it on the inputs of a seed.
    """
    worst: dict[str, float] = {}
    most: dict[str, float] = {}
    for seed in SEEDS:
        reference = reference_of(replace(config.problem, cp=1), seed)
        results = gathered(run(seed))
        found = errors({name: results[name] for name, _ in judged(config.direction)}, reference)
        for kept, new in ((worst, found), (most, limits(config, reference))):
            for name, value in new.items():
                kept[name] = max(kept.get(name, 0.0), value)
    wrong = [
        f"{name} of {config.strategy} is off by {worst[name]:.2e}, at most {most[name]:.2e} is "
        "right; the fault is that package's"
        for name in worst
        if not worst[name] <= most[name]
    ]
    status = Outcome.FAILED if wrong else Outcome.PASSED
    return JudgedCell(config, status, "; ".join(wrong), worst, most)
