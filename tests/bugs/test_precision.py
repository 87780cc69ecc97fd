"""Precision: what a strategy adds to the error of one device, and the dtype of what it returns."""

import math
from dataclasses import replace

import pytest
import torch

from harness.attention import run_all
from harness.execute import kernels
from harness.oracle.tolerance import calibrate, errors
from harness.plan.problem import Dtype
from tests.support import EVERY_STRATEGY, allowed, problem, run, tensors, tolerance_of, wrong

LOW = [Dtype.BFLOAT16, Dtype.FLOAT16]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("strategy", ["allgather", "allgather:placement=zigzag"])
def test_b048_all_gather_has_the_forward_error_of_one_device(strategy: str, dtype: Dtype) -> None:
    p = problem("causal", 61, (4, 2), dims=(16, 16), dtype=dtype, cp=4)
    alone = problem("causal", 61, (4, 2), dims=(16, 16), dtype=dtype, cp=1)
    tolerance = tolerance_of(alone)
    out = {"out": run(p, strategy).results["out"]}
    single = {"out": run(alone, "allgather").results["out"]}
    rounding = torch.finfo(getattr(torch, dtype.value)).eps / 2
    assert errors(out, tolerance)["out"] <= errors(single, tolerance)["out"] + rounding


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("strategy", ["ring", "zigzag", "stripe"])
def test_b048_the_error_of_a_ring_does_not_grow_with_its_length(
    strategy: str, dtype: Dtype
) -> None:
    found = []
    for cp in (1, 2, 4, 8, 16):
        p = problem("full", 64, (4, 2), dims=(16, 16), dtype=dtype, cp=cp)
        tolerance = tolerance_of(problem("full", 64, (4, 2), dims=(16, 16), dtype=dtype, cp=1))
        found.append(errors({"out": run(p, strategy).results["out"]}, tolerance)["out"])
    assert max(found) <= 2 * found[0]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_s08_gradients_have_the_dtype_and_the_precision_of_the_inputs(
    strategy: str, dtype: Dtype
) -> None:
    p = problem("causal", 37, (4, 2), dims=(16, 16), dtype=dtype, cp=4)
    results = run(p, strategy).results
    assert {results[name].dtype for name in ("out", "dq", "dk", "dv")} == {
        getattr(torch, dtype.value)
    }
    assert wrong(p, strategy) == ""


def finer_than_bfloat16(x: torch.Tensor) -> float:
    """Share of values that bfloat16 cannot hold."""
    return float((x != x.bfloat16().to(x.dtype)).double().mean())


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("cp", [1, 4])
def test_s08_gradients_of_float16_did_not_pass_through_bfloat16(cp: int, strategy: str) -> None:
    p = problem("causal", 37, (4, 2), dims=(16, 16), dtype=Dtype.FLOAT16, cp=cp)
    results = run(p, strategy).results
    for name in ("out", "dq", "dk", "dv"):
        assert finer_than_bfloat16(results[name]) > 0.5


def test_s08_a_dq_that_did_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("causal", 37, (4, 2), dims=(16, 16), dtype=Dtype.FLOAT16, cp=1)
    real = kernels.attend_backward

    def rounded(*args: object) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = real(*args)
        return dq.bfloat16().to(dq.dtype), dk, dv

    monkeypatch.setattr(kernels, "attend_backward", rounded)
    results = run(p, "ring").results
    assert finer_than_bfloat16(results["dq"]) == 0
    assert finer_than_bfloat16(results["dk"]) > 0.5


@pytest.mark.parametrize("strategy", ["grid:rows=2", "ultraattn:seconds=0.2"])
def test_gradients_where_a_row_of_delta_leaves_float16_are_those_of_one_device(
    strategy: str,
) -> None:
    p = problem("causal", 37, (6, 2), dims=(8, 5), dtype=Dtype.FLOAT16, cp=4)
    q, k, v, dout = tensors(p)
    v, dout = v + 300, dout + 300
    assert float(5 * v.float().min() * dout.float().min()) > torch.finfo(torch.float16).max
    right = calibrate(q, k, v, allowed(p), scale=p.softmax_scale, dout=dout)
    found, single = (
        errors(run_all(replace(p, cp=cp), text, q, k, v, dout=dout).results, right)
        for cp, text in ((4, strategy), (1, "ring"))
    )
    for name in ("dq", "dk", "dv"):
        assert found[name] <= 2 * single[name] < math.inf, name
