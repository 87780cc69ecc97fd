"""Runs of keys that chunks of queries attend, and runs of queries that attend chunks of keys.

A chunk meets a band in one run of positions, from the least that its first position allows to the
greatest that its last one does. Positions of such a run that the chunk does not attend exist only
where its step leaves them out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from patterns.areas import BAND_CELLS, Hits, Ints, hits_of
from patterns.geometry import Chunk
from patterns.pattern import Pattern


class Runs(NamedTuple):
    """Half-open runs of positions, columns of shape (runs,).

    Attributes:
        chunk: Index of the chunk that meets the run.
        start: First position.
        stop: Last position, exclusive.
    """

    chunk: Ints
    start: Ints
    stop: Ints


def attended_keys(pattern: Pattern, queries: Sequence[Chunk]) -> Runs:
    """Return the runs of keys that each chunk of queries attends, one for each band it meets."""
    bands = pattern.arrays
    part = _hits(bands.q0, bands.q1, queries)
    last = part.first + part.step * (part.count - 1)
    start = np.maximum(bands.k0[part.band], part.first - bands.hi[part.band])
    stop = np.minimum(bands.k1[part.band], last - bands.lo[part.band] + 1)
    return _solid(part.chunk, start, stop)


def attending_queries(pattern: Pattern, keys: Sequence[Chunk]) -> Runs:
    """Return the runs of queries that attend each chunk of keys, one for each band it meets."""
    bands = pattern.arrays
    part = _hits(bands.k0, bands.k1, keys)
    last = part.first + part.step * (part.count - 1)
    start = np.maximum(bands.q0[part.band], part.first + bands.lo[part.band])
    stop = np.minimum(bands.q1[part.band], last + bands.hi[part.band] + 1)
    return _solid(part.chunk, start, stop)


def _hits(start: Ints, stop: Ints, chunks: Sequence[Chunk]) -> Hits:
    """Cut chunks to all bands, some bands at a time: the table of both may be large."""
    batch = max(BAND_CELLS // max(len(chunks), 1), 1)
    parts = [
        hits_of(start[at : at + batch], stop[at : at + batch], chunks, at)
        for at in range(0, max(len(start), 1), batch)
    ]
    return Hits(*(np.concatenate(columns) for columns in zip(*map(_columns, parts), strict=True)))


def _columns(part: Hits) -> tuple[Ints, ...]:
    return part.band, part.chunk, part.first, part.count, part.step


def _solid(chunk: Ints, start: Ints, stop: Ints) -> Runs:
    met = start < stop
    return Runs(chunk[met], start[met], stop[met])


def merged(runs: Runs, party: Ints) -> Runs:
    """Join the runs of each party's chunks that overlap or touch.

    Args:
        runs: As the functions above return them.
        party: Of each chunk.

    Returns:
        Disjoint runs in ascending order, party by party; `chunk` is the party.
    """
    if not len(runs.start):
        return runs
    apart = 2 * (int(runs.stop.max()) + 1)  # so that runs of two parties never touch
    of = party[runs.chunk]
    start, stop = runs.start + apart * of, runs.stop + apart * of
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    begins = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    ends = np.concatenate((begins[1:], [len(start)])) - 1
    of = of[order][begins]
    return Runs(of, start[begins] - apart * of, reach[ends] - apart * of)
