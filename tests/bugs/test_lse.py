"""The log-sum-exp: natural, wide, finite, also of rows that met nothing; and the merge."""

import math

import pytest
import torch

from harness.attention import run_all
from harness.execute import kernels
from harness.execute.kernels import Mask, MaskKind, attend_call, merge_
from harness.oracle.tolerance import calibrate, judge
from harness.plan.problem import Dtype
from tests.support import allowed, failures, problem, run, tensors, wrong

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def full(rows: int, cols: int) -> Mask:
    return Mask(MaskKind.FULL, range(rows), range(cols))


def lse_of(scores: list[float], dtype: torch.dtype) -> torch.Tensor:
    """Log-sum-exp, by the kernel, of one query whose scores are these."""
    q = torch.ones(1, 1, 1, 1, dtype=dtype)
    k = torch.tensor(scores, dtype=dtype).reshape(1, 1, -1, 1)
    return attend_call(q, k, torch.ones_like(k), full(1, len(scores)), 1.0)[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_b052_b054_lse_is_natural_and_wide(dtype: torch.dtype) -> None:
    lse = lse_of([0.5, -1.0, 2.0], dtype)
    assert lse.shape == (1, 1, 1)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = torch.logsumexp(torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), 0)
    assert lse.item() == pytest.approx(expected.item(), abs=2e-3)
    assert lse.item() != pytest.approx(expected.item() / math.log(2), abs=0.1)


def test_b052_parts_with_weights_2_and_8_merge_by_these_weights() -> None:
    out, lse = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), math.log(2.0))
    merge_(out, lse, torch.full((1, 1, 1, 1), 6.0), torch.full((1, 1, 1), math.log(8.0)))
    assert out.item() == pytest.approx((2 * 1 + 8 * 6) / 10)
    assert lse.item() == pytest.approx(math.log(10.0))


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "stripe"])
def test_b052_an_lse_in_base_2_is_seen(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("full", 37, (4, 2), dtype=Dtype.FLOAT32, cp=2)
    real = kernels.attend_call
    assert wrong(p, strategy) == ""

    def base_2(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(*args)
        return out, lse / math.log(2.0)

    monkeypatch.setattr(kernels, "attend_call", base_2)
    assert {v.name for v in failures(p, run(p, strategy).results)} >= {"out", "lse"}


@pytest.mark.parametrize("first", [-1e4, -50.0, 0.0, 60.0, 1e4, -math.inf])
@pytest.mark.parametrize("second", [-1e4, -50.0, 0.0, 60.0, 1e4, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b050_a_merge_is_finite_at_any_distance(
    first: float, second: float, dtype: torch.dtype
) -> None:
    out, lse = torch.zeros(1, 1, 1, 2, dtype=dtype), torch.full((1, 1, 1), first, dtype=dtype)
    other = torch.full_like(lse, second)
    merge_(out, lse, torch.ones_like(out), other)
    expected = torch.logaddexp(torch.tensor(first), torch.tensor(second)).item()
    assert lse.item() == pytest.approx(expected)
    assert out.isfinite().all()
    weight = 0.0 if second == -math.inf else 1 / (1 + math.exp(min(first - second, 700.0)))
    assert out[0, 0, 0].tolist() == pytest.approx([weight, weight])


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "stripe", "ulysses", "allgather"])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.FLOAT32])
def test_b050_scores_a_hundred_times_as_large_stay_finite(dtype: Dtype, strategy: str) -> None:
    p = problem("causal", 23, (4, 2), dtype=dtype, cp=4)
    q, k, v, dout = tensors(p)
    q = 100.0 * q
    results = run_all(p, strategy, q, k, v, dout=dout).results
    tolerance = calibrate(q, k, v, allowed(p), scale=p.softmax_scale, dout=dout)
    assert all(x.isfinite().all() for x in results.values())
    assert results["lse"].abs().max() > 200
    # Gradients of a softmax this sharp are differences of equals; the output is not.
    forward = {name: results[name] for name in ("out", "lse")}
    if dtype is Dtype.FLOAT32:
        assert all(v.passed for v in judge(forward, tolerance, merges=8))
    else:
        assert all(v.error < 1e-11 for v in judge(forward, tolerance, merges=8))


@pytest.mark.parametrize("changed", ["zero", "bfloat16"])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_s02_an_lse_that_is_zero_or_rounded_is_seen(
    changed: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem("causal", 37, (4, 2), dtype=dtype, cp=2)
    real = kernels.attend_call
    assert wrong(p, "ring") == ""

    def poor(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(*args)
        return out, torch.zeros_like(lse) if changed == "zero" else lse.bfloat16().to(lse.dtype)

    monkeypatch.setattr(kernels, "attend_call", poor)
    found = {verdict.name for verdict in failures(p, run(p, "ring").results)}
    assert "lse" in found
    assert changed != "zero" or "out" in found


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
@pytest.mark.parametrize("dtype", Dtype)
def test_b056_ulysses_and_ring_run_on_the_plain_cpu_kernel(dtype: Dtype, strategy: str) -> None:
    assert wrong(problem("causal", 23, (4, 2), dtype=dtype, cp=2), strategy) == ""


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "double_ring:inner=2"])
def test_s12_partial_results_are_merged(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("full", 37, (4, 2), cp=4)
    merges = []
    real = kernels.merge_
    monkeypatch.setattr(kernels, "merge_", lambda *args: (merges.append(1), real(*args)))
    assert wrong(p, strategy) == ""
    assert len(merges) >= 3 * p.cp
    monkeypatch.setattr(kernels, "merge_", lambda *_: None)
    assert {v.name for v in failures(p, run(p, strategy).results)} >= {"out", "lse"}
