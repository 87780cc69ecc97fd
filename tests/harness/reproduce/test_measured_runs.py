"""Rows of tables as measured runs, and what is predicted for them."""

from dataclasses import replace

import pytest

from harness.cluster.presets import cluster
from harness.plan.problem import Direction
from harness.reproduce.case import Case
from harness.reproduce.measured_runs import cases_of, lacking
from harness.reproduce.published_runs import predict_run

CHART = {
    "gpu": "H100",
    "mask": "causal",
    "pass": "bwd",
    "cp_size": "16",
    "seqlen_per_gpu": "3072",
    "batch": "2",
    "hq": "48",
    "hkv": "16",
    "head_dim": "128",
    "method": "usp",
    "tflops_per_gpu_approx": "500",
}
PAIR = {
    "gpu": "A800",
    "nodes": "2",
    "gpus_per_node": "4",
    "S": "24576",
    "heads_q": "6",
    "heads_kv": "3",
    "head_dim": "128",
    "batch": "1",
    "pattern": "causal",
    "strategy": "double_ring inner=4",
    "fwd_ms": "3.5",
    "fwd_bwd_ms": "11",
}


def test_a_chart_s_rate_is_a_time_by_its_own_count_of_flops() -> None:
    (case,) = cases_of(CHART)
    assert isinstance(case, Case)
    tokens = 16 * 3072
    flops = 2.5 * 0.5 * 4 * tokens**2 * 48 * 128 * 2
    assert case.measured_s == pytest.approx(flops / 16 / 500e12)
    assert (case.text, case.known, case.runtime, case.nodes) == ("usp:8x2", True, "te", 2)
    assert (case.heads, case.heads_kv, case.cluster) == (96, 32, "h100")
    (full,) = cases_of({**CHART, "mask": "full", "method": "ring_p2p"})
    assert isinstance(full, Case)
    assert full.text == "ring"  # nothing to balance


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"method": "tree"}, "strategy tree does not exist"),
        ({"gpu": "B200"}, "no calibration of B200; there is one of H100"),
        ({"tflops_per_gpu_approx": "0"}, "must be positive and finite"),
        ({"tflops_per_gpu_approx": "nan"}, "must be positive and finite"),
        ({"mask": "spiral"}, "mask spiral"),
        ({"cp_size": "12"}, "12 GPUs"),
        ({"hkv": "many"}, "ValueError"),
    ],
)
def test_a_chart_s_row_that_is_none_says_why(change: dict[str, str], why: str) -> None:
    (reason,) = cases_of({**CHART, **change})
    assert isinstance(reason, str)
    assert why in reason


def test_backward_is_what_both_passes_take_longer() -> None:
    forward, backward = cases_of(PAIR)
    assert isinstance(forward, Case)
    assert isinstance(backward, Case)
    assert (forward.measured_s, backward.measured_s) == pytest.approx((3.5e-3, 7.5e-3))
    assert (forward.pass_, backward.pass_) == tuple(Direction)
    assert forward.text == "double_ring:inner=4"
    assert (forward.known, backward.known) == (True, False)
    (reason,) = cases_of({**PAIR, "fwd_bwd_ms": "3.5"})
    assert isinstance(reason, str)


def test_tables_are_told_by_their_columns() -> None:
    assert lacking(set(CHART)) == lacking(set(PAIR)) == []
    assert "time_s" in lacking({"gpu", "nodes"})


def test_typed_methods_take_the_kernel_that_the_chart_names() -> None:
    (case,) = cases_of({**CHART, "method": "ulysses", "cp_size": "8"})
    assert isinstance(case, Case)
    today, before = (cluster(name).fitted for name in ("h100", "h100-hamming"))
    assert today is not None
    assert before is not None
    # Kernels are nearly all of it, and FlashAttention 3 takes 0.54 of the time of 2.
    assert 0.4 < predict_run(case, today) / predict_run(case, before) < 0.7


def test_grids_over_many_nodes_wait_for_the_last_to_begin() -> None:
    fitted = cluster("a800").fitted
    assert fitted is not None
    case = Case(
        gpu="A800",
        nodes=8,
        gpus_per_node=2,
        pattern="full",
        direction="fwd",
        strategy="grid",
        heads=3,
        seqlen_q=49152,
        seqlen_kv=49152,
        rows=2,
        mode="normal",
        measured_s=1.0,
        author_s=None,
    )
    without = replace(fitted, effects=replace(fitted.effects, join_s=0.0))
    more = predict_run(case, fitted) - predict_run(case, without)
    assert more == pytest.approx(fitted.effects.join_s)
    few = replace(case, nodes=4)
    assert predict_run(few, fitted) == predict_run(few, without)
    ring = replace(case, strategy="ring", rows=0)
    assert predict_run(ring, fitted) == predict_run(ring, without)


def test_a_searched_plan_is_made_for_its_own_heads_and_counts_them_once() -> None:
    fitted = cluster("h100-hamming").fitted
    assert fitted is not None
    case = Case(
        gpu="H100",
        nodes=1,
        gpus_per_node=2,
        pattern="star",
        direction="fwd",
        strategy="ultraattn",
        heads=6,
        seqlen_q=49152,
        seqlen_kv=49152,
        rows=0,
        mode="normal",
        measured_s=1.0,
        author_s=None,
        levels="node+device+schedule",
        known=False,
    )
    searched = predict_run(case, fitted)
    owner = predict_run(replace(case, strategy="owner", levels="", known=True), fitted)
    assert 0.5 * owner < searched < 1.1 * owner
