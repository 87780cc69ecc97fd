"""The memory ledger of layers: what the peak is made of, and the published ratios of buffers."""

from dataclasses import replace
from fractions import Fraction

import pytest

from harness.memory.counting import ALGORITHM, Use
from harness.memory.ledger import ledger, trade_buffers
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Scope
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import EVERY_STRATEGY, LAYER_STRATEGIES, quick, strategy

HEAD_DIM = 128
_GIVEN = (Use.WEIGHTS, Use.INPUT, Use.SAVED)  # inputs are one of these


def layer(heads: tuple[int, int], cp: int = 8, hidden: int = 4096, seqlen: int = 2**20) -> Problem:
    return Problem(
        pattern=make_pattern("causal", seqlen),
        heads_q=heads[0],
        heads_kv=heads[1],
        head_dim=HEAD_DIM,
        dtype=Dtype.BFLOAT16,
        cp=cp,
        hidden=hidden,
        rotary=5e5,
    )


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("name", [quick(name) for name in EVERY_STRATEGY])
def test_the_uses_of_memory_add_up_to_the_peak(name: str, scope: Scope) -> None:
    problem = replace(layer((6, 2), 2, 40, 96), head_dim=8, head_dim_v=5)
    if scope is Scope.ATTENTION:
        problem = replace(problem, hidden=None, rotary=None)
        if name in LAYER_STRATEGIES:
            return
    for direction in Direction:
        book = ledger(verify(strategy(name).plan(problem, direction)))
        assert [sum(uses.values()) for uses in book.uses_bytes] == list(book.peak_bytes)
        given = [sum(uses[use] for use in _GIVEN) for uses in book.uses_bytes]
        assert all(at >= start for at, start in zip(given, book.inputs_bytes, strict=True))
        assert all(size >= 0 for uses in book.uses_bytes for size in uses.values())


def saving(heads: tuple[int, int], u: int, cp: int, hidden: int) -> Fraction:
    """By how much UPipe's q, k, v and all-to-all buffers are smaller than Ulysses'."""
    problem = layer(heads, cp, hidden)
    ours, theirs = (
        trade_buffers(verify(strategy(text).plan(problem, Direction.FORWARD)))[0]
        for text in (f"upipe:stage_heads={u}", "ulysses")
    )
    return 1 - Fraction(ours, theirs)


@pytest.mark.parametrize(
    ("heads", "u", "cp", "percent"),
    [
        # As if every query head had a KV head of its own: 1 - U / H, the paper's headline.
        ((64, 64), 8, 8, 87.5),
        ((32, 32), 8, 8, 75),
        ((4, 4), 2, 2, 50),
        # With the KV heads that there are: Llama3-8B and a 32B of 64 query and 8 KV heads.
        ((32, 8), 8, 8, 50),
        ((64, 8), 8, 8, 70),
    ],
)
def test_the_buffers_of_the_trade_shrink_as_published(
    heads: tuple[int, int], u: int, cp: int, percent: float
) -> None:
    """Source: arXiv:2602.21196, section 3.3; the last two counted with native KV heads."""
    assert saving(heads, u, cp, hidden=5120) == Fraction(percent) / 100


def test_what_is_kept_for_backward_is_the_price_of_not_projecting_again() -> None:
    """x, out and lse; or also q, k and v, which 8B holds in 1.5 hidden states, and out twice."""
    problem = layer((32, 8), hidden=4096)
    hidden_state = problem.seqlen_q // 8 * 4096 * 2
    lse = problem.seqlen_q * 4 * 4  # 4 heads of every token, float32
    inputs = {
        text: ledger(verify(strategy(text).plan(problem, Direction.BACKWARD))).inputs_bytes[0]
        for text in ("upipe", "upipe:save_gathered=true", "ulysses", "zigzag")
    }
    weights = 4096 * HEAD_DIM * 2 * (32 + 8 + 8 + 32)
    assert inputs["upipe"] == weights + 3 * hidden_state + lse  # x, dy, out
    assert inputs["upipe:save_gathered=true"] == inputs["upipe"] + 5 * hidden_state // 2
    assert inputs["ulysses"] == inputs["upipe:save_gathered=true"]
    assert inputs["zigzag"] == inputs["upipe"] + 3 * hidden_state // 2


def test_upipe_gathers_less_and_peaks_lower_than_ulysses() -> None:
    problem = layer((32, 8))
    for direction in Direction:
        ours, theirs = (
            ledger(verify(strategy(text).plan(problem, direction))) for text in ("upipe", "ulysses")
        )
        assert max(ours.peak_bytes) < min(theirs.peak_bytes)
    # Of one stage the executor sums nothing and keeps less: compare what the method itself needs.
    fewer = [
        ledger(
            verify(strategy(f"upipe:stage_heads={u}").plan(problem, Direction.BACKWARD)), ALGORITHM
        )
        for u in (8, 16, 32)
    ]
    peaks = [book.peak_bytes[0] for book in fewer]
    assert sorted(peaks) == peaks
    assert peaks[0] < peaks[-1]
