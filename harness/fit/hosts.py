"""Fit the host times of eager torch to runs so short that only the hosts hold them up.

A run of few tokens takes as long as its slowest host needs to launch it, so its time is a sum of
counted launches times unknown prices: a linear problem, solved for the least sum of shares of error
(not of their squares: neighbouring rows of one log differ by up to a factor of two).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from harness.cluster.calibration import Calibration
from harness.cluster.effects import ALL, Effect
from harness.fit.minimise import Reals
from harness.plan.problem import Direction
from harness.reproduce.case import Case
from harness.reproduce.published_runs import baseline, baseline_convention, predict_run
from harness.simulate.job_costs import launched_by
from harness.simulate.jobs import LaunchCounts

TRANSFER_S = 40e-6
"""Of an isend and an irecv. No row tells it from what else a step launches, so it is set.
Source: UltraAttn repository, comm_bw logs: 30 to 90 us a pair of 8 KiB messages by torch."""

_NAMES = ("kernel_s", "backward_s", "merge_s", "slice_s", "far_s")
_SHORT = 0.5  # of a run that its host holds up, what the GPU has to do takes less than this share
_ROUNDS = 3  # of finding prices, and then what the GPU does when its host is done
_ITERATIONS = 200
_FLOOR = 1e-3  # shares of error below it weigh alike


def fit_hosts(
    value: Calibration, runs: Sequence[Case], log: Callable[[str], object]
) -> Calibration:
    """Set the host times; `value` is returned as it is if no run is short enough."""
    short = [
        case
        for case in runs
        if predict_run(case, value, ALL - {Effect.HOST}) < _SHORT * case.measured_s
    ]
    if len(short) < len(_NAMES):
        return value
    times = np.array([case.measured_s for case in short])
    counts = np.array([host_counts(case) for case in short], dtype=np.float64)
    after = np.zeros(len(short))
    for _ in range(_ROUNDS):
        rest = times - after - TRANSFER_S * counts[:, -1]
        prices = _not_negative(counts[:, :-1], rest, times)
        fitted = {name: float(price) for name, price in zip(_NAMES, prices, strict=True)}
        eager = replace(value.effects.eager, transfer_s=TRANSFER_S, **fitted)
        value = replace(value, effects=replace(value.effects, eager=eager))
        hosts = counts[:, :-1] @ prices + TRANSFER_S * counts[:, -1]
        after = np.array([predict_run(case, value) for case in short]) - hosts
    gaps = np.abs(hosts + after - times) / times
    log(f"{value.id}: hosts: {len(times)} runs, median error {np.median(gaps):.3f}")
    return value


def host_counts(case: Case) -> list[int]:
    """Launches of the busiest host: counts in the order of `_NAMES`, then messages."""
    how = baseline_convention(case)
    last: dict[int, LaunchCounts] = {}
    for part in baseline(case).parts:
        for rank, launched in zip(part.ranks, part.launched, strict=False):
            last[rank] = launched_by(launched, how)
    forward = case.pass_ is Direction.FORWARD

    def counts(one: LaunchCounts) -> list[int]:
        calls = (one.calls, 0) if forward else (0, one.calls)
        return [*calls, one.merges, one.slices, one.far, one.messages]

    return max(map(counts, last.values()), key=sum)


def _not_negative(counts: Reals, rest: Reals, times: Reals) -> Reals:
    """Least sum of |counts @ x - rest| / times with no x below 0; what would be, is 0."""
    used = [n for n in range(counts.shape[1]) if counts[:, n].any()]
    while used:
        found = _least_absolute(counts[:, used] / times[:, None], rest / times)
        below = [n for n, price in zip(used, found, strict=True) if price < 0]
        if not below:
            break
        used = [n for n in used if n not in below]
    prices = np.zeros(counts.shape[1])
    if used:
        prices[used] = found
    return prices


def _least_absolute(matrix: Reals, wanted: Reals) -> Reals:
    """Least sum of absolute gaps, by least squares with weights that follow them."""
    weights: Reals = np.ones(len(wanted))
    found: Reals = np.zeros(matrix.shape[1])
    for _ in range(_ITERATIONS):
        root = np.sqrt(weights)
        found[:] = np.linalg.lstsq(matrix * root[:, None], wanted * root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(matrix @ found - wanted), _FLOOR)
    return found
