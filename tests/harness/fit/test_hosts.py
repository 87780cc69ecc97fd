"""Fit host times to made runs whose prices are known."""

from dataclasses import replace
from itertools import product

import pytest

from harness.cluster.calibration import Calibration, calibration
from harness.fit.hosts import TRANSFER_S, fit_hosts, host_counts
from harness.reproduce.case import Case
from harness.reproduce.published_runs import predict_run

TRUE = {
    "kernel_s": 90e-6,
    "backward_s": 170e-6,
    "transfer_s": TRANSFER_S,
    "merge_s": 60e-6,
    "slice_s": 35e-6,
    "far_s": 25e-6,
}


def priced(value: Calibration, prices: dict[str, float]) -> Calibration:
    effects = replace(value.effects, eager=replace(value.effects.eager, **prices))
    return replace(value, effects=effects)


def runs(value: Calibration) -> list[Case]:
    found = []
    for nodes, strategy, way, seqlen in product(
        (1, 2), ("ring", "zigzag", "stripe"), ("fwd", "bwd"), (3072, 6144)
    ):
        case = Case(
            gpu="A800",
            nodes=nodes,
            gpus_per_node=4,
            pattern="causal",
            direction=way,
            strategy=strategy,
            heads=1,
            seqlen_q=seqlen,
            seqlen_kv=seqlen,
            rows=0,
            mode="normal",
            measured_s=1.0,
            author_s=None,
        )
        found.append(replace(case, measured_s=predict_run(case, value)))
    return found


def test_known_prices_are_found_again_though_some_rows_are_wrong() -> None:
    true = priced(calibration("a800"), TRUE)
    made = runs(true)
    wrong = [replace(made[3], measured_s=2 * made[3].measured_s), *made]
    other = priced(true, dict.fromkeys(TRUE, 1e-6))
    found = fit_hosts(other, wrong, str).effects.eager
    for name, price in TRUE.items():
        assert getattr(found, name) == pytest.approx(price, rel=0.05), name


def test_runs_that_do_not_wait_for_their_host_change_nothing() -> None:
    value = calibration("a800")
    long = [replace(case, seqlen_q=2**20, seqlen_kv=2**20) for case in runs(value)]
    long = [replace(case, measured_s=predict_run(case, value)) for case in long]
    assert fit_hosts(value, long, str) is value


def test_no_price_is_below_nothing() -> None:
    # Forward runs that are a little faster than their launches: some price would have to pay.
    true = priced(calibration("a800"), {**TRUE, "kernel_s": 0.0})
    made = [
        replace(case, measured_s=case.measured_s * (0.97 if case.direction == "fwd" else 1.0))
        for case in runs(true)
    ]
    found = fit_hosts(priced(true, dict.fromkeys(TRUE, 1e-6)), made, str).effects.eager
    assert min(getattr(found, name) for name in TRUE) == 0.0


def test_the_host_that_launches_most_holds_a_run_up() -> None:
    # Of a causal ring the last rank attends at every step, the first one once.
    (case,) = [
        c
        for c in runs(calibration("a800"))
        if (c.strategy, c.direction, c.nodes, c.seqlen_q) == ("ring", "fwd", 1, 3072)
    ]
    calls, _, merges, slices, far, messages = host_counts(case)
    assert (calls, merges, slices, far) == (4, 3, 0, 0)
    assert messages == 2 * 3
