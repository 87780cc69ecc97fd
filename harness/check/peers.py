"""Hold a peer's results against the same oracle, by the same tolerance, as our own."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from harness.check import cell as checked
from harness.check.cell import SEEDS, Cell, Status
from harness.measure import cell as measured
from harness.oracle.tolerance import Tolerance, errors, limit
from harness.peers.run import PeerRun, gathered
from harness.plan.problem import Direction
from harness.planning.peers import peer
from harness.records.config import Config

NAMES = {Direction.FORWARD: ("out",), Direction.BACKWARD: ("dq", "dk", "dv")}
"""What each direction is judged on; no peer hands out the log-sum-exp of the whole softmax."""


def errors_of(config: Config, runs: Sequence[PeerRun]) -> tuple[dict[str, float], bool]:
    """Errors of a measured cell's results, and whether all are within the tolerance."""
    reference, heads = measured.reference_of(replace(config.problem, cp=1))
    results = gathered(runs)
    found = {name: results[name] for name in NAMES[config.direction]}
    if heads is not None:
        q, kv = heads
        found = {name: x[:, kv if name in ("dk", "dv") else q] for name, x in found.items()}
    error, most = errors(found, reference), _limits(config, reference)
    return error, all(error[name] <= most[name] for name in error)


def judge_peer(config: Config, run: Callable[[int], Sequence[PeerRun]]) -> Cell:
    """Judge a cell of `check`.

    Args:
        config: The cell, of one direction.
        run: Runs it on the inputs of a seed.
    """
    worst: dict[str, float] = {}
    most: dict[str, float] = {}
    for seed in SEEDS:
        reference = checked.reference_of(replace(config.problem, cp=1), seed)
        results = gathered(run(seed))
        found = errors({name: results[name] for name in NAMES[config.direction]}, reference)
        for kept, new in ((worst, found), (most, _limits(config, reference))):
            for name, value in new.items():
                kept[name] = max(kept.get(name, 0.0), value)
    wrong = [
        f"{name} of {config.strategy} is off by {worst[name]:.2e}, at most {most[name]:.2e} is "
        "right; the fault is that package's"
        for name in worst
        if not worst[name] <= most[name]
    ]
    status = Status.FAILED if wrong else Status.PASSED
    return Cell(config, status, "; ".join(wrong), worst, most)


def _limits(config: Config, reference: Tolerance) -> dict[str, float]:
    merges = peer(config.strategy).partial_results(config.problem) - 1
    return {name: limit(name, reference, merges=merges) for name in NAMES[config.direction]}
