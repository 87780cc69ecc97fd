"""Which rank owns which tokens, by the work that the pattern gives them.

Those of `sharding` look at lengths alone. Here chunks of queries are weighed by their areas:

    balanced    equal numbers of chunks, each to the rank with least area so far
    ptrr        blocks sorted by work, dealt in snake order: 0 1 2 2 1 0 0 1 2 ...
    documents   every document head-tail over all ranks: 0 1 2 2 1 0 | 0 1 2 2 1 0

Keys of unequal number (cross-attention) have no area of their own: contiguous, or head-tail.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from harness.errors import UnsupportedError
from harness.plan.sharding import PLACEMENTS, Placement, Sharding, contiguous, split, zigzag
from patterns.pattern import Pattern

MOST_CHUNKS = 4096
"""Of one sequence: planning takes memory by their square."""
DEALT = (Placement.BALANCED, Placement.DOCUMENTS, Placement.PTRR)
"""Placements that depend on the pattern."""

_CHUNKED = (Placement.BALANCED, Placement.PTRR)
_TORCH_BLOCK = 128  # tokens: torch's load balancer deals FlexAttention's blocks, pytorch#163617
_EVEN = 1.01  # a hundredth over the mean costs less than smaller chunks
_LEAST_CHUNK = 16  # tokens: below, a chunk is smaller than a tile of any kernel
_MOST_TRIED = 1024  # chunks: the search for a size ends here

Hands = tuple[tuple[int, ...], ...]
"""Per rank, the chunks that it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """Chunks of queries, dealt.

    Attributes:
        chunk: Tokens of a chunk, at most.
        hands: Who gets which.
        areas: Unmasked pairs of each chunk with all keys.
    """

    chunk: int
    hands: Hands
    areas: tuple[int, ...]

    @property
    def most(self) -> int:
        """Area of the rank that has most."""
        return max(sum(self.areas[c] for c in hand) for hand in self.hands)

    @property
    def bound(self) -> int:
        """Area that the fullest rank has at least, however these chunks are dealt.

        No less than the mean; and who has the largest chunk has as many others, no smaller than
        the smallest.
        """
        each, ordered = len(self.hands[0]), sorted(self.areas)
        return max(-(-sum(ordered) // len(self.hands)), ordered[-1] + sum(ordered[: each - 1]))

    @property
    def imbalance(self) -> float:
        """Area of the rank that has most, over the mean; 1 if there is none."""
        total = sum(self.areas)
        return self.most * len(self.hands) / total if total else 1.0


def deal_tokens(
    pattern: Pattern, ranks: int, placement: Placement, chunk: int | None = None
) -> tuple[Sharding, Sharding]:
    """Deal queries and keys to ranks; the same value twice for self-attention.

    Args:
        pattern: Its lengths, and for some placements its areas.
        ranks: How many ranks share the tokens.
        placement: How.
        chunk: Tokens of a chunk, where the placement deals chunks; None lets it choose.

    Raises:
        UnsupportedError: The chunk is not of this placement or too long, or chunks are too many.
    """
    key_rule: Callable[[int, int], Sharding] = contiguous
    if placement in _CHUNKED:
        dealt = deal(pattern, ranks, placement, chunk)
        parts = len(dealt.hands[0]) * ranks
        queries = Sharding(split(pattern.seqlen_q, parts), dealt.hands)
    elif chunk is not None:
        known = " and ".join(f"placement={each}" for each in _CHUNKED)
        raise UnsupportedError(
            f"chunk ({chunk}) is of {known}; placement={placement} cuts no chunks",
            (f"placement=balanced,chunk={chunk}",),
        )
    elif placement is Placement.DOCUMENTS and pattern.seqlen_q == pattern.seqlen_kv:
        queries, key_rule = head_tail(separate_documents(pattern), ranks), zigzag
    else:
        key_rule = PLACEMENTS.get(placement, zigzag)
        queries = key_rule(pattern.seqlen_q, ranks)
    if pattern.seqlen_kv == pattern.seqlen_q:
        return queries, queries
    return queries, key_rule(pattern.seqlen_kv, ranks)


def chunk_of(pattern: Pattern, ranks: int, placement: Placement, chunk: int | None) -> int | None:
    """Tokens of a chunk as `deal_tokens` has them; None where the placement deals none.

    Raises:
        UnsupportedError: As `deal_tokens`.
    """
    return deal(pattern, ranks, placement, chunk).chunk if placement in _CHUNKED else chunk


# Chunks -------------------------------------------------------------------------------------


def deal(pattern: Pattern, ranks: int, placement: Placement, chunk: int | None = None) -> Deal:
    """Deal chunks of queries by their areas, as many to every rank; see `deal_tokens`.

    Where no chunk is given, `ptrr` takes torch's block, and `balanced` the largest chunk that is
    even to a hundredth, or else the most even one that it tries.
    """
    if chunk is not None and chunk > pattern.seqlen_q:
        raise UnsupportedError(
            f"chunk ({chunk}) must be at most the sequence length ({pattern.seqlen_q})",
            (f"chunk={-(-pattern.seqlen_q // ranks)}",),
        )
    if placement is Placement.PTRR:
        return _deal(pattern, ranks, chunk or min(_TORCH_BLOCK, pattern.seqlen_q), snake)
    if chunk is not None:
        return _deal(pattern, ranks, chunk, least_first)
    tried = []
    for size in _sizes(pattern.seqlen_q, ranks):
        tried.append(_deal(pattern, ranks, size, least_first))
        if tried[-1].imbalance <= _EVEN:
            return tried[-1]
    return min(tried, key=lambda each: each.imbalance)


def _sizes(seqlen: int, ranks: int) -> Iterator[int]:
    """Yield sizes of chunks to try: one to a rank, two, four, ..."""
    chunks, size = ranks, -(-seqlen // ranks)
    yield size
    while 2 * chunks <= _MOST_TRIED and -(-seqlen // (2 * chunks)) >= _LEAST_CHUNK:
        chunks *= 2
        size = -(-seqlen // chunks)
        yield size


def _deal(
    pattern: Pattern, ranks: int, chunk: int, rule: Callable[[Sequence[int], int], Hands]
) -> Deal:
    parts = ranks * -(-pattern.seqlen_q // (chunk * ranks))
    if parts > MOST_CHUNKS:
        least = -(-pattern.seqlen_q // (MOST_CHUNKS // ranks * ranks))
        raise UnsupportedError(
            f"chunk ({chunk}) makes {parts} chunks, and must make at most {MOST_CHUNKS}",
            (f"chunk={least}",),
        )
    keys = (range(pattern.seqlen_kv),)
    areas = pattern.areas(split(pattern.seqlen_q, parts), keys)[:, 0].tolist()
    return Deal(chunk=chunk, hands=rule(areas, ranks), areas=tuple(areas))


def least_first(areas: Sequence[int], ranks: int) -> Hands:
    """Deal chunks, largest first, each to the rank with least area that still has room.

    Source: MagiAttention's dispatch, docs/source/blog/magi_attn.md and `DispatchSolver`'s min-heap.
    """
    each = len(areas) // ranks
    hands: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, 0, rank) for rank in range(ranks)]
    heapify(heap)
    for chunk in _largest_first(areas):
        area, count, rank = heappop(heap)
        hands[rank].append(chunk)
        if count + 1 < each:
            heappush(heap, (area + areas[chunk], count + 1, rank))
    return tuple(tuple(sorted(hand)) for hand in hands)


def snake(areas: Sequence[int], ranks: int) -> Hands:
    """Deal chunks, largest first, to ranks in turn, there and back.

    Source: torch's `_PTRRLoadBalancer` (pytorch#163617), which weighs by blocks that are not empty;
    here by exact areas.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    for at, chunk in enumerate(_largest_first(areas)):
        turn, place = divmod(at, ranks)
        hands[place if turn % 2 == 0 else ranks - 1 - place].append(chunk)
    return tuple(tuple(sorted(hand)) for hand in hands)


def _largest_first(areas: Sequence[int]) -> list[int]:
    return sorted(range(len(areas)), key=lambda chunk: (-areas[chunk], chunk))


# Documents ----------------------------------------------------------------------------------


def separate_documents(pattern: Pattern) -> list[range]:
    """Cut a sequence where no query sees a key across the cut: packed documents, or all of it."""
    bands = pattern.arrays
    starts = np.minimum(bands.q0, bands.k0)
    stops = np.maximum(bands.q1, bands.k1)
    order = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(stops[order])
    inside = starts[order][1:] < reach[:-1]  # it begins before those before it end
    cuts = {0, pattern.seqlen_q, *starts[order][:1].tolist(), *reach[-1:].tolist()}
    cuts.update(starts[order][1:][~inside].tolist(), reach[:-1][~inside].tolist())
    edges = sorted(cuts)
    return [range(a, b) for a, b in pairwise(edges)]


def head_tail(documents: Sequence[range], ranks: int) -> Sharding:
    """Cut every document into 2 x ranks parts; rank r gets parts r and 2 ranks - 1 - r of each.

    Tokens that do not divide go round the ranks from document to document, so that ranks differ by
    at most one token in all.

    Raises:
        UnsupportedError: They make too many chunks.

    Source: WLB-LLM (arXiv:2503.17924), per-document sharding without padding. Transformer Engine's
    thd layout deals the same way, of documents padded to a multiple of 2 x ranks.
    """
    parts = sum(min(len(document), 2 * ranks) for document in documents)
    if parts > MOST_CHUNKS:
        raise UnsupportedError(
            f"placement=documents: {len(documents)} documents over {ranks} ranks make {parts} "
            f"chunks, and must make at most {MOST_CHUNKS}",
            ("placement=balanced",),
        )
    chunks: list[range] = []
    owned: list[list[int]] = [[] for _ in range(ranks)]
    turn = 0  # the rank that gets the next token left over
    for document in documents:
        start = document.start
        for part, size in enumerate(_head_tail_sizes(len(document), ranks, turn)):
            if size:
                owned[min(part, 2 * ranks - 1 - part)].append(len(chunks))
                chunks.append(range(start, start + size))
                start += size
        turn = (turn + len(document)) % ranks
    return Sharding(tuple(chunks), tuple(map(tuple, owned)))


def _head_tail_sizes(length: int, ranks: int, turn: int) -> list[int]:
    """Tokens of the parts of one document: equal, and what is left over one by one from `turn`."""
    even, over = divmod(length, 2 * ranks)
    sizes = [even] * (2 * ranks)
    for extra in range(over):
        rank = (turn + extra) % ranks
        sizes[rank if extra < ranks else 2 * ranks - 1 - rank] += 1
    return sizes
