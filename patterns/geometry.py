"""Bands of allowed (query, key) pairs, and their exact areas on arithmetic progressions.

A chunk is a python `range` of token positions with step >= 1. A band is a rectangle of positions
cut by two diagonals. Every pattern is a union of disjoint bands, so areas add up.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

import numpy as np

Chunk = range  # token positions start, start + step, ...; step >= 1, in original token order


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The pairs with `q0 <= q < q1`, `k0 <= k < k1` and `lo <= q - k <= hi` (None = unbounded).

    All six numbers are token positions (or differences of them) in the original token order.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int | None = None
    hi: int | None = None

    def __post_init__(self) -> None:
        """Refuse a rectangle without positions and bounds without differences."""
        if not (0 <= self.q0 < self.q1 and 0 <= self.k0 < self.k1):
            raise ValueError(
                f"band: q [{self.q0}, {self.q1}) x k [{self.k0}, {self.k1}) must hold at least one "
                "position >= 0 on each axis; leave empty bands out"
            )
        if self.lo is not None and self.hi is not None and self.lo > self.hi:
            raise ValueError(
                f"band: lo ({self.lo}) must be <= hi ({self.hi}); leave empty bands out"
            )


class Relation(StrEnum):
    """Relation of a chunk of queries to a chunk of keys under a pattern."""

    FULL = "full"
    CAUSAL = "causal"
    EMPTY = "empty"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Block:
    """A relation of two chunks; CAUSAL allows key index j for query index i iff `j <= i + shift`.

    Indices count inside the two chunks, from 0. `shift` is 0 for the other relations.
    """

    relation: Relation
    shift: int = 0


def clip(chunk: Chunk, start: int, stop: int) -> Chunk:
    """Return the positions of `chunk` that lie in `[start, stop)`, as a chunk."""
    first = max(-((chunk.start - start) // chunk.step), 0)
    last = max(-((chunk.start - stop) // chunk.step), first)
    return chunk[first:last]


def floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """Return the sum of `(factor * i + offset) // divisor` over `0 <= i < count`.

    Euclid's algorithm on the lattice points under a line: O(log divisor).

    Args:
        count: Number of terms, >= 0.
        divisor: >= 1.
        factor: >= 0.
        offset: >= 0.

    Source:
        Graham, Knuth, Patashnik, Concrete Mathematics, section 3.5 (floor and ceiling sums).
    """
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (factor // divisor) + count * (offset // divisor)
        factor, offset = factor % divisor, offset % divisor
        top = factor * count + offset
        count, offset, divisor, factor = top // divisor, top % divisor, factor, divisor
    return total


def pairs_at_most(q: Chunk, k: Chunk, difference: int) -> int:
    """Return the number of pairs with `q - k <= difference`, both chunks not empty.

    For key index j the count of queries is `(gap + k.step * j) // q.step + 1`, clamped to
    `[0, len(q)]`; it grows with j, so the clamps hold before `first` and from `last` on.
    """
    n, m = len(q), len(k)
    gap = difference - q.start + k.start
    first = min(max(-(gap // k.step), 0), m)
    last = min(max(-((gap - q.step * (n - 1)) // k.step), first), m)
    rising = floor_sum(last - first, q.step, k.step, gap + k.step * first)
    return n * (m - last) + (last - first) + rising


def band_area(band: Band, q: Chunk, k: Chunk) -> int:
    """Return the number of pairs of `q` x `k` that `band` allows, exactly, in O(log step)."""
    q, k = clip(q, band.q0, band.q1), clip(k, band.k0, band.k1)
    if not q or not k:
        return 0
    upper = len(q) * len(k) if band.hi is None else pairs_at_most(q, k, band.hi)
    return upper - (0 if band.lo is None else pairs_at_most(q, k, band.lo - 1))


def staircase_area(queries: int, keys: int, shift: int) -> int:
    """Return the number of index pairs with `j <= i + shift` in a `queries` x `keys` grid."""
    return pairs_at_most(range(keys), range(queries), shift)


def lead(band: Band, q: Chunk, k: Chunk) -> int:
    """Return the largest `j - i` (chunk indices) over the pairs that `band` allows.

    The band must meet `q` x `k`. Closed form for equal steps, one pass over the queries otherwise.
    """
    inner_q, inner_k = clip(q, band.q0, band.q1), clip(k, band.k0, band.k1)
    i0, j1 = q.index(inner_q[0]), k.index(inner_k[-1])
    if q.step == k.step:
        corner = j1 - i0
        if band.lo is None:
            return corner
        return min(corner, (q.start - k.start - band.lo) // k.step)
    rows = np.arange(len(inner_q), dtype=np.int64)
    position = inner_q.start + inner_q.step * rows
    top = np.full_like(rows, j1)
    if band.lo is not None:
        top = np.minimum(top, (position - band.lo - k.start) // k.step)
    bottom = np.full_like(rows, k.index(inner_k[0]))
    if band.hi is not None:
        bottom = np.maximum(bottom, -((k.start - position + band.hi) // k.step))
    met = top >= bottom
    return int((top - rows - i0)[met].max())


def shrink(band: Band, q: Chunk, k: Chunk) -> Band:
    """Return `band` inside `q` x `k`: its smallest rectangle, unbounded where a bound cuts nothing.

    The band must meet `q` x `k`. The result allows the same pairs of `q` x `k` as `band`.
    """
    lo = -inf if band.lo is None else band.lo
    hi = inf if band.hi is None else band.hi
    box = (band.q0, band.q1, band.k0, band.k1)
    while True:
        q, k = clip(q, box[0], box[1]), clip(k, box[2], box[3])
        rect = (q[0], q[-1] + 1, k[0], k[-1] + 1)
        least, most = q[0] - k[-1], q[-1] - k[0]
        tighter = (
            rect[0] if band.lo is None else max(rect[0], k[0] + band.lo),
            rect[1] if band.hi is None else min(rect[1], k[-1] + band.hi + 1),
            rect[2] if band.hi is None else max(rect[2], q[0] - band.hi),
            rect[3] if band.lo is None else min(rect[3], q[-1] - band.lo + 1),
        )
        if tighter == rect:
            return Band(
                q0=rect[0],
                q1=rect[1],
                k0=rect[2],
                k1=rect[3],
                lo=band.lo if least < lo else None,
                hi=band.hi if most > hi else None,
            )
        box = tighter
