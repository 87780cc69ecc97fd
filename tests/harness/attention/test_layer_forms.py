"""Layers as published models have them, against autograd through a layer written out densely."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.attention import attention_layer, context_parallel
from harness.attention.layers.given import LayerInputs, turns_of
from harness.attention.parallel import ContextParallel
from harness.errors import PlanError, UnsupportedError
from harness.execute.rotary import LinearScaling, Llama3Scaling, Pairs, Rotary, Scaling, YarnScaling
from harness.oracle.tolerance import FLOAT64_LIMIT
from harness.plan.sharding import Sharding
from strategies import EVERY_STRATEGY, STRATEGIES, quick
from tests.support import layer_problem, ranks

HEADS, KV_HEADS, HEAD_DIM, MODEL, BATCH = 6, 2, 8, 11, 3
LENGTHS = (14, 1, 22)
SEQLEN = sum(LENGTHS)
PATTERN = "documents:lengths=14+1+22"
ROTARY = 50.0
EPS = 1e-3
OPTIONS = (
    "zigzag:checkpoint=layer",
    "ulysses:checkpoint=attention,offload=true",
    "ring:sum_gradients=true",
    "upipe:checkpoint=layer,offload=true",
)
LLAMA = Rotary(
    base=ROTARY,
    pairs=Pairs.HALVES,
    scaling=Llama3Scaling(factor=8.0, low_turns=1.0, high_turns=4.0, original=32),
)
YARN = Rotary(base=ROTARY, scaling=YarnScaling(factor=4.0, original=32, fast=4.0))
LINEAR = Rotary(base=ROTARY, pairs=Pairs.HALVES, scaling=LinearScaling(factor=3.0))
SHAPES = {
    "w_q": (HEADS * HEAD_DIM, MODEL),
    "w_k": (KV_HEADS * HEAD_DIM, MODEL),
    "w_v": (KV_HEADS * HEAD_DIM, MODEL),
    "w_o": (MODEL, HEADS * HEAD_DIM),
    "b_q": (HEADS * HEAD_DIM,),
    "b_k": (KV_HEADS * HEAD_DIM,),
    "b_v": (KV_HEADS * HEAD_DIM,),
    "b_o": (MODEL,),
    "norm_q": (HEAD_DIM,),
    "norm_k": (HEAD_DIM,),
}
WEIGHTS = ("w_q", "w_k", "w_v", "w_o")
BIASES = ("b_q", "b_k", "b_v", "b_o")
NORMS = ("norm_q", "norm_k")


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def parameters(names: tuple[str, ...]) -> dict[str, Tensor]:
    """Weights that make q, k and v about as large as x; everything needs a gradient."""
    every = [*SHAPES]
    return {
        name: (drawn(SHAPES[name], every.index(name)) * 0.4).requires_grad_()
        for name in (*WEIGHTS, *names)
    }


def restarting() -> Tensor:
    """Positions that begin anew in each document, by sequence: the second is 5 further on."""
    within = torch.cat([torch.arange(length) for length in LENGTHS])
    return torch.stack([within, within + 5, 2 * within])


# The oracle: complex numbers and scalar loops, nothing of the code under test ----------------


def speeds(rotary: Rotary) -> list[float]:
    """Radians per token of each pair, one by one, from the published definitions."""
    found = []
    for pair in range(HEAD_DIM // 2):
        plain = 1 / rotary.base ** (2 * pair / HEAD_DIM)
        match rotary.scaling:
            case None:
                found.append(plain)
            case LinearScaling(factor=factor):
                found.append(plain / factor)
            case Llama3Scaling(factor=factor, low_turns=low, high_turns=high, original=original):
                wavelength = 2 * math.pi / plain
                if wavelength < original / high:
                    found.append(plain)
                elif wavelength > original / low:
                    found.append(plain / factor)
                else:
                    smooth = (original / wavelength - low) / (high - low)
                    found.append((1 - smooth) * plain / factor + smooth * plain)
            case YarnScaling(factor=factor, original=original, fast=fast, slow=slow):
                ends = [
                    HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(ROTARY))
                    for turns in (fast, slow)
                ]
                low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), HEAD_DIM - 1)
                ramp = min(max((pair - low) / (high - low), 0), 1)
                found.append(plain / factor * ramp + plain * (1 - ramp))
    return found


def turned(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """Turn `(B, H, S, D)` as complex numbers."""
    angles = positions[..., None].double() * torch.tensor(speeds(rotary), dtype=torch.float64)
    growth = 1.0
    if isinstance(rotary.scaling, YarnScaling):
        growth = 0.1 * math.log(rotary.scaling.factor) + 1
    if angles.dim() == 3:
        angles = angles[:, None]
    turn = torch.polar(torch.full_like(angles, growth), angles)
    wide = x.double()
    if rotary.pairs is Pairs.HALVES:
        half = HEAD_DIM // 2
        made = torch.complex(wide[..., :half].contiguous(), wide[..., half:].contiguous()) * turn
        return torch.cat((made.real, made.imag), -1).to(x.dtype)
    made = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous()) * turn
    return torch.view_as_real(made).flatten(-2).to(x.dtype)


def dense(
    x: Tensor, given: Mapping[str, Tensor], rotary: Rotary | None, positions: Tensor | None
) -> Tensor:
    """The whole layer in one process; documents attend themselves, causally."""
    at = torch.arange(SEQLEN) if positions is None else positions
    made = {}
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        flat = x @ given[f"w_{name}"].T + given.get(f"b_{name}", 0.0)
        each = flat.reshape(BATCH, SEQLEN, heads, HEAD_DIM).permute(0, 2, 1, 3)
        norm = given.get(f"norm_{name}")
        if norm is not None:
            each = each / ((each**2).sum(-1, keepdim=True) / HEAD_DIM + EPS) ** 0.5 * norm
        made[name] = each if name == "v" or rotary is None else turned(each, rotary, at)
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(SEQLEN)
    allowed = (document[:, None] == document) & (place[:, None] >= place)
    k, v = (made[name].repeat_interleave(HEADS // KV_HEADS, dim=1) for name in "kv")
    scores = made["q"] @ k.mT / HEAD_DIM**0.5
    out = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    return out.permute(0, 2, 1, 3).flatten(2) @ given["w_o"].T + given.get("b_o", 0.0)


# Over ranks -----------------------------------------------------------------------------------


def spread(
    cp: ContextParallel,
    x: Tensor,
    given: Mapping[str, Tensor],
    rotary: Rotary | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    return attention_layer(cp, x, **given, norm_eps=EPS, rotary=rotary, positions=positions)


def one_rank(
    strategy: str, names: tuple[str, ...], rotary: Rotary | None, packed: bool
) -> dict[str, Tensor]:
    """On a rank: y and dx of all tokens, and its share of every other gradient."""
    heads = {"heads_q": HEADS, "heads_kv": KV_HEADS}
    cp = context_parallel(strategy=strategy, pattern=PATTERN, seqlen=SEQLEN, **heads)
    x, dy = (cp.shard(drawn((BATCH, SEQLEN, MODEL), seed), dim=1) for seed in (20, 21))
    given, x = parameters(names), x.requires_grad_()
    positions = cp.shard(restarting(), dim=-1) if packed else None
    y = spread(cp, x, given, rotary, positions)
    dx, *grads = torch.autograd.grad(y, [x, *given.values()], dy)
    whole = {"y": cp.unshard(y.detach(), dim=1), "x": cp.unshard(dx, dim=1)}
    return whole | dict(zip(given, grads, strict=True))


def off(
    cp: int, strategy: str, names: tuple[str, ...], rotary: Rotary | None, packed: bool = False
) -> dict[str, float]:
    """What is wrong of y and of each gradient, summed over ranks, and by how much."""
    x = drawn((BATCH, SEQLEN, MODEL), 20).requires_grad_()
    given = parameters(names)
    y = dense(x, given, rotary, restarting() if packed else None)
    grads = torch.autograd.grad(y, [x, *given.values()], drawn((BATCH, SEQLEN, MODEL), 21))
    right = {"y": y.detach(), **dict(zip(("x", *given), grads, strict=True))}
    asked = (strategy, names, rotary, packed)
    found = [one_rank(*asked)] if cp == 1 else ranks(cp).run(one_rank, *asked)
    far = {}
    for name, value in right.items():
        shares = [each[name] for each in found]
        got = shares[0] if name in ("y", "x") else sum(shares[1:], shares[0])
        far[name] = float((got - value).abs().max() / value.abs().max())
    return {name: error for name, error in far.items() if not error <= FLOAT64_LIMIT}


@pytest.mark.parametrize("strategy", [*map(quick, EVERY_STRATEGY), *OPTIONS])
def test_biases_halves_scaling_and_positions_of_documents(strategy: str) -> None:
    assert off(2, strategy, BIASES, LLAMA, packed=True) == {}


@pytest.mark.parametrize("strategy", [*map(quick, STRATEGIES)])
def test_norms_of_heads_with_all_strategies_of_attention(strategy: str) -> None:
    assert off(2, strategy, NORMS, YARN, packed=True) == {}


@pytest.mark.parametrize(
    ("names", "rotary", "packed"),
    [
        ((), LINEAR, False),
        (("b_q", "b_v"), YARN, True),
        (("b_k", *NORMS), LLAMA, True),
        (("norm_k",), None, False),
        # Without rotary the gradient of b_k is 0: every key of a query moves its scores alike.
        (("b_q", "b_v", "b_o"), None, False),
        ((), Rotary(base=ROTARY, pairs=Pairs.HALVES), True),
    ],
)
@pytest.mark.parametrize("cp", [1, 2])
def test_each_form_by_itself(
    cp: int, names: tuple[str, ...], rotary: Rotary | None, packed: bool
) -> None:
    assert off(cp, "zigzag", names, rotary, packed) == {}


def test_given_positions_are_found_where_a_rank_holds_tokens_out_of_order() -> None:
    owners = Sharding((range(5), range(5, 7), range(7, 11)), ((2, 0), (1,)))
    given = LayerInputs(
        x=torch.zeros(1, 9, MODEL, dtype=torch.float64),
        weights=(),
        biases=(None,) * 4,
        norms=(None, None),
        norm_eps=EPS,
        rotary=Rotary(base=ROTARY),
        positions=torch.tensor([70, 80, 90, 100, 0, 10, 20, 30, 40]),  # of tokens 7 to 10, 0 to 4
    )
    problem = replace(layer_problem(PATTERN, SEQLEN), head_dim=HEAD_DIM)
    turns = turns_of(given, problem, owners, 0)
    assert turns is not None
    expected = Rotary(base=ROTARY).turns(
        torch.tensor([10, 30, 90, 100]), HEAD_DIM, torch.device("cpu")
    )
    assert torch.equal(turns([range(1, 4, 2), range(9, 11)]).sin, expected.sin)


def test_in_bfloat16_a_layer_with_norms_is_no_worse_than_its_twin() -> None:
    """The rule's factor of 2 (see `tolerance`) without its floor; the twin rounds every step."""
    cp = context_parallel(strategy="zigzag", pattern=PATTERN, seqlen=SEQLEN, heads_q=6, heads_kv=2)
    x = drawn((BATCH, SEQLEN, MODEL), 20).bfloat16()
    given = {name: p.detach().bfloat16() for name, p in parameters((*BIASES, *NORMS)).items()}
    exact = dense(x.double(), {name: p.double() for name, p in given.items()}, LLAMA, None)
    twin = dense(x, given, LLAMA, None)
    y = spread(cp, x, given, LLAMA)

    assert y.dtype is twin.dtype is torch.bfloat16
    assert float((y - exact).abs().max()) <= 2 * float((twin - exact).abs().max())


# Refusals -------------------------------------------------------------------------------------


def alone(strategy: str = "zigzag") -> tuple[ContextParallel, Tensor]:
    cp = context_parallel(strategy=strategy, seqlen=SEQLEN, heads_q=HEADS, heads_kv=KV_HEADS)
    return cp, drawn((BATCH, SEQLEN, MODEL), 20)


@pytest.mark.parametrize("strategy", ["upipe", "fpdt", "zigzag:checkpoint=layer"])
def test_norms_are_refused_where_projections_are_planned(strategy: str) -> None:
    cp, x = alone(strategy)
    with pytest.raises(UnsupportedError, match="norm_q and norm_k are not") as caught:
        spread(cp, x, parameters(NORMS))
    assert "such as ulysses" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: given.update(b_k=drawn((HEADS * HEAD_DIM,), 1)), "a bias has one axis"),
        (lambda given: given.update(b_q=given["b_q"].float()), "dtype and device must be one"),
        (lambda given: given.update(norm_q=drawn((HEADS * HEAD_DIM,), 1)), "each head by itself"),
        (lambda given: given.update(norm_eps=math.nan), "norm_eps"),
        (lambda given: given.update(positions=torch.arange(SEQLEN)), "rotary, which is not given"),
        (
            lambda given: given.update(positions=torch.arange(SEQLEN - 1), rotary=1e4),
            "whole numbers",
        ),
        (
            lambda given: given.update(positions=torch.ones(SEQLEN), rotary=1e4),
            "whole numbers",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    cp, x = alone()
    given: dict[str, Any] = {"norm_eps": EPS, **parameters(("b_q", "norm_q"))}
    change(given)
    with pytest.raises(ValueError, match=message):
        attention_layer(cp, x, **given)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (LinearScaling(factor=0.0), "factor"),
        (Llama3Scaling(factor=8.0, low_turns=4.0, high_turns=4.0, original=32), "low_turns"),
        (YarnScaling(factor=8.0, original=0), "original"),
        (YarnScaling(factor=8.0, original=8, slow=32.0), "slow"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(scaling: Scaling, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary(base=ROTARY, scaling=scaling)


def differing(names: tuple[str, ...], by_rank: tuple[Rotary, Rotary]) -> str:
    cp, whole = alone()
    try:
        spread(cp, cp.shard(whole, dim=1), parameters(names), rotary=by_rank[cp.rank])
    except PlanError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("names", [(), NORMS])
def test_ranks_that_turn_otherwise_are_told(names: tuple[str, ...]) -> None:
    for told in ranks(2).run(differing, names, (LLAMA, LINEAR)):
        assert "rotary: Rotary(base=50.0" in told
        assert "on ranks [1]" in told
