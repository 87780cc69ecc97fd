"""The scale of gradients: what cp ranks compute is what one rank computes, unscaled."""

import pytest
import torch
from torch import Tensor

from harness.attention import attention, run_all
from tests.support import EVERY_STRATEGY, problem, tensors


def weight_gradient(strategy: str, cp: int, loss_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a projection's weight and of v, of a weighted mean over all tokens."""
    p = problem("causal", 22, (4, 2), cp=cp)
    q, k, v, _ = tensors(p)
    weight = torch.randn(8, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    weight.requires_grad_()
    out = run_all(p, strategy, q, k, v).results["out"].requires_grad_()
    losses = (out @ weight).square().mean(dim=(1, 3))  # (B, S)
    ((losses * loss_weights).sum() / loss_weights.sum()).backward()
    assert out.grad is not None
    assert weight.grad is not None
    results = run_all(p, strategy, q, k, v, dout=out.grad).results
    return weight.grad, results["dv"]


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("cp", [2, 4])
def test_b036_a_mean_loss_has_the_gradients_of_one_rank(cp: int, strategy: str) -> None:
    ones = torch.ones(2, 22, dtype=torch.float64)
    for got, expected in zip(
        weight_gradient(strategy, cp, ones), weight_gradient("ring", 1, ones), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b038_micro_batches_with_unequal_counts_of_valid_tokens_add_up(strategy: str) -> None:
    valid = torch.zeros(2, 22, dtype=torch.float64)
    valid[0, :2], valid[1, :20] = 1.0, 1.0
    whole = weight_gradient(strategy, 2, valid)[1]
    parts = torch.zeros_like(whole)
    for row in range(2):
        mask = torch.zeros_like(valid)
        mask[row] = valid[row]
        parts += weight_gradient(strategy, 2, mask)[1] * (mask.sum() / valid.sum())
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(whole, weight_gradient("ring", 1, valid)[1], rtol=1e-12, atol=1e-14)


def test_b036_the_gradient_of_the_entry_is_not_divided_or_multiplied() -> None:
    p = problem("window:left=0,right=0", 6, (2, 2), batch=1, cp=1)
    q, k, v, dout = tensors(p)
    v.requires_grad_()
    attention(q, k, v, pattern="window:left=0,right=0").backward(dout)
    assert v.grad is not None
    assert torch.equal(v.grad, dout)  # each token sees itself, so out is v
