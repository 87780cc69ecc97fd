"""Kernel calls of a tile: every unmasked pair once and no other, in few calls."""

import time
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.plan.kernel_calls import Call, _lower, lower
from harness.plan.masks import MaskKind
from harness.plan.packing import MOST_ALONE
from harness.plan.sharding import contiguous, stripe, zigzag
from patterns import Band, Pattern, make_pattern
from tests.patterns.generators import any_patterns, chunks, dense, submask, times_covered


@st.composite
def tiles(draw: st.DrawFn) -> tuple[Pattern, tuple[range, ...], tuple[range, ...]]:
    """A pattern and disjoint chunks in any order: contiguous runs, stripes, or mixed steps."""
    pattern = draw(any_patterns)

    def side(seqlen: int) -> tuple[range, ...]:
        kind = draw(st.sampled_from(("contiguous", "stripe", "zigzag", "mixed")))
        if kind == "mixed":
            steps = draw(st.sampled_from(((1, 2, 3, 5), (2, 3), (4, 6))))
            return tuple(draw(st.lists(chunks(seqlen, steps=steps), min_size=1, max_size=2)))
        parts = draw(st.integers(1, 6))
        how = {"contiguous": contiguous, "stripe": stripe, "zigzag": zigzag}[kind]
        table = how(seqlen, parts).chunks
        picked = draw(st.lists(st.sampled_from(table), unique=True, min_size=1))
        return tuple(picked)

    return pattern, side(pattern.seqlen_q), side(pattern.seqlen_kv)


def met(call: Call) -> np.ndarray:
    """Which pairs of its rows and columns a call attends, by the definition of its mask."""
    rows, cols = call.rows[1] - call.rows[0], call.cols[1] - call.cols[0]
    mask = call.mask
    assert (rows, cols) == (len(mask.q), len(mask.k))
    i, j = np.indices((rows, cols))
    if mask.kind is MaskKind.FULL:
        return np.ones((rows, cols), dtype=bool)
    if mask.kind is MaskKind.CAUSAL:
        return j <= i
    if mask.bands is not None:
        rows = zip(*(column.tolist() for column in mask.bands.columns), strict=True)
        bands = [Band(q0=a, q1=b, k0=c, k1=d, lo=lo, hi=hi) for a, b, c, d, lo, hi in rows]
        return times_covered(bands, mask.q, mask.k) > 0
    distance = np.array(mask.q)[i] - np.array(mask.k)[j]
    allowed = np.ones((rows, cols), dtype=bool)
    if mask.lo is not None:
        allowed &= distance >= mask.lo
    if mask.hi is not None:
        allowed &= distance <= mask.hi
    return allowed


def check(
    pattern: Pattern, q: tuple[range, ...], kv: tuple[range, ...], calls: tuple[Call, ...]
) -> None:
    q_at = [p for chunk in q for p in chunk]
    k_at = [p for chunk in kv for p in chunk]
    count = np.zeros((len(q_at), len(k_at)), dtype=int)
    for call in calls:
        seen = met(call)
        assert seen.any()
        assert seen.any(axis=1).all() or call.mask.kind in (MaskKind.BAND, MaskKind.PACKED)
        count[call.rows[0] : call.rows[1], call.cols[0] : call.cols[1]] += seen
    expected = np.zeros_like(count)
    if q_at and k_at:
        expected = dense(pattern)[np.ix_(q_at, k_at)].astype(int)

    assert expected.tolist() == count.tolist()


@given(tiles())
def test_calls_cover_every_unmasked_pair_once_and_no_other(
    tile: tuple[Pattern, tuple[range, ...], tuple[range, ...]],
) -> None:
    check(*tile, lower(*tile))


@given(tiles(), st.integers(0, 3), st.integers(0, 3))
def test_calls_cover_alike_whatever_is_packed(
    tile: tuple[Pattern, tuple[range, ...], tuple[range, ...]], small: int, alone: int
) -> None:
    with (
        patch("harness.plan.packing.SMALL", small),
        patch("harness.plan.packing.MOST_ALONE", alone),
    ):
        calls = _lower(*tile)
    check(*tile, calls)


@pytest.mark.parametrize("text", ["causal", "window:left=9", "window:left=3,right=8"])
@pytest.mark.parametrize("steps", [(1, 1), (2, 3), (3, 2), (1, 5)])
def test_steps_that_differ_are_lowered_right(text: str, steps: tuple[int, int]) -> None:
    pattern = make_pattern(text, 61)
    q, k = (range(2, 61, step) for step in steps)
    check(pattern, (q,), (k,), lower(pattern, (q,), (k,)))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_whole_causal_sequence_is_one_causal_call(parts: int) -> None:
    pattern = make_pattern("causal", 1003)
    table = contiguous(1003, parts).chunks
    (call,) = lower(pattern, table, table)

    assert (call.rows, call.cols, call.mask.kind) == ((0, 1003), (0, 1003), MaskKind.CAUSAL)


def test_a_full_sequence_in_pieces_is_one_full_call() -> None:
    pattern = make_pattern("full", 1003, 701, cross=True)
    (call,) = lower(pattern, contiguous(1003, 3).chunks, zigzag(701, 2).chunks)

    assert (call.rows, call.cols, call.mask.kind) == ((0, 1003), (0, 701), MaskKind.FULL)


@pytest.mark.parametrize("seqlen", [1000, 1003])
def test_a_stripe_is_one_causal_call_per_tile(seqlen: int) -> None:
    pattern = make_pattern("causal", seqlen)
    table = stripe(seqlen, 7).chunks
    for r, q in enumerate(table):
        for s, k in enumerate(table):
            (call,) = lower(pattern, (q,), (k,))
            assert call.mask.kind is MaskKind.CAUSAL
            # Keys of a later stripe start one query further down: j <= i - 1.
            assert (1 if s > r else 0) == call.rows[0]


def test_a_zigzag_pair_is_one_call_everywhere() -> None:
    pattern = make_pattern("causal", 960)
    sharding = zigzag(960, 3)
    pairs = [tuple(sharding.chunks[c] for c in owned) for owned in sharding.owned]
    counts = [[len(lower(pattern, q, k)) for k in pairs] for q in pairs]

    # At home two triangles and the rectangle between them are one triangle by index.
    assert counts == [[1, 1, 1], [1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("left", [0, 300, 4096])
def test_a_window_takes_one_call_whatever_its_length(left: int) -> None:
    seqlen = 4_000_003
    pattern = make_pattern(f"window:left={left}", seqlen)
    (call,) = lower(pattern, (range(seqlen),), (range(seqlen),))

    assert (call.rows, call.cols) == ((0, seqlen), (0, seqlen))
    assert (call.mask.kind, call.mask.lo, call.mask.hi) == (MaskKind.BAND, 0, left)


@pytest.mark.parametrize("mask", ["causal", "full"])
@pytest.mark.parametrize("count", [10, 700, 5000])
def test_calls_of_documents_are_bounded_however_many_there_are(count: int, mask: str) -> None:
    lengths = np.random.default_rng(count).integers(1, 200, size=count).tolist()
    seqlen = sum(lengths)
    pattern = make_pattern(f"documents:lengths={'+'.join(map(str, lengths))},mask={mask}", seqlen)
    for run in (range(seqlen), range(3, seqlen, 7)):
        calls = lower(pattern, (run,), (run,))

        # Between two of those that are alone there is one pack, and a band alone may be a
        # rectangle and a triangle.
        assert len(calls) <= 2 * (2 * MOST_ALONE + 1)


def test_stairs_of_many_triangles_take_time_in_proportion() -> None:
    seqlen = 40_000
    pattern = make_pattern("causal", seqlen)
    tile = tuple(range(start, start + 5) for start in range(0, seqlen, 10))
    begin = time.process_time()
    calls = lower(pattern, tile[:300], tile[:300])
    seconds = time.process_time() - begin

    assert len(calls) == 1
    assert seconds < 5


def test_an_empty_tile_has_no_calls() -> None:
    pattern = make_pattern("causal", 20)
    assert lower(pattern, (range(0, 5),), (range(7, 20),)) == ()
    assert lower(pattern, (range(0),), (range(7, 20),)) == ()


def test_submask_and_lowering_agree_on_one_stripe_by_hand() -> None:
    pattern = make_pattern("window:left=3", 11)
    q, k = range(2, 11, 3), range(0, 11, 2)
    calls = lower(pattern, (q,), (k,))
    count = np.zeros((len(q), len(k)), dtype=int)
    for call in calls:
        count[call.rows[0] : call.rows[1], call.cols[0] : call.cols[1]] += met(call)

    assert submask(dense(pattern), q, k).astype(int).tolist() == count.tolist()
