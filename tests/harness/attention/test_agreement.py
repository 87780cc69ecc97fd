"""Ranks that make different calls are told in what, within seconds, and can go on."""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.attention import (
    ContextParallel,
    agreement,
    attention,
    attention_layer,
    context_parallel,
)
from harness.errors import PlanError
from patterns import make_pattern
from tests.support import ranks

SOON_S = 20.0
"""Far below the time limit of the group, which is what ranks that wait in vain take."""


def made(pattern: str = "causal", seqlen: int = 23, strategy: str = "zigzag") -> ContextParallel:
    return context_parallel(
        strategy=strategy, pattern=pattern, seqlen=seqlen, heads_q=6, heads_kv=2
    )


def inputs(cp: ContextParallel, batch: int = 2, dim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    tokens = cp.queries.tokens(cp.rank)
    shapes = ((batch, 6, tokens, dim), (batch, 2, tokens, dim), (batch, 2, tokens, 5))
    q, k, v = (torch.ones(shape, requires_grad=True) for shape in shapes)
    return q, k, v


def layer(cp: ContextParallel, wide: int = 11, rotary: float | None = None) -> Tensor:
    x = torch.ones(2, cp.queries.tokens(cp.rank), wide)
    sizes = ((48, wide), (16, wide), (10, wide), (wide, 30))
    return attention_layer(cp, x, *(torch.ones(size) for size in sizes), rotary=rotary)


# What rank 0 and rank 1 do ------------------------------------------------------------------------


def run(case: str) -> None:
    rank, cp = dist.get_rank(), made()
    odd = rank == 1
    match case:
        case "packing":
            cp = made(f"documents:lengths={'9+14' if odd else '11+12'}")
            cp.attend(*inputs(cp))
        case "strategy":
            cp = made(strategy="stripe" if odd else "ring")
            cp.attend(*inputs(cp))
        case "batch":
            cp.attend(*inputs(cp, batch=3 if odd else 2))
        case "head_dim":
            cp.attend(*inputs(cp, dim=12 if odd else 8))
        case "dtype":
            cp.attend(*(x.double() if odd else x for x in inputs(cp)))
        case "direction":
            out = cp.attend(*inputs(cp))
            out.sum().backward() if odd else cp.attend(*inputs(cp))
        case "backward":
            outs = [cp.attend(*inputs(cp, dim=dim)) for dim in (8, 12)]
            outs[odd].sum().backward()
        case "width of a layer":
            layer(cp, wide=13 if odd else 11)
        case "rotary":
            layer(cp, rotary=1e4 if odd else 5e5)
        case "a layer or attention":
            layer(cp) if odd else cp.attend(*inputs(cp))
        case "refused":
            q, k, v = inputs(cp)
            cp.attend(q, k[:, :, 1:] if odd else k, v)
        case "refused by the strategy":
            replace(cp, heads_kv=1 if odd else 2).attend(*inputs(cp))
        case "length":
            q, k, v = inputs(cp)
            attention(q, k, v, seqlen=23 if odd else None)
        case "unshard":
            cp.unshard(torch.ones(3 if odd else 2, cp.queries.tokens(rank), 7), dim=1)
        case "unshard or attend":
            part = torch.ones(2, cp.queries.tokens(rank), 7)
            cp.unshard(part, dim=1) if odd else cp.attend(*inputs(cp))


def told(case: str) -> tuple[str, str, float]:
    """What a rank raises, after each rank has run both packings; and that it can go on."""
    for pattern in ("documents:lengths=9+14", "documents:lengths=11+12"):
        cp = made(pattern)
        cp.attend(*inputs(cp)).sum().backward()
    begin = time.perf_counter()
    try:
        run(case)
    except (PlanError, ValueError) as error:
        said = type(error).__name__, str(error)
    else:
        said = "", "not noticed"
    seconds = time.perf_counter() - begin
    cp = made()
    cp.attend(*inputs(cp)).sum().backward()
    return *said, seconds


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "packing",
            r"pattern: documents:lengths=11\+12 on ranks \[0\], documents:lengths=9\+14 on",
        ),
        ("strategy", r"strategy: ring on ranks \[0\], stripe on ranks \[1\]"),
        ("batch", r"make one call \(rank 1\): batch: 2 on ranks \[0\], 3 on ranks \[1\]; plan: "),
        ("head_dim", r"head_dim: 8 on ranks \[0\], 12 on ranks \[1\]"),
        ("dtype", r"dtype: float32 on ranks \[0\], float64 on ranks \[1\]"),
        ("direction", r"call: attend forward on ranks \[0\], attend backward on ranks \[1\]"),
        ("backward", r"call \(rank 1\): head_dim: 8 on ranks \[0\], 12 on ranks \[1\]"),
        ("width of a layer", r"hidden: 11 on ranks \[0\], 13 on ranks \[1\]"),
        ("rotary", r"rotary: 500000\.0 on ranks \[0\], 10000\.0 on ranks \[1\]"),
        ("a layer or attention", r"call: attend forward on .*, attention_layer forward on"),
        ("length", r"call: a sum of the ranks' lengths.*, attend forward on ranks \[1\]"),
        ("unshard", r"shape but for tokens: \(2, 7\) on ranks \[0\], \(3, 7\) on ranks \[1\]"),
        ("unshard or attend", r"call: attend forward on ranks \[0\], unshard on ranks \[1\]"),
    ],
)
def test_ranks_that_differ_are_all_told_in_what(case: str, message: str) -> None:
    both = ranks(2).run(told, case)
    for kind, said, seconds in both:
        assert kind == "PlanError"
        assert_matches(message, said)
        assert seconds < SOON_S
    assert both[0][1] == both[1][1]


@pytest.mark.parametrize("case", ["refused", "refused by the strategy"])
def test_a_rank_that_refuses_tells_the_others(case: str) -> None:
    (kind, said, seconds), (own_kind, own, _) = ranks(2).run(told, case)
    assert (kind, own_kind) == ("PlanError", "ValueError")
    assert_matches(
        r"call: attend forward on ranks \[0\], none, it is refused there: .*needs k", said
    )
    assert_matches("rank 1 of 2 under zigzag needs k", own)
    assert seconds < SOON_S


def assert_matches(message: str, said: str) -> None:
    with pytest.raises(ValueError, match=message):
        raise ValueError(said)


# A refusal that nobody hears ----------------------------------------------------------------------


def refuse_alone() -> tuple[str, float]:
    """Rank 1 refuses a call that rank 0 never makes."""
    agreement._LONGEST_TO_TELL = timedelta(seconds=0.5)
    group = dist.new_group([0, 1])
    cp = context_parallel(seqlen=23, heads_q=6, heads_kv=2, group=group)
    begin = time.perf_counter()
    said = ""
    if dist.get_rank() == 1:
        q, k, v = inputs(cp)
        try:
            cp.attend(q, k[0], v)
        except ValueError as error:
            said = str(error)
    return said, time.perf_counter() - begin


def test_a_refusal_does_not_wait_long_for_ranks_that_make_no_call() -> None:
    _, (said, seconds) = ranks(2).run(refuse_alone)
    assert "each must be (B, heads, local tokens, D)" in said
    assert seconds < SOON_S


# What it costs ------------------------------------------------------------------------------------


def count_collectives(run_it: Callable[[ContextParallel], Tensor]) -> list[tuple[int, int]]:
    """Collectives of three steps of training with one plan, and their numbers."""
    cp, counts = made(strategy="stripe"), []
    real, real_object = dist.all_gather, dist.all_gather_object
    made_: list[int] = []

    def counting(rows: list[Tensor], mine: Tensor, **rest: object) -> object:
        made_.append(mine.numel())
        return real(rows, mine, **rest)

    dist.all_gather, dist.all_gather_object = counting, None
    try:
        for _ in range(3):
            made_.clear()
            run_it(cp).sum().backward()
            counts.append((len(made_), sum(made_)))
    finally:
        dist.all_gather, dist.all_gather_object = real, real_object
    return counts


def attend_once(cp: ContextParallel) -> Tensor:
    return cp.attend(*inputs(cp))


def test_a_call_is_compared_by_three_numbers_in_each_direction() -> None:
    assert ranks(2).run(count_collectives, attend_once) == [[(2, 6)] * 3] * 2


def test_patterns_of_one_area_differ_in_the_plan() -> None:
    one, other = (make_pattern(f"documents:lengths={n}", 23) for n in ("9+14", "14+9"))
    assert one != other
    assert one.total_area == other.total_area
