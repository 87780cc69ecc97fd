"""How results are judged: an independent oracle, a scale, every token, and bytes that moved."""

import pytest
import torch

from harness.attention import run_all
from harness.errors import PlanError
from harness.execute import kernels
from harness.execute.transport import Handle, LocalTransport
from harness.oracle import dense
from harness.oracle.tolerance import calibrate, judge
from harness.plan.problem import Dtype
from tests.support import EVERY_STRATEGY, failures, problem, run, tensors, tolerance_of, wrong


def test_b046_an_all_zero_kernel_fails_though_every_strategy_agrees_with_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = kernels.attend_call

    def nothing(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = real(*args)
        return torch.zeros_like(out), torch.full_like(lse, -torch.inf)

    monkeypatch.setattr(kernels, "attend_call", nothing)
    spread, alone = (run(problem("causal", 23, (4, 2), cp=cp), "zigzag").results for cp in (2, 1))
    assert torch.equal(spread["out"], alone["out"])
    p = problem("causal", 23, (4, 2), cp=2)
    assert {verdict.name for verdict in failures(p, spread)} >= {"out", "lse"}


def test_b046_the_oracle_calls_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attend_call", "attend_backward", "merge_"):
        monkeypatch.delattr(kernels, name)
    p = problem("causal", 5, (4, 2), cp=1)
    q, k, v, dout = tensors(p)
    found = dense.reference(q, k, v, torch.ones(5, 5).tril().bool(), p.softmax_scale, dout)
    assert found["out"].abs().max() > 0
    assert found["lse"].isfinite().all()


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b046_b098_outputs_are_not_zero_and_lse_is_finite(strategy: str) -> None:
    results = run(problem("causal", 23, (4, 2), cp=4), strategy).results
    assert results["lse"].isfinite().all()
    for name in ("out", "dk", "dv"):
        assert (results[name].abs().amax(dim=-1) > 0).all()


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b068_every_strategy_runs_on_a_cpu(strategy: str, cp: int) -> None:
    for heads in (2, 4):
        for seqlen in (8, 16):
            for batch in (1, 2):
                if strategy != "ulysses" or cp <= heads:
                    p = problem("causal", seqlen, (heads, heads), batch=batch, cp=cp)
                    assert wrong(p, strategy) == ""


class Forgetful(LocalTransport):
    """Moves messages without counting them: parallelism that is not engaged looks like this."""

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        handle = super().send(buffer, src, dst, tag)
        self.traffic.sent_bytes.clear()
        return handle


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b072_bytes_that_do_not_move_are_an_error(strategy: str) -> None:
    p = problem("causal", 23, (4, 2), cp=4)
    q, k, v, _ = tensors(p)
    moved = run_all(p, strategy, q, k, v).transports[0].traffic
    assert min(moved.sent_bytes.get(rank, 0) for rank in range(3)) > 0
    with pytest.raises(PlanError, match="the bytes that move are the bytes that the plan names"):
        run_all(p, strategy, q, k, v, transport=Forgetful)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_s05_zeros_fail_however_long_the_sequence(dtype: Dtype) -> None:
    p = problem("full", 2048, (1, 1), dims=(4, 4), batch=1, dtype=dtype, cp=2)
    q, k, v, _ = tensors(p)
    every = torch.ones(2048, 2048, dtype=torch.bool)
    tolerance = calibrate(q, k, v, every, scale=p.softmax_scale)
    out = run_all(p, "ring", q, k, v).results["out"]
    assert out.std() < 0.05  # so small that an absolute tolerance of 0.1 passes zeros
    (right,) = judge({"out": out}, tolerance, merges=2)
    (zeros,) = judge({"out": torch.zeros_like(out)}, tolerance, merges=2)
    assert right.passed
    assert not zeros.passed


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.BFLOAT16])
def test_s07_every_token_of_every_tensor_is_compared(name: str, dtype: Dtype) -> None:
    p = problem("causal", 23, (4, 2), dtype=dtype, cp=2)
    results = dict(run(p, "ring").results)
    assert failures(p, results) == []
    scale = tolerance_of(problem("causal", 23, (4, 2), dtype=dtype, cp=1)).scales[name]
    for token in (3, 22):
        spoiled = results[name].clone()
        spoiled[:, :, token] += scale
        assert [v.name for v in failures(p, {**results, name: spoiled})] == [name]
