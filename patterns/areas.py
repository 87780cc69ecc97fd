"""Areas of many bands on a grid of chunks at once, in int64.

The same counting as `geometry.band_area`, for arrays: find which chunk meets which band on each
axis, join the two lists per band, count each (band, query chunk, key chunk) in closed form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from patterns.geometry import Band, Chunk

Ints = NDArray[np.int64]
NO_BOUND = 1 << 40  # beyond any difference of two positions
BAND_CELLS = 1 << 21  # bands x chunks looked at together: 2 MiB of bool
_TRIPLES = 1 << 15  # counted together: a few arrays of 256 KiB, so that they stay in cache


@dataclass(frozen=True, slots=True, eq=False)
class BandArrays:
    """The bands of a pattern as columns, each of shape (bands,); no bound = +-2**40.

    Equal if all numbers are.
    """

    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints
    lo: Ints
    hi: Ints

    @classmethod
    def of(cls, bands: Sequence[Band]) -> "BandArrays":
        """Return the columns of `bands`."""
        rows = [
            (
                *(band.q0, band.q1, band.k0, band.k1),
                -NO_BOUND if band.lo is None else band.lo,
                NO_BOUND if band.hi is None else band.hi,
            )
            for band in bands
        ]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 6).T.copy())

    def __len__(self) -> int:
        """Return the number of bands."""
        return len(self.q0)

    def __eq__(self, other: object) -> bool:
        """Compare all numbers."""
        return isinstance(other, BandArrays) and bool(
            np.array_equal(np.stack(self.columns), np.stack(other.columns))
        )

    def __hash__(self) -> int:
        """Hash all numbers."""
        return hash(np.stack(self.columns).tobytes())

    @property
    def columns(self) -> tuple[Ints, ...]:
        """All columns, in the order of the fields."""
        return self.q0, self.q1, self.k0, self.k1, self.lo, self.hi

    def part(self, first: int, last: int) -> "BandArrays":
        """Return the bands `first` up to `last`, without a copy."""
        return BandArrays(*(column[first:last] for column in self.columns))

    def meeting(self, q: Chunk, k: Chunk) -> Ints:
        """Return the indices of the bands whose rectangle overlaps the hulls of `q` and `k`."""
        rows = (self.q0 <= q[-1]) & (self.q1 > q[0])
        return np.flatnonzero(rows & (self.k0 <= k[-1]) & (self.k1 > k[0]))


@dataclass(frozen=True, slots=True)
class Hits:
    """Chunks cut to bands on one axis, sorted by band; columns of shape (hits,)."""

    band: Ints
    chunk: Ints
    first: Ints  # first position of the chunk inside the band
    count: Ints  # >= 1 positions
    step: Ints


def band_areas(bands: BandArrays, qs: Sequence[Chunk], ks: Sequence[Chunk]) -> Ints:
    """Return the exact area of all bands on every pair of chunks, `(len(qs), len(ks))`."""
    areas = np.zeros((len(qs), len(ks)), dtype=np.int64)
    batch = max(BAND_CELLS // max(len(qs) + len(ks), 1), 1)
    steps = {chunk.step for chunk in (*qs, *ks) if len(chunk) > 1}
    step = None if len(steps) > 1 else next(iter(steps), 1)
    for start in range(0, len(bands), batch):
        part = slice(start, start + batch)
        q = hits_of(bands.q0[part], bands.q1[part], qs, start)
        k = hits_of(bands.k0[part], bands.k1[part], ks, start)
        _add(areas, bands, q, k, step)
    return areas


def hits_of(start: Ints, stop: Ints, chunks: Sequence[Chunk], first_band: int) -> Hits:
    """Cut every chunk to every interval `[start, stop)` and keep what is not empty."""
    full = [index for index, chunk in enumerate(chunks) if chunk]
    ids = np.array(full, dtype=np.int64)
    head = np.array([chunks[i].start for i in full], dtype=np.int64)
    last = np.array([chunks[i][-1] for i in full], dtype=np.int64)
    step = np.array([chunks[i].step for i in full], dtype=np.int64)
    band, at = np.nonzero((start[:, None] <= last) & (stop[:, None] > head))
    head, last, step = head[at], last[at], step[at]
    first = head + step * np.maximum(-((head - start[band]) // step), 0)
    final = head + step * ((np.minimum(last, stop[band] - 1) - head) // step)
    keep = first <= final
    count = (final - first) // step + 1
    columns = (band + first_band, ids[at], first, count, step)
    return Hits(*(column[keep] for column in columns))


def _add(areas: Ints, bands: BandArrays, q: Hits, k: Hits, step: int | None) -> None:
    """Join `q` and `k` on the band and add every count to `areas`; `step` None = mixed steps."""
    begin = np.searchsorted(k.band, q.band, side="left")
    matches = np.searchsorted(k.band, q.band, side="right") - begin
    ends = np.cumsum(matches)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, np.arange(0, total, _TRIPLES), side="right")
    for low, high in pairwise([*dict.fromkeys(cuts.tolist()), len(ends)]):
        size = matches[low:high]
        qi = np.repeat(np.arange(low, high), size)
        skip = begin[low:high] - (np.cumsum(size) - size)
        ki = np.arange(len(qi)) + np.repeat(skip, size)
        count = _count(bands, q, k, qi=qi, ki=ki, step=step)
        np.add.at(areas.reshape(-1), q.chunk[qi] * areas.shape[1] + k.chunk[ki], count)


def _count(bands: BandArrays, q: Hits, k: Hits, *, qi: Ints, ki: Ints, step: int | None) -> Ints:
    """Return the pairs that each joined triple (rows `qi` of `q`, `ki` of `k`) allows."""
    lo, hi = bands.lo[q.band], bands.hi[q.band]
    n, m, key = q.count[qi], k.count[ki], k.first[ki]
    count = n * m
    used = q.band[qi[0]], q.band[qi[-1]] + 1
    for bound, sign in ((hi, 1), (lo - 1, -1)):
        edge = (bands.hi if sign > 0 else bands.lo)[slice(*used)]
        if bool(np.all(np.abs(edge) == NO_BOUND)):
            continue
        gap = (bound - q.first)[qi] + key  # q - k <= bound  <=>  q.step * i - k.step * j <= gap
        if step is None:
            below = _mixed_at_most(n, m, q.step[qi], k.step[ki], gap)
        else:
            below = _grid_at_most(n, m, gap if step == 1 else gap // step)
        count = below if sign > 0 else count - below
    return count


def _grid_at_most(n: Ints, m: Ints, difference: Ints) -> Ints:
    """Return the index pairs with `i - j <= difference` in each n x m grid.

    It is the sum of `clamp(z, 0, n)` over `difference < z <= difference + m`.
    """
    x = np.minimum(np.maximum(difference, -m), n - 1)
    y = x + m
    before = np.maximum(x, 0)
    after = np.minimum(y, n)
    whole: Ints = (after * (after + 1) - before * (before + 1)) // 2 + n * (y - after)
    return whole


def _mixed_at_most(n: Ints, m: Ints, q_step: Ints, k_step: Ints, gap: Ints) -> Ints:
    """As `geometry.pairs_at_most`, for arrays."""
    first = np.clip(-(gap // k_step), 0, m)
    last = np.minimum(np.maximum(-((gap - q_step * (n - 1)) // k_step), first), m)
    rising = _floor_sum(last - first, q_step, k_step, gap + k_step * first)
    whole: Ints = n * (m - last) + (last - first) + rising
    return whole


def _floor_sum(count: Ints, divisor: Ints, factor: Ints, offset: Ints) -> Ints:
    """As `geometry.floor_sum`, for arrays; a term that is done has count 0."""
    total = np.zeros_like(count)
    offset = np.where(count > 0, offset, 0)
    while bool(count.any()):
        divisor = np.maximum(divisor, 1)
        total += count * (count - 1) // 2 * (factor // divisor) + count * (offset // divisor)
        factor, offset = factor % divisor, offset % divisor
        top = factor * count + offset
        count, offset, divisor, factor = top // divisor, top % divisor, factor, divisor
    return total
