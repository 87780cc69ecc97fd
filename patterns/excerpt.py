"""A part of a pattern as a pattern of its own: some rows and columns, put side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from patterns.areas import Ints
from patterns.geometry import Band, Chunk
from patterns.pattern import Bools, Pattern, Predicate


@dataclass(frozen=True)
class Lookup:
    """The definition of an excerpt: ask the whole pattern about the positions that it took."""

    whole: Predicate
    rows: tuple[Chunk, ...]
    columns: tuple[Chunk, ...]

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        return self.whole(_positions(self.rows)[q], _positions(self.columns)[k])


def _positions(runs: Sequence[Chunk]) -> Ints:
    return np.concatenate([np.array(run, dtype=np.int64) for run in runs])


def excerpt(pattern: Pattern, rows: Sequence[Chunk], columns: Sequence[Chunk]) -> Pattern:
    """Return the part of a pattern between runs of queries and runs of keys.

    Args:
        pattern: The whole.
        rows: Runs of query positions, each of step 1, in their new order.
        columns: Runs of key positions, likewise.

    Raises:
        ValueError: There is no query or no key, or a run has another step.
    """
    for name, runs in (("rows", rows), ("columns", columns)):
        if not any(map(len, runs)) or any(run.step != 1 for run in runs):
            raise ValueError(
                f"excerpt: {name} ({list(runs)}) must be runs of step 1, not all empty"
            )
    bands = [
        _moved(band, q - row.start, k - column.start)
        for q, row in _placed(rows)
        for k, column in _placed(columns)
        for band in pattern.regions(row, column)
    ]
    spelled = (",".join(f"{run.start}-{run.stop}" for run in runs) for runs in (rows, columns))
    return Pattern(
        text=f"{pattern.text} at {' x '.join(spelled)}",
        seqlen_q=sum(map(len, rows)),
        seqlen_kv=sum(map(len, columns)),
        bands=tuple(bands),
        predicate=Lookup(pattern.predicate, tuple(rows), tuple(columns)),
    )


def _placed(runs: Sequence[Chunk]) -> list[tuple[int, Chunk]]:
    """Return (new first position, run) of those that are not empty."""
    starts = np.cumsum([0, *map(len, runs)]).tolist()
    return [(start, run) for start, run in zip(starts, runs, strict=False) if run]


def _moved(band: Band, q: int, k: int) -> Band:
    return replace(
        band,
        q0=band.q0 + q,
        q1=band.q1 + q,
        k0=band.k0 + k,
        k1=band.k1 + k,
        lo=None if band.lo is None else band.lo + q - k,
        hi=None if band.hi is None else band.hi + q - k,
    )
