"""Hypothesis generators of patterns and chunks, and brute-force answers to compare with."""

from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from patterns import Band, Block, Pattern, Relation, make_pattern

CROSS_TEXTS = (
    "full",
    "causal",
    "causal:align=bottom_right",
    "window:left=2",
    "window:left=0",
    "window:left=3,right=2",
    "window:left=1,right=400",
    "strided",
    "strided:blocks=6,stride=2,local=2",
    "strided_original",
    "global_local",
    "global_local:blocks=7,local=2,global=2",
    "star",
    "star:blocks=3",
    "streaming",
    "streaming:blocks=5,local=2",
    "prefix_lm:length=7",
    "prefix_lm:length=0",
    "lambda:sink=3,left=5",
    "lambda:sink=6,left=1",
)
SELF_TEXTS = (
    "causal_blockwise:block=3",
    "causal_blockwise:block=5,local=0",
    "shared_question:answers=3",
    "shared_question:answers=9,percent=45",
    "random_topk:block=3,topk=4,seed=2",
    "random_topk:block=2,topk=1",
    "documents:preset=megatron,seed=7",
    "varlen_block_causal:preset=pile_wikipedia,block=4",
)
_LONGEST = 40

Grid = tuple[Pattern, list[range], list[range]]


@st.composite
def self_patterns(draw: st.DrawFn) -> Pattern:
    """Any pattern on equal lengths, documents included."""
    if draw(st.booleans()):
        texts = (*CROSS_TEXTS, *SELF_TEXTS)
        return make_pattern(draw(st.sampled_from(texts)), draw(st.integers(1, _LONGEST)))
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    kind = draw(
        st.sampled_from(
            (
                *("documents:mask=causal", "documents:mask=full", "documents:window=2"),
                *("documents:mask=full,window=3", "varlen_block_causal:block=4"),
            )
        )
    )
    return make_pattern(f"{kind},lengths={'+'.join(map(str, lengths))}", sum(lengths))


@st.composite
def cross_patterns(draw: st.DrawFn) -> Pattern:
    """Any pattern but documents on two unequal lengths."""
    text = draw(st.sampled_from(CROSS_TEXTS))
    seqlen_q, seqlen_kv = draw(st.lists(st.integers(1, _LONGEST), min_size=2, max_size=2))
    return make_pattern(text, seqlen_q, seqlen_kv, cross=True)


any_patterns = self_patterns() | cross_patterns()


@st.composite
def chunks(draw: st.DrawFn, end: int, *, steps: tuple[int, ...] = (1, 2, 3, 5)) -> range:
    """An arithmetic progression in [0, end), sometimes empty."""
    start = draw(st.integers(0, end - 1))
    return range(start, draw(st.integers(start, end)), draw(st.sampled_from(steps)))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """A pattern with query and key chunks; half of the time all of one step."""
    pattern = draw(any_patterns)
    steps = draw(st.sampled_from(((1,), (2,), (3,), (1, 2, 3, 5), (4, 6), (1, 7))))
    qs = draw(st.lists(chunks(pattern.seqlen_q, steps=steps), min_size=1, max_size=5))
    ks = draw(st.lists(chunks(pattern.seqlen_kv, steps=steps), min_size=1, max_size=4))
    return pattern, qs, ks


def dense(pattern: Pattern) -> np.ndarray:
    """The whole mask from the pattern's definition."""
    return pattern.allowed(np.arange(pattern.seqlen_q), np.arange(pattern.seqlen_kv))


def submask(mask: np.ndarray, q: range, k: range) -> np.ndarray:
    """Rows `q` and columns `k` of a mask."""
    return mask[np.array(q, dtype=int)[:, None], np.array(k, dtype=int)[None, :]]


def times_covered(bands: Iterable[Band], q: range, k: range) -> np.ndarray:
    """How many bands allow each pair of `q` x `k`."""
    count = np.zeros((len(q), len(k)), dtype=int)
    for i, at in enumerate(q):
        for j, key in enumerate(k):
            count[i, j] = sum(allows(band, at, key) for band in bands)
    return count


def allows(band: Band, q: int, k: int) -> bool:
    """The definition of a band."""
    inside = band.q0 <= q < band.q1 and band.k0 <= k < band.k1
    above = band.lo is None or q - k >= band.lo
    return inside and above and (band.hi is None or q - k <= band.hi)


def relation_by_search(mask: np.ndarray) -> Block:
    """Try every relation on a dense mask; EMPTY and FULL win over CAUSAL."""
    if not mask.any():
        return Block(Relation.EMPTY)
    if mask.all():
        return Block(Relation.FULL)
    i, j = np.indices(mask.shape)
    for shift in range(-mask.shape[0], mask.shape[1] + 1):
        if np.array_equal(mask, j <= i + shift):
            return Block(Relation.CAUSAL, shift)
    return Block(Relation.PARTIAL)
