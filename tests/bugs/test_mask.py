"""Masks: what is asked for is what is attended, by every strategy, in global positions."""

import numpy as np
import pytest
import torch

from harness.attention import run_all
from harness.execute import kernels
from harness.execute.kernels import Mask, MaskKind
from harness.plan.plan import Plan
from harness.plan.sizes import tile_flops
from harness.plan.tasks import Tensor as Kind
from harness.plan.tasks import Tile, legs_of
from tests.support import EVERY_STRATEGY, failures, problem, run, same_bits, tensors, wrong

VARIANTS = (*EVERY_STRATEGY, "allgather:placement=zigzag", "usp:2x2")


def attended(plan: Plan) -> int:
    """Pairs of a query and a key that a plan's tiles attend, over all heads."""
    tiles = [task for task in plan.tasks if isinstance(task, Tile)]
    return sum(tile.area * tile.heads.bit_count() for tile in tiles)


@pytest.mark.parametrize("strategy", VARIANTS)
@pytest.mark.parametrize("window", [1, 5, 10, 13])
def test_b040_a_window_does_not_become_causal(window: int, strategy: str) -> None:
    p = problem(f"window:left={window}", 41, (6, 2), batch=1, cp=4)
    assert wrong(p, strategy) == ""
    pairs = sum(min(row, window) + 1 for row in range(41))
    assert attended(run(p, strategy).forward.plan) == 6 * pairs


def test_b040_layers_with_and_without_a_window_take_turns() -> None:
    narrow = problem("window:left=3", 41, (6, 2), batch=1, cp=4)
    wide = problem("causal", 41, (6, 2), batch=1, cp=4)
    first = run(narrow, "zigzag").results
    assert failures(wide, run(wide, "zigzag").results) == []
    assert same_bits(first, run(narrow, "zigzag").results)
    assert {v.name for v in failures(wide, first)} == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "stripe", "balanced"])
@pytest.mark.parametrize("pattern", ["full", "causal"])
@pytest.mark.parametrize("name", ["allgather", "double_ring", "usp"])
def test_b042_any_placement_goes_with_any_mask(name: str, pattern: str, placement: str) -> None:
    for seqlen in (2, 4, 9):
        p = problem(pattern, seqlen, (1, 1), dims=(64, 64), batch=1, cp=2)
        assert wrong(p, f"{name}:placement={placement}") == ""


@pytest.mark.parametrize("strategy", VARIANTS)
@pytest.mark.parametrize("pattern", ["full", "causal", "causal:align=bottom_right"])
@pytest.mark.parametrize("lengths", [(64, 96), (96, 64)])
def test_b044_queries_and_keys_may_differ_in_number(
    lengths: tuple[int, int], pattern: str, strategy: str
) -> None:
    cp = 4 if strategy == "usp:2x2" else 2
    p = problem(pattern, lengths[0], (4, 2), seqlen_kv=lengths[1], batch=1, cp=cp)
    assert wrong(p, strategy) == ""


def test_b044_the_two_alignments_of_causal_are_what_they_say() -> None:
    top = problem("causal", 2, (1, 1), seqlen_kv=4).pattern
    bottom = problem("causal:align=bottom_right", 2, (1, 1), seqlen_kv=4).pattern
    q, k = np.arange(2), np.arange(4)
    assert top.allowed(q, k).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert bottom.allowed(q, k).astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("strategy", ["usp:2x4", "usp:ulysses=2,ring_inside=true", "ring"])
@pytest.mark.parametrize("pattern", ["global_local", "streaming"])
def test_b066_keys_that_everyone_sees_are_attended_once(pattern: str, strategy: str) -> None:
    p = problem(pattern, 61, (4, 2), batch=1, cp=8)
    assert wrong(p, strategy) == ""


@pytest.mark.parametrize("cp", [4, 8])
@pytest.mark.parametrize("window", [3, 8, 17])
def test_b088_keys_travel_only_as_far_as_the_window_reaches(window: int, cp: int) -> None:
    seqlen = 8 * cp
    p = problem(f"window:left={window}", seqlen, (4, 2), batch=1, cp=cp)
    neighbours = -(-window // 8)  # shards of 8 tokens
    for strategy in ("ring", "allgather"):
        plan = run(p, strategy).forward.plan
        pieces = [
            (leg, piece)
            for task in plan.tasks
            for leg in legs_of(task)
            for piece in leg.pieces
            if leg.src != leg.dst and piece.tensor is Kind.K
        ]
        received = [sum(leg.dst.rank == rank for leg, _ in pieces) for rank in range(cp)]
        assert received == [min(rank, neighbours) for rank in range(cp)]


@pytest.mark.parametrize("strategy", VARIANTS)
def test_b096_work_is_counted_by_the_mask(strategy: str) -> None:
    seqlen = 32
    causal, full = (
        run(problem(pattern, seqlen, (4, 2), dims=(8, 8), batch=1, cp=4), strategy)
        for pattern in ("causal", "full")
    )
    flops = [
        sum(tile_flops(one.forward.plan, t) for t in one.forward.plan.tasks if isinstance(t, Tile))
        for one in (causal, full)
    ]
    assert flops[0] == 4 * 4 * 8 * seqlen * (seqlen + 1) // 2
    assert flops[1] == 4 * 4 * 8 * seqlen * seqlen


@pytest.mark.parametrize("pattern", ["causal", "window:left=5", "star"])
def test_b094_every_strategy_and_number_of_ranks_does_the_same_work(pattern: str) -> None:
    work = {
        attended(run(problem(pattern, 48, (4, 4), batch=1, cp=cp), strategy).backward.plan)
        for strategy in EVERY_STRATEGY
        for cp in (1, 2, 4)
    }
    assert len(work) == 1


@pytest.mark.parametrize("strategy", ["zigzag", "usp:1x2"])
@pytest.mark.parametrize("kernel", ["attend_call", "attend_backward"])
def test_s01_a_causal_flag_that_is_lost_is_seen_in_either_direction(
    kernel: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem("causal", 23, (4, 2), cp=2)
    real = getattr(kernels, kernel)

    def forgetful(*args: object) -> tuple[torch.Tensor, ...]:
        *tensors_, mask, scale = args
        if mask.kind is MaskKind.CAUSAL:
            mask = Mask(MaskKind.FULL, mask.q, mask.k)
        return real(*tensors_, mask, scale)

    monkeypatch.setattr(kernels, kernel, forgetful)
    wrongs = {verdict.name for verdict in failures(p, run(p, strategy).results)}
    assert wrongs >= ({"out", "lse"} if kernel == "attend_call" else {"dq", "dk", "dv"})


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_s01_no_query_sees_a_later_key(strategy: str, cp: int) -> None:
    p = problem("causal", 23, (4, 2), cp=cp)
    q, k, v, _ = tensors(p)
    out = run_all(p, strategy, q, k, v).results["out"]
    k[:, :, 20:], v[:, :, 20:] = 9.0, -9.0
    later = run_all(p, strategy, q, k, v).results["out"]
    assert torch.equal(out[:, :, :20], later[:, :, :20])
    assert not torch.equal(out[:, :, 20:], later[:, :, 20:])


@pytest.mark.parametrize("strategy", VARIANTS)
def test_s09_a_window_is_in_positions_of_the_whole_sequence(strategy: str) -> None:
    cp = 4 if strategy == "usp:2x2" else 2
    p = problem("window:left=8,right=0", 64, (4, 2), batch=1, cp=cp)
    assert wrong(p, strategy) == ""
    q, k, v, _ = tensors(p)
    out = run_all(p, strategy, q, k, v).results["out"]
    v[:, :, 31] += 1.0  # the last key of the first half
    changed = (run_all(p, strategy, q, k, v).results["out"] != out).any(dim=(0, 1, 3))
    assert changed.nonzero().flatten().tolist() == list(range(31, 40))
