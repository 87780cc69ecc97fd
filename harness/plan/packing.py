"""Many packed documents as one kernel call.

A call per document costs more to launch than to compute where documents are short, and to plan and
prove it for each of many tiles grows with documents x tiles. So of a pattern whose bands follow one
another down and to the right, those that are small between two runs of positions are packed::

    #            #: small, packed into one call
    ##
      OOOO       O: large, a call of its own
      OOOO
          #      #: packed into the next
           #
"""

from typing import NamedTuple

import numpy as np

from patterns.areas import NO_BOUND, BandArrays, Ints
from patterns.geometry import Band
from patterns.pattern import Pattern

SMALL = 128
"""Largest number of rows and of columns of a band that is always packed, if others are near."""
MOST_ALONE = 8
"""So many bands between two runs have calls of their own, the largest; others are packed, unless
they have an upper bound, as those of windows do."""


class Pack(NamedTuple):
    """Bands that one call takes: half-open rows and columns of the two runs that hold them."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    bands: BandArrays


def packed(pattern: Pattern, q: range, k: range) -> tuple[list[Pack], tuple[Band, ...]]:
    """Part the bands that meet two runs of positions into packs and those that stay alone.

    Returns:
        The packs, and the other bands as `Pattern.regions` gives them; each allows some pair.
    """
    if len(pattern.bands) == 1 or not pattern.descends:
        return [], pattern.regions(q, k)
    bands = pattern.arrays
    met = bands.meeting(q, k)
    r0, r1, c0, c1 = _inside(bands, met, q, k)
    last_q, first_k = q.start + q.step * (r1 - 1), k.start + k.step * c0
    some = (r0 < r1) & (c0 < c1) & (last_q - first_k >= bands.lo[met])
    met, r0, r1, c0, c1 = (each[some] for each in (met, r0, r1, c0, c1))
    size = np.maximum(r1 - r0, c1 - c0)
    largest = np.sort(size)[::-1]
    small = size <= max(SMALL, int(largest[MOST_ALONE]) if len(size) > MOST_ALONE else 0)
    small &= bands.hi[met] == NO_BOUND
    goes_on = np.zeros(len(met), dtype=bool)
    goes_on[1:] = small[1:] & small[:-1]
    starts = np.flatnonzero(~goes_on)
    ends = np.append(starts[1:], len(met))[: len(starts)]
    packs: list[Pack] = []
    alone: list[Band] = []
    for first, last in zip(starts.tolist(), ends.tolist(), strict=True):
        if last - first == 1:
            alone.append(pattern.bands[met[first]])
            continue
        part = bands.part(int(met[first]), int(met[last - 1]) + 1)
        rows, cols = (int(r0[first]), int(r1[last - 1])), (int(c0[first]), int(c1[last - 1]))
        packs.append(Pack(rows, cols, part))
    return packs, pattern.regions_of(alone, q, k)


def _inside(bands: BandArrays, met: Ints, q: range, k: range) -> tuple[Ints, Ints, Ints, Ints]:
    """Rows and columns of bands as half-open offsets into two runs."""

    def offset(at: Ints, run: range) -> Ints:
        return np.clip(-((run.start - at) // run.step), 0, len(run))

    return (
        offset(bands.q0[met], q),
        offset(bands.q1[met], q),
        offset(bands.k0[met], k),
        offset(bands.k1[met], k),
    )
