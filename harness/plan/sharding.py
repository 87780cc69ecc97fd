"""Which rank owns which tokens: contiguous, zigzag, stripe, for any length.

A sharding is a table of chunks (arithmetic progressions that tile the sequence) and, per rank, the
chunks that it owns in local order. Chunks may be uneven or empty, so no length is refused here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain


class Placement(StrEnum):
    """How tokens are dealt to ranks, where a strategy leaves the choice."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPE = "stripe"
    BALANCED = "balanced"
    DOCUMENTS = "documents"
    PTRR = "ptrr"


@dataclass(frozen=True, slots=True)
class Sharding:
    """Chunks of one sequence and their owners.

    Attributes:
        chunks: Positions of each chunk; together they cover 0 <= position < seqlen once.
        owned: Per rank, the indices of its chunks in the order of its local tensor.
    """

    chunks: tuple[range, ...]
    owned: tuple[tuple[int, ...], ...]

    def positions(self, rank: int) -> list[int]:
        """Global positions of a rank's tokens in local order (for rotary embedding)."""
        return list(chain.from_iterable(self.chunks[c] for c in self.owned[rank]))

    def tokens(self, rank: int) -> int:
        """How many tokens a rank owns."""
        return sum(len(self.chunks[c]) for c in self.owned[rank])

    def owner(self) -> dict[int, int]:
        """Map chunk index to the rank that owns it."""
        return {c: rank for rank, owned in enumerate(self.owned) for c in owned}


def split(seqlen: int, parts: int) -> tuple[range, ...]:
    """Cut 0..seqlen into contiguous parts whose lengths differ by at most one token."""
    return tuple(range(i * seqlen // parts, (i + 1) * seqlen // parts) for i in range(parts))


def contiguous(seqlen: int, cp: int) -> Sharding:
    """Rank r owns the r-th of cp contiguous chunks."""
    return Sharding(split(seqlen, cp), tuple((r,) for r in range(cp)))


def zigzag(seqlen: int, cp: int) -> Sharding:
    """Rank r owns chunks r and 2cp-1-r of 2cp, which balances a causal pattern.

    cp = 4:  0 1 2 3 3 2 1 0   (owner of each chunk)

    Source: head-tail sharding as in Llama 3 (arXiv:2407.21783, section 3.3.2).
    """
    return Sharding(split(seqlen, 2 * cp), tuple((r, 2 * cp - 1 - r) for r in range(cp)))


def stripe(seqlen: int, cp: int) -> Sharding:
    """Rank r owns tokens r, r + cp, r + 2cp, ...

    Source: Striped Attention (arXiv:2311.09431, section 3).
    """
    return Sharding(
        tuple(range(r, seqlen, cp) if r < seqlen else range(0) for r in range(cp)),
        tuple((r,) for r in range(cp)),
    )


def subdivided(coarse: Sharding, parts: int) -> Sharding:
    """Give each rank of a sharding to `parts` ranks: every chunk is cut into `parts` in order.

    Rank r of the coarse sharding becomes ranks r * parts .. r * parts + parts - 1 of the result;
    gathering those ranks' chunks in table order restores the coarse chunk in ascending order.
    """
    chunks: list[range] = []
    owned: list[list[int]] = [[] for _ in range(len(coarse.owned) * parts)]
    for rank, mine in enumerate(coarse.owned):
        for chunk in mine:
            whole = coarse.chunks[chunk]
            for part, cut in enumerate(split(len(whole), parts)):
                owned[rank * parts + part].append(len(chunks))
                chunks.append(whole[cut.start : cut.stop])
    return Sharding(tuple(chunks), tuple(tuple(o) for o in owned))


def cut_each(coarse: Sharding, parts: int) -> Sharding:
    """Cut every chunk of a sharding into `parts` in order; all of them stay with their owner.

    Chunk c becomes chunks c * parts .. c * parts + parts - 1.
    """
    chunks = [
        chunk[piece.start : piece.stop]
        for chunk in coarse.chunks
        for piece in split(len(chunk), parts)
    ]
    owned = [
        tuple(c * parts + part for c in mine for part in range(parts)) for mine in coarse.owned
    ]
    return Sharding(tuple(chunks), tuple(owned))


PLACEMENTS: Mapping[Placement, Callable[[int, int], Sharding]] = {
    Placement.CONTIGUOUS: contiguous,
    Placement.ZIGZAG: zigzag,
    Placement.STRIPE: stripe,
}
"""(seqlen, cp) -> sharding, by name: those that lengths alone decide; see `dealing`."""
