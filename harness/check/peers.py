"""Hold a peer's results against the same oracle, by the same tolerance, as our own."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.check.cell import SEEDS, JudgedCell
from harness.oracle.reference import reference_of
from harness.oracle.tolerance import Verdict, widest
from harness.peers.limits import judged_results, verdicts
from harness.peers.run import PeerRun, gathered_results
from harness.records.check_record import Outcome
from harness.records.config import Config


def judge_peer(config: Config, run: Callable[[int], Sequence[PeerRun]]) -> JudgedCell:
    """Judge a cell of `check`.

    Args:
        config: The cell, of one direction.
        run: Runs it on the inputs of a seed.
    """
    every: list[Verdict] = []
    for seed in SEEDS:
        reference = reference_of(replace(config.problem, cp=1), seed)
        results = gathered_results(run(seed))
        own = {name: results[name] for name, _ in judged_results(config.direction)}
        every += verdicts(config, own, reference)
    joined = widest(every)
    wrong = [
        f"{name} of {config.strategy} is off by {verdict.error:.2e}, at most {verdict.limit:.2e} "
        "is right; the fault is that package's"
        for name, verdict in joined.items()
        if not verdict.passed
    ]
    worst = {name: verdict.error for name, verdict in joined.items()}
    most = {name: verdict.limit for name, verdict in joined.items()}
    status = Outcome.FAILED if wrong else Outcome.PASSED
    return JudgedCell(config, status, "; ".join(wrong), worst, most)
