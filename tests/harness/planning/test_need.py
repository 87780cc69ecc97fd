"""Transfers carry the tokens that are needed and no more, by counts that know no plan."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sharding import Sharding, contiguous, zigzag
from harness.plan.sizes import traffic
from harness.planning import need
from harness.planning.need import NeedCut, cut_at_need
from harness.planning.strategy import Context
from harness.verify.proof import verify
from patterns import make_pattern
from patterns.lengths import drawn
from strategies import strategy
from tests.harness.unused import unused
from tests.support import problem

SEQLEN = 16411  # a prime: no degree divides it
WINDOWS = (1, 127, 4096)
PACKS = [(preset, seed) for preset in ("megatron", "pile") for seed in range(5)]
TEXTS = {f"window:left={left}": left for left in WINDOWS} | {
    f"documents:preset={preset},seed={seed}": (preset, seed) for preset, seed in PACKS
}

Bools = NDArray[np.bool_]


def met(text: str, cp: int) -> list[tuple[range, Bools]]:
    """Per rank of contiguous shards, its positions and which keys its queries attend."""
    at = np.arange(SEQLEN)
    what = TEXTS[text]
    if isinstance(what, int):
        first = np.maximum(at - what, 0)
    else:
        lengths = drawn(*what, SEQLEN)
        first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    found = []
    for own in (range(r * SEQLEN // cp, (r + 1) * SEQLEN // cp) for r in range(cp)):
        change = np.zeros(SEQLEN + 1, dtype=np.int64)
        np.add.at(change, first[own], 1)  # query q attends first[q] .. q
        np.add.at(change, at[own] + 1, -1)
        found.append((own, np.cumsum(change)[:-1] > 0))
    return found


def others(text: str, cp: int) -> int:
    """Keys that ranks need of others, each counted once for each rank that needs it."""
    return sum(int(keys.sum() - keys[own].sum()) for own, keys in met(text, cp))


def hops(text: str, cp: int) -> int:
    """Links of a ring that keys cross: as far as the last rank that needs them."""
    ranks = met(text, cp)
    total = 0
    for source, (own, _) in enumerate(ranks):
        last = np.zeros(len(own), dtype=np.int64)
        for step in range(1, cp):
            last = np.where(ranks[(source + step) % cp][1][own], step, last)
        total += int(last.sum())
    return total


def attention(text: str, cp: int) -> Problem:
    return Problem(
        pattern=make_pattern(text, SEQLEN),
        heads_q=6,
        heads_kv=3,
        head_dim=8,
        head_dim_v=12,
        batch=2,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


KEY = 2 * 3 * (8 + 12)  # batch x KV heads x (d_k + d_v): elements of k and v of one token


@pytest.mark.parametrize("cp", [2, 4, 8, 16])
@pytest.mark.parametrize("text", TEXTS)
def test_just_the_needed_keys_and_their_gradients_are_received(text: str, cp: int) -> None:
    keys, far = others(text, cp), hops(text, cp)
    for name in ("owner", "allgather", "ultraattn:levels=none", "ring"):
        for direction in Direction:
            plan = strategy(name).plan(attention(text, cp), direction, Context(gpus_per_node=cp))
            wanted = (far if name == "ring" else keys) * KEY * 2
            if direction is Direction.BACKWARD:
                wanted += keys * KEY * 4
            assert sum(traffic(plan)[1]) == wanted, (name, direction)


@pytest.mark.parametrize(
    "name",
    [
        "ring",
        "ring:direction=both",
        "ring:placement=zigzag",
        "ring-q",
        "ring-q:backward=queries",
        "tasp",
        "zigzag",
        "double_ring:inner=2",
        "allgather:placement=documents",
        "ulysses",
        "usp:2x2",
        "owner:placement=balanced",
        "grid:rows=2",
        "grid:rows=2,fused=true",
        "mesh:rows=2,placement=contiguous",
    ],
)
@pytest.mark.parametrize(
    "text",
    ["window:left=5", "documents:lengths=17+2+31+3", "global_local", "lambda", "shared_question"],
)
def test_no_rank_receives_what_it_neither_uses_nor_passes_on(name: str, text: str) -> None:
    one = problem(text, 53, heads=(4, 2), dims=(8, 4), cp=4)
    for direction in Direction:
        plan = strategy(name).plan(one, direction)
        verify(plan)
        assert not unused(plan)


@given(st.integers(1, 90), st.integers(1, 6), st.integers(1, 9), st.sampled_from(NeedCut))
def test_parts_make_up_the_chunks_of_the_same_owners(
    seqlen: int, cp: int, align: int, cut: NeedCut
) -> None:
    pattern = make_pattern("window:left=3", seqlen)
    for place in (contiguous, zigzag):
        whole: Sharding = place(seqlen, cp)
        for parts in cut_at_need(pattern, whole, whole, cut, range(cp), align):
            assert len(parts.of) == len(whole.chunks)
            for chunk, made in zip(whole.chunks, parts.of, strict=True):
                pieces = [parts.sharding.chunks[part] for part in made]
                assert [at for piece in pieces for at in piece] == list(chunk)
                assert all(len(first) % align == 0 for first, _ in pairwise(pieces))
            for rank in range(cp):
                assert parts.sharding.positions(rank) == whole.positions(rank)


def test_cuts_are_rounded_outwards() -> None:
    pattern, whole = make_pattern("window:left=3", 40), contiguous(40, 2)
    exact, rounded, none = (
        cut_at_need(pattern, whole, whole, NeedCut.KEYS, (0, 1), align)[1].sharding.chunks
        for align in (1, 8, 64)
    )
    assert exact == (range(17), range(17, 20), range(20, 40))
    assert rounded == (range(16), range(16, 20), range(20, 40))
    assert none == whole.chunks


def test_needs_of_very_many_ends_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, whole = make_pattern("random_topk:block=4,topk=3", 400), contiguous(400, 4)
    monkeypatch.setattr(need, "_MOST_CUTS", 12)
    _, rounded = cut_at_need(pattern, whole, whole, NeedCut.KEYS, range(4))
    monkeypatch.undo()
    _, exact = cut_at_need(pattern, whole, whole, NeedCut.KEYS, range(4))
    assert 4 < len(rounded.sharding.chunks) <= 16 < len(exact.sharding.chunks)
    assert {chunk.stop for chunk in whole.chunks} <= {c.stop for c in rounded.sharding.chunks}


def test_full_and_causal_patterns_are_not_cut() -> None:
    for text in ("full", "causal"):
        for name in ("ring", "zigzag", "stripe", "usp:2x2", "owner", "mesh"):
            plan = strategy(name).plan(problem(text, 53), Direction.FORWARD)
            assert plan.q_chunks == plan.kv_chunks
            assert len(plan.kv_chunks) in (4, 8)
