"""Gradients: of every input, by every strategy, from keys that travel and sums that come home."""

import pytest
import torch

from harness.attention import attention, run_all
from harness.errors import UnsupportedError
from harness.execute import kernels
from harness.plan.problem import Dtype
from tests.support import EVERY_STRATEGY, failures, problem, run, tensors, wrong

RINGS = ["ring", "ring-classic", "zigzag", "stripe", "double_ring:inner=2"]


@pytest.mark.parametrize("strategy", RINGS)
def test_b028_backward_uses_the_keys_that_visit(strategy: str) -> None:
    p = problem("full", 64, (2, 2), dims=(16, 16), batch=1, dtype=Dtype.FLOAT32, cp=2)
    assert wrong(p, strategy) == ""


@pytest.mark.parametrize("strategy", RINGS)
def test_b028_keys_of_the_first_step_in_every_step_are_seen(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem("full", 64, (2, 2), dims=(16, 16), batch=1, dtype=Dtype.FLOAT32, cp=2)
    real, first = kernels.attend_backward, {}

    def stale(*args: object) -> tuple[torch.Tensor, ...]:
        dout, q, k, v, *rest = args
        k, v = first.setdefault(q.data_ptr(), (k, v)) if q.shape == k.shape else (k, v)
        return real(dout, q, k, v, *rest)

    monkeypatch.setattr(kernels, "attend_backward", stale)
    wrongs = {verdict.name for verdict in failures(p, run(p, strategy).results)}
    assert "dq" in wrongs
    assert not wrongs & {"out", "lse"}


@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.BFLOAT16])
def test_b030_each_gradient_of_zigzag_is_within_the_budget_of_its_precision(dtype: Dtype) -> None:
    for cp in (2, 5):
        assert wrong(problem("causal", 37, (6, 2), dtype=dtype, cp=cp), "zigzag") == ""


@pytest.mark.parametrize("wanting", ["q", "k", "v", "qk", "kv", "qkv", ""])
def test_b032_backward_returns_a_gradient_for_each_input_that_wants_one(wanting: str) -> None:
    p = problem("causal", 11, (4, 2), cp=1)
    q, k, v, dout = tensors(p)
    inputs = {"q": q, "k": k, "v": v}
    for name in wanting:
        inputs[name].requires_grad_()
    out = attention(q, k, v, strategy="usp")
    if wanting:
        out.backward(dout)
    assert {name for name, x in inputs.items() if x.grad is not None} == set(wanting)
    assert failures(p, {f"d{name}": inputs[name].grad for name in wanting}) == []


@pytest.mark.parametrize(
    "strategy", ["allgather", "allgather:placement=zigzag", "allgather:placement=stripe"]
)
@pytest.mark.parametrize("pattern", ["causal", "documents:lengths=5+11+7"])
def test_b034_gradients_of_gathered_keys_are_added_once(pattern: str, strategy: str) -> None:
    for heads in ((2, 2), (6, 2)):
        assert wrong(problem(pattern, 23, heads, cp=2), strategy) == ""


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b034_one_gradient_reaches_one_owner(strategy: str) -> None:
    p = problem("full", 12, (4, 4), batch=1, cp=4)
    q, k, v, _ = tensors(p)
    dout = torch.zeros_like(q)
    dout[0, 2, 5] = 1.0
    dv = run_all(p, strategy, q, k, v, dout=dout).results["dv"]
    torch.testing.assert_close(dv.sum(dim=2)[0, 2], torch.ones(8, dtype=torch.float64))
    assert dv[0, [0, 1, 3]].abs().max() == 0


def test_b060_attention_that_is_compiled_whole_is_refused() -> None:
    q, k, v, _ = tensors(problem("documents:lengths=5+6", 11, (4, 2), cp=1))
    whole = torch.compile(
        lambda *x: attention(*x, pattern="documents:lengths=5+6"), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match="compile without fullgraph=True"):
        whole(q, k, v)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_b102_b104_dropout_is_refused(dropout_p: float) -> None:
    q, k, v, _ = tensors(problem("causal", 11, (4, 2), cp=1))
    with pytest.raises(UnsupportedError, match=r"dropout_p \(0\.\d\) must be 0"):
        attention(q, k, v, dropout_p=dropout_p)
