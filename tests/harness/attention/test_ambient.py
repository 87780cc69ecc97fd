"""What surrounds a call changes nothing but what it changes for torch's own functions."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from harness.attention import ContextParallel, attention_layer, context_parallel
from tests.support import ranks

S, M, D = 23, 12, 8
LAYERS = ("zigzag", "upipe", "zigzag:checkpoint=layer", "ulysses:checkpoint=attention")


def made(strategy: str = "zigzag") -> ContextParallel:
    return context_parallel(strategy=strategy, seqlen=S, heads_q=6, heads_kv=2)


def leaves(sizes: tuple[tuple[int, ...], ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    rng = torch.Generator("cpu").manual_seed(2)
    made = (
        torch.randn(size, generator=rng, dtype=torch.float64, device="cpu") / 2 for size in sizes
    )
    return [x.to(dtype).requires_grad_() for x in made]


def attend(cp: ContextParallel, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Out, and the gradients of q, k and v."""
    whole = leaves(((2, 6, S, D), (2, 2, S, D), (2, 2, S, D)), dtype)
    out = cp.attend(*map(cp.shard, whole))
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), whole)]


SIZES = ((2, S, M), (6 * D, M), (2 * D, M), (2 * D, M), (M, 6 * D))


def layer(cp: ContextParallel, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Y, and the gradients of x and the weights."""
    x, *weights = whole = leaves(SIZES, dtype)
    y = attention_layer(cp, cp.shard(x, dim=1), *weights, rotary=1e4)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), whole)]


# Autocast -----------------------------------------------------------------------------------------


def under_autocast(work: str, strategy: str) -> list[bool]:
    """Whether each result equals that of tensors that were cast by hand, outside autocast."""
    run = {"attend": attend, "layer": layer}[work]
    cp = made(strategy)
    expected = run(cp, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(cp)
    assert found[0].dtype is torch.bfloat16
    assert all(x.dtype is torch.float32 for x in found[1:])
    return [torch.equal(x.bfloat16(), y) for x, y in zip(found, expected, strict=True)]


@pytest.mark.parametrize("strategy", ["zigzag", "ulysses"])
def test_attend_casts_under_autocast_as_torch_does(strategy: str) -> None:
    assert ranks(2).run(under_autocast, "attend", strategy) == [[True] * 4] * 2


@pytest.mark.parametrize("strategy", LAYERS)
def test_a_layer_casts_under_autocast_and_has_one_forward(strategy: str) -> None:
    assert ranks(2).run(under_autocast, "layer", strategy) == [[True] * 6] * 2


@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.float16])
def test_the_dtype_of_a_result_is_that_of_torchs_own(given: torch.dtype) -> None:
    cp = made()
    q, k, v = leaves(((2, 6, S, D), (2, 2, S, D), (2, 2, S, D)), given)
    x, *weights = leaves(SIZES, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert cp.attend(q, k, v).dtype is theirs.dtype
        assert attention_layer(cp, x, *weights).dtype is linear(x, weights[0]).dtype


def test_bfloat16_and_float32_meet_under_autocast() -> None:
    cp = made()
    x, *weights = leaves(SIZES)
    expected = attention_layer(cp, *(each.bfloat16() for each in (x, *weights)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention_layer(cp, x.bfloat16(), *weights), expected)


def test_a_backward_under_autocast_is_the_same() -> None:
    cp = made("zigzag:checkpoint=layer")
    x, *weights = leaves(SIZES)
    expected = layer(cp)[1]
    loss = attention_layer(cp, x, *weights, rotary=1e4).square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected)


# Defaults and modes -------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Here torch fills what it leaves empty with NaN, too."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AMBIENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "meta by default": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "anomalies": torch.autograd.detect_anomaly,
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", AMBIENT)
def test_defaults_and_modes_change_nothing(name: str) -> None:
    both = ranks(2).run(in_mode, name)
    assert both == [[True] * 3] * 2


def in_mode(name: str) -> list[bool]:
    """Whether attention, a layer that is rotated, and float16 by a grid are the same inside."""
    works: tuple[Callable[[], list[Tensor]], ...] = (
        lambda: attend(made()),
        lambda: layer(made("upipe")),
        lambda: attend(made("grid:rows=2"), torch.float16),
    )
    expected = [work() for work in works]
    with AMBIENT[name]():
        found = [work() for work in works]
    return [all(map(torch.equal, *pair)) for pair in zip(found, expected, strict=True)]


def test_positions_and_unshard_heed_no_default_device() -> None:
    cp = made()
    part = torch.ones(2, S, 3)
    with torch.device("meta"):
        assert cp.positions.device.type == "cpu"
        assert torch.equal(cp.unshard(part, dim=1), part)
        assert torch.equal(cp.shard(part, dim=1), part)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_result_is_the_same(
    mode: Callable[[], AbstractContextManager[object]],
) -> None:
    cp = made()
    q, k, v = leaves(((2, 6, S, D), (2, 2, S, D), (2, 2, S, D)))
    x, *weights = leaves(SIZES)
    expected = cp.attend(q, k, v), attention_layer(cp, x, *weights)
    with mode():
        found = cp.attend(q, k, v), attention_layer(cp, x, *weights)
    for one, other in zip(found, expected, strict=True):
        assert not one.requires_grad
        assert torch.equal(one, other)
