"""The example: a tiny Llama over ranks learns what it learns in one process."""

import pytest
import torch
from torch import Tensor

from examples import tiny_llama
from examples.tiny_llama import LIMITS, Shape, dense, furthest, train
from harness.attention import ContextParallel
from strategies import EVERY_STRATEGY
from tests.support import ranks

KEEPING = (
    "zigzag:checkpoint=layer,offload=true",
    "upipe:checkpoint=layer,offload=true",
    "fpdt:parts=3,checkpoint=attention",
)


def without_gradient(strategy: str) -> list[float]:
    """Train with a layer that gives w_o no gradient."""
    original = tiny_llama.attention_layer

    def broken(
        cp: ContextParallel, x: Tensor, *weights: Tensor, rotary: float | None = None
    ) -> Tensor:
        q, k, v, o = weights
        return original(cp, x, q, k, v, o.detach(), rotary=rotary)

    tiny_llama.attention_layer = broken
    try:
        return train(strategy, torch.float64, steps=5)
    finally:
        tiny_llama.attention_layer = original


def test_it_learns() -> None:
    losses = train(None, torch.float64)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("strategy", [*EVERY_STRATEGY, *KEEPING])
def test_two_processes_lose_what_one_does(strategy: str) -> None:
    alone = train(None, torch.float64, steps=5)
    for losses in ranks(2).run(train, strategy, torch.float64, 5):
        assert furthest(losses, alone) <= LIMITS["float64"]


def test_a_gradient_that_is_lost_is_seen_in_the_losses() -> None:
    alone = train(None, torch.float64, steps=5)
    for losses in ranks(2).run(without_gradient, "upipe"):
        assert losses[0] == pytest.approx(alone[0], abs=1e-12)
        assert furthest(losses, alone) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("strategy", [*EVERY_STRATEGY, *KEEPING])
def test_twenty_steps_over_ranks_lose_what_one_process_does(
    strategy: str, cp: int, dtype: str
) -> None:
    alone = train(None, getattr(torch, dtype))
    for losses in ranks(cp).run(train, strategy, getattr(torch, dtype), 20):
        assert len(losses) == 20
        assert furthest(losses, alone) <= LIMITS[dtype]


def test_the_dense_attention_sees_no_later_token() -> None:
    shape = Shape()
    torch.manual_seed(0)
    weights = tiny_llama.Attention(shape).double()
    x = torch.randn(shape.batch, shape.seqlen, shape.hidden, dtype=torch.float64)
    with torch.no_grad():
        first = dense(shape)(x, weights)
        x[:, 30:] += 1
        later = dense(shape)(x, weights)
    assert torch.equal(first[:, :30], later[:, :30])
    assert not torch.isclose(first[:, 30:], later[:, 30:]).any(2).all()
