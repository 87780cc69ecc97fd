"""Packed documents as the segments that varlen kernels take: full rectangles and causal squares.

A band between two runs of positions is a rectangle whose upper right corner may be cut off along a
diagonal. It parts into at most three pieces, of which a row is in at most one of each kind, and no
piece depends on how a kernel aligns a causal mask of two lengths::

    F F F C . . .      C: causal square     F: full, beside it and below
    F F F C C . .
    F F F C C C .
    F F F F F F F
"""

from typing import NamedTuple

import numpy as np

from harness.plan.masks import Mask
from patterns.areas import NO_BOUND, Ints


class Segments(NamedTuple):
    """Pieces of one kind: half-open offsets into rows and columns, each of shape (pieces,)."""

    r0: Ints
    r1: Ints
    c0: Ints
    c1: Ints


class Varlen(NamedTuple):
    """A packed mask: no row is in two pieces of one kind."""

    causal: Segments
    full: Segments


def varlen_of(mask: Mask) -> Varlen | None:
    """Part a PACKED mask into segments; None where some band is no such shape.

    That is where a band has an upper bound (a window), or rows and columns have other steps.
    """
    bands = mask.bands
    assert bands is not None  # it is PACKED
    if mask.q.step != mask.k.step or (bands.hi < NO_BOUND).any():
        return None
    step = mask.q.step
    r0, r1 = _offsets(bands.q0, mask.q), _offsets(bands.q1, mask.q)
    c0, c1 = _offsets(bands.k0, mask.k), _offsets(bands.k1, mask.k)
    # row i sees columns up to i + ahead; a band without a bound sees all of its own
    ahead = np.where(
        bands.lo <= -NO_BOUND, len(mask.k) + 1, (mask.q.start - mask.k.start - bands.lo) // step
    )
    r0 = np.maximum(r0, c0 - ahead)  # rows before see nothing
    some = (r0 < r1) & (c0 < c1)
    r0, r1, c0, c1, ahead = (each[some] for each in (r0, r1, c0, c1, ahead))
    whole = np.clip(c1 - 1 - ahead, r0, r1)  # from this row on all columns are seen
    corner = r0 + ahead  # column up to which the first row sees
    return Varlen(
        _kept(r0, whole, corner, corner + whole - r0),
        _joined(_kept(r0, whole, c0, corner), _kept(whole, r1, c0, c1)),
    )


def _offsets(at: Ints, run: range) -> Ints:
    """The first offset into a run from which positions are at least these."""
    return np.clip(-((run.start - at) // run.step), 0, len(run))


def _kept(r0: Ints, r1: Ints, c0: Ints, c1: Ints) -> Segments:
    some = (r0 < r1) & (c0 < c1)
    return Segments(r0[some], r1[some], c0[some], c1[some])


def _joined(one: Segments, other: Segments) -> Segments:
    return Segments(*(np.concatenate(pair) for pair in zip(one, other, strict=True)))
