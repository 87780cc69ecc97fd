"""How a kernel call whose mask no kernel has is cut into blocks of rows, many of them at once.

In a BAND or PACKED mask each query meets one run of keys. Rows are taken in blocks; a block meets
the keys from the first to the last that one of its rows meets::

        k0      common          k1
    row  ######################.        common: keys that all rows of the block meet; a long run
    row  .######################        of them needs no mask. The others are the edges.

Blocks that are about as wide are attended together as a batch, so that neither the number of
kernel calls nor the work grows with the number of documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.plan.masks import Mask, MaskKind
from patterns.areas import BandArrays, Ints

_SHORT_ROWS, _LONG_ROWS = 32, 128
_LONG = 256
"""Rows that meet so many keys on average are taken in long blocks: less to copy, more to mask."""
_STEP = 64
"""Blocks are as wide if their numbers of keys, in multiples of this, are equal."""
_MOST_KEYS = 1 << 14
"""Keys copied together: 16 MiB of k at 8 heads of 64 in bfloat16, up to twice as many where blocks
of one width have their common keys at other places."""


def spans(mask: Mask) -> tuple[Ints, Ints]:
    """Return the half-open run of columns that each row of a BAND or PACKED mask meets.

    Returns:
        First and last column (exclusive), each of shape (rows,); 0 and 0 for a row without keys.
    """
    at = mask.q.start + mask.q.step * np.arange(len(mask.q), dtype=np.int64)
    if mask.bands is not None:
        low, high = _keys_in(mask.bands, at)
    else:
        low = np.full_like(at, mask.k.start) if mask.hi is None else at - mask.hi
        high = np.full_like(at, mask.k[-1]) if mask.lo is None else at - mask.lo
    first = np.maximum(-((mask.k.start - low) // mask.k.step), 0)
    last = np.minimum((high - mask.k.start) // mask.k.step + 1, len(mask.k))
    met = first < last
    return np.where(met, first, 0), np.where(met, last, 0)


def _keys_in(bands: BandArrays, at: Ints) -> tuple[Ints, Ints]:
    """Least and greatest key position that the band of each query position allows."""
    band = np.searchsorted(bands.q0, at, side="right") - 1
    inside = (band >= 0) & (at < bands.q1[band])
    low = np.maximum(bands.k0[band], at - bands.hi[band])
    high = np.minimum(bands.k1[band] - 1, at - bands.lo[band])
    return low, np.where(inside, high, low - 1)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of rows, as columns of shape (blocks,), and the runs of their rows, (blocks, rows)."""

    first: Ints
    last: Ints
    k0: Ints
    k1: Ints
    common: Ints  # first column that all rows meet
    shared: Ints  # how many those are; 0 if they are not worth a call of their own

    @property
    def width(self) -> Ints:
        return self.k1 - self.k0


Columns = tuple[tuple[Ints, int], ...]
"""Runs of columns side by side: the first of each block, and how many."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks that are attended together.

    Attributes:
        rows: First row of each block; all have as many as `seen`, those beyond the last are to be
            left out.
        edges: The columns of `seen`; a run may reach beyond the first or the last column, unseen.
        seen: Which row meets which of these columns, (blocks, rows, columns); one block if all are
            alike.
        common: One more run, which every row meets; None without one.
    """

    rows: Ints
    edges: Columns
    seen: NDArray[np.bool_]
    common: tuple[Ints, int] | None


def batches(mask: Mask) -> Iterator[Batch]:
    """Cut a BAND or PACKED mask into batches that together meet every pair once.

    Rows that meet no key are in none, unless others of their block do.
    """
    blocks = _blocks(mask)
    kinds = np.stack((blocks.shared > 0, -(-blocks.width // _STEP)), axis=1)
    for kind in np.unique(kinds[blocks.width > 0], axis=0):
        alike = np.flatnonzero((kinds == kind).all(axis=1))
        together = max(1, _MOST_KEYS // int(blocks.width[alike].max()))
        for start in range(0, len(alike), together):
            yield _batch(blocks, alike[start : start + together])


def _blocks(mask: Mask) -> _Blocks:
    first, last = spans(mask)
    met = last > first
    mean = int((last - first).sum()) // max(1, int(met.sum()))
    size = _LONG_ROWS if mean >= _LONG else _SHORT_ROWS
    beyond = -len(first) % size
    first, last = (
        np.pad(each, (0, beyond), mode="edge").reshape(-1, size) for each in (first, last)
    )
    met = last > first
    k0 = np.where(met, first, len(mask.k)).min(axis=1)
    k1 = last.max(axis=1)
    k0 = np.minimum(k0, k1)
    common = first.max(axis=1)
    shared = np.maximum(last.min(axis=1) - common, 0)
    worth = (shared >= _STEP) & (2 * shared >= k1 - k0)
    return _Blocks(first, last, k0, k1, common, np.where(worth, shared, 0))


def _batch(blocks: _Blocks, some: Ints) -> Batch:
    k0, first, last = blocks.k0[some], blocks.first[some], blocks.last[some]
    size, width = first.shape[1], int(blocks.width[some].max())
    shared = int(blocks.shared[some].min())
    edges: Columns = ((k0, width),)
    common = None
    if shared:
        # All blocks get equally many columns: where fewer lie left of the shared run than in other
        # blocks, the left run overlaps the shared one and is masked there.
        left = int((blocks.common[some] - k0).max())
        after = blocks.common[some] + shared
        edges = ((blocks.common[some] - left, left), (after, int((blocks.k1[some] - after).max())))
        common = (blocks.common[some], shared)
    columns = np.concatenate([start[:, None] + np.arange(count) for start, count in edges], axis=1)
    seen = (first[:, :, None] <= columns[:, None]) & (columns[:, None] < last[:, :, None])
    if bool((seen == seen[:1]).all()):
        seen = seen[:1]
    return Batch(some * size, tuple((start, n) for start, n in edges if n), seen, common)


def masked_cells(mask: Mask) -> int:
    """Return how many pairs a kernel works on for a call, those that its mask hides included."""
    if mask.kind not in (MaskKind.BAND, MaskKind.PACKED):
        return len(mask.q) * len(mask.k)
    blocks = _blocks(mask)
    rows: int = blocks.first.shape[1]
    return int(blocks.width.sum()) * rows


def parts(mask: Mask) -> int:
    """Return how many rounded results are added up in a row or a column of a call, at most."""
    if mask.kind not in (MaskKind.BAND, MaskKind.PACKED):
        return 1
    blocks = _blocks(mask)
    used = blocks.width > 0
    if not used.any():
        return 1
    starts, ends = np.sort(blocks.k0[used]), np.sort(blocks.k1[used])
    begun = np.arange(1, len(starts) + 1)
    ended = np.searchsorted(ends, starts, side="right")
    return max(int((begun - ended).max()), 1 + bool((blocks.shared > 0).any()))
