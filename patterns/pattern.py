"""A pattern: which query positions attend which key positions, in the original token order."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from patterns.areas import BandArrays, Ints, band_areas
from patterns.geometry import (
    Band,
    Block,
    Chunk,
    Relation,
    band_area,
    lead,
    shrink,
    staircase_area,
)

Bools = NDArray[np.bool_]
Predicate = Callable[[Ints, Ints], Bools]  # (query positions, key positions), broadcast together
LONGEST = 1 << 30  # tokens; areas then fit in int64 with room to spare
_SHADES = "·░▒▓█"
_FEW = 64  # bands that a python loop counts faster than numpy


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """A mask of `seqlen_q` x `seqlen_kv` positions as disjoint bands.

    Patterns are equal when text and content are: a text alone stands for no mask, because a table's
    file may change and anybody may make a pattern. `bands` answer every question in closed form;
    `predicate` is the definition in other words, kept apart for the numerical oracle.

    Attributes:
        text: Canonical spelling; `make_pattern` reads it back.
        seqlen_q: Query tokens, >= 1.
        seqlen_kv: Key tokens, >= 1.
        bands: Disjoint, in a deterministic order.
        predicate: True where a query position may attend a key position.
        remap: Block order that makes the pattern local: entry p = block that moves to place p.
    """

    text: str
    seqlen_q: int
    seqlen_kv: int
    bands: tuple[Band, ...] = field(repr=False)
    predicate: Predicate = field(repr=False)
    remap: tuple[int, ...] | None = field(default=None, repr=False)

    def __eq__(self, other: object) -> bool:
        """Compare text and content."""
        if not isinstance(other, Pattern):
            return NotImplemented
        return (self.text, self.content) == (other.text, other.content)

    def __hash__(self) -> int:
        """Hash by text and content."""
        return hash((self.text, self.content))

    @cached_property
    def content(self) -> str:
        """SHA-256 of lengths, bands and remap, 32 hex digits; equal in every process."""
        lengths = (int(self.seqlen_q), int(self.seqlen_kv))
        order = None if self.remap is None else tuple(map(int, self.remap))
        digest = hashlib.sha256(repr((lengths, order)).encode())
        for column in fields(self.arrays):
            digest.update(getattr(self.arrays, column.name).astype("<i8").tobytes())
        return digest.hexdigest()[:32]

    @property
    def is_staircase(self) -> bool:
        """Whether it is one band that later keys alone are cut from, as causal patterns are."""
        if len(self.bands) != 1:
            return False
        (band,) = self.bands
        whole = (band.q0, band.q1, band.k0, band.k1) == (0, self.seqlen_q, 0, self.seqlen_kv)
        return whole and band.lo is not None and band.hi is None

    @cached_property
    def arrays(self) -> BandArrays:
        """The bands as columns of numbers."""
        return BandArrays.of(self.bands)

    @cached_property
    def descends(self) -> bool:
        """Whether all bands follow one another down and to the right, as packed documents do.

        They then share no query position and no key position.
        """
        bands = self.arrays
        follow = (bands.q0[1:] >= bands.q1[:-1]) & (bands.k0[1:] >= bands.k1[:-1])
        return bool(follow.all())

    @cached_property
    def total_area(self) -> int:
        """Number of allowed (query, key) pairs of the whole pattern."""
        return self.area(range(self.seqlen_q), range(self.seqlen_kv))

    def area(self, q: Chunk, k: Chunk) -> int:
        """Return the number of allowed pairs of two chunks, exactly."""
        self._check((q,), (k,))
        bands = self._meeting(q, k)
        if len(bands) <= _FEW:
            return sum(band_area(band, q, k) for band in bands)
        return int(band_areas(self.arrays, (q,), (k,))[0, 0])

    def areas(self, qs: Sequence[Chunk], ks: Sequence[Chunk]) -> Ints:
        """Return the number of allowed pairs of every pair of chunks, `(len(qs), len(ks))`."""
        self._check(qs, ks)
        return band_areas(self.arrays, qs, ks)

    def relation(self, q: Chunk, k: Chunk) -> Block:
        """Return the kind of mask of two chunks: FULL, EMPTY, CAUSAL with its shift, or PARTIAL.

        A staircase is known by its area and by no allowed pair lying above it.
        """
        area = self.area(q, k)
        if area == 0:
            return Block(Relation.EMPTY)
        n, m = len(q), len(k)
        if area == n * m:
            return Block(Relation.FULL)
        shifts = range(1 - n, m - 1)
        shift = shifts[bisect_left(shifts, area, key=lambda s: staircase_area(n, m, s))]
        if staircase_area(n, m, shift) != area:
            return Block(Relation.PARTIAL)
        bands = self._meeting(q, k)
        if any(band_area(band, q, k) and lead(band, q, k) > shift for band in bands):
            return Block(Relation.PARTIAL)
        return Block(Relation.CAUSAL, shift)

    def regions(self, q: Chunk, k: Chunk) -> tuple[Band, ...]:
        """Return the bands that meet two chunks, each cut to its smallest rectangle in them.

        A bound that cuts nothing there is None. Rectangles start and end at positions of the
        chunks. Sorted by (q0, k0).
        """
        return self.regions_of(self._meeting(q, k), q, k)

    def regions_of(self, bands: Sequence[Band], q: Chunk, k: Chunk) -> tuple[Band, ...]:
        """As `regions`, of some of the bands."""
        self._check((q,), (k,))
        met = [shrink(band, q, k) for band in bands if band_area(band, q, k)]
        return tuple(sorted(met, key=lambda band: (band.q0, band.k0, band.q1, band.k1)))

    def allowed(self, q_positions: Ints, k_positions: Ints) -> Bools:
        """Return the dense mask, `(len(q_positions), len(k_positions))`, from the definition.

        For the oracle: the bands are not consulted.
        """
        q = np.asarray(q_positions, dtype=np.int64)
        k = np.asarray(k_positions, dtype=np.int64)
        for name, at, end in (("query", q, self.seqlen_q), ("key", k, self.seqlen_kv)):
            if at.size and (at.min() < 0 or at.max() >= end):
                raise ValueError(
                    f"{self._name}: {name} positions {at.min()}..{at.max()} must lie in [0, {end})"
                )
        mask = self.predicate(q[:, None], k[None, :])
        return np.broadcast_to(mask, (len(q), len(k))).copy()

    def picture(self, width: int = 32) -> str:
        """Return the pattern as shades, queries down and keys across, at most `width` columns."""
        if width < 1:
            raise ValueError(f"picture: width ({width}) must be >= 1; try 32")
        columns = min(width, self.seqlen_kv)
        rows = min(max(columns // 2, 1), self.seqlen_q)
        qs, ks = _even(self.seqlen_q, rows), _even(self.seqlen_kv, columns)
        areas = self.areas(qs, ks).tolist()
        return "\n".join(
            "".join(_shade(area, len(q) * len(k)) for area, k in zip(line, ks, strict=True))
            for line, q in zip(areas, qs, strict=True)
        )

    @property
    def _name(self) -> str:
        return self.text if len(self.text) <= 60 else f"{self.text[:57]}..."

    def _meeting(self, q: Chunk, k: Chunk) -> list[Band]:
        if not q or not k:
            return []
        if len(self.bands) == 1:
            return list(self.bands)
        return [self.bands[index] for index in self.arrays.meeting(q, k).tolist()]

    def _check(self, qs: Sequence[Chunk], ks: Sequence[Chunk]) -> None:
        for name, chunks, end in (("query", qs, self.seqlen_q), ("key", ks, self.seqlen_kv)):
            for chunk in chunks:
                if chunk.step < 1 or (chunk and (chunk[0] < 0 or chunk[-1] >= end)):
                    raise ValueError(
                        f"{self._name}: {name} chunk {chunk} must lie in [0, {end}) and have step "
                        ">= 1; reverse it or cut it to the sequence"
                    )


def _even(length: int, parts: int) -> list[range]:
    return [range(i * length // parts, (i + 1) * length // parts) for i in range(parts)]


def _shade(area: int, cells: int) -> str:
    if area in (0, cells):
        return _SHADES[0 if area == 0 else -1]
    return _SHADES[1 + area * 3 // cells]
