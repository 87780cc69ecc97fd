"""Block tables: a pattern as a small grid of EMPTY, FULL and CAUSAL cells.

Block i of P covers positions `floor(i * S / P)` up to `floor((i + 1) * S / P)`, so every length
works, also one shorter than the table (some blocks are then empty). CAUSAL means key position <=
query position in global positions, so it is defined in cells that are not square.

Source:
    UltraAttn (SC'25), `utils.Block_Type` and `search_algo/bsa_utils.py:create_bsa_block_table`
    of the authors' code: the cell codes, refinement ("complicate") and its inverse ("simplify").
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from patterns.areas import Ints
from patterns.geometry import Band
from patterns.pattern import Bools

Table = NDArray[np.int8]
EMPTY, FULL, CAUSAL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class TableMask:
    """The definition of a table's mask: look up the cell of a pair, then compare positions."""

    table: Table
    seqlen_q: int
    seqlen_kv: int

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        rows, columns = self.table.shape
        # position p lies in the last block that starts at or before p
        cell = self.table[
            ((q + 1) * rows - 1) // self.seqlen_q, ((k + 1) * columns - 1) // self.seqlen_kv
        ]
        return np.asarray((cell == FULL) | ((cell == CAUSAL) & (k <= q)))


def refine(table: Table, factor: int) -> Table:
    """Split every cell into `factor` x `factor` cells of the same mask.

    EMPTY and FULL repeat; CAUSAL gives FULL below its diagonal, CAUSAL on it, EMPTY above.

    Source: UltraAttn (SC'25), the authors' code, "complicate".
    """
    if factor < 1:
        raise ValueError(f"refine: factor ({factor}) must be >= 1; 1 leaves the table as it is")
    triangle = np.tril(np.ones((factor, factor), dtype=np.int8)) + np.eye(factor, dtype=np.int8)
    big = np.repeat(np.repeat(table, factor, axis=0), factor, axis=1)
    return np.where(big == CAUSAL, np.tile(triangle, table.shape), big).astype(np.int8)


def simplify(table: Table) -> Table:
    """Undo every refinement: the smallest table that refines to `table`.

    Source: UltraAttn (SC'25), the authors' code, "simplify" over the prime factors of the size.
    """
    factor = 2
    while factor <= gcd(*table.shape):
        coarse = table[::factor, ::factor]  # the first cell of a refined cell has its type
        whole = all(size % factor == 0 for size in table.shape)
        if whole and np.array_equal(refine(coarse, factor), table):
            table = coarse
        else:
            factor += 1
    return table.copy()


def table_bands(table: Table, seqlen_q: int, seqlen_kv: int) -> tuple[Band, ...]:
    """Lower a table to disjoint bands: few rectangles, and one band for each cut CAUSAL cell.

    FULL cells (also CAUSAL cells that the diagonal does not cut) merge along their row, then
    equal column spans of adjacent rows merge.
    """
    rows, q_edge = _edges(table.shape[0], seqlen_q)
    columns, k_edge = _edges(table.shape[1], seqlen_kv)
    q0, q1, k0, k1 = q_edge[:-1, None], q_edge[1:, None], k_edge[None, :-1], k_edge[None, 1:]
    cells = table[np.ix_(rows, columns)]
    causal = cells == CAUSAL
    full = (cells == FULL) | (causal & (q0 >= k1 - 1))
    cut = causal & ~full & (q1 > k0)
    q_at, k_at = q_edge.tolist(), k_edge.tolist()
    diagonal = [
        Band(q0=q_at[i], q1=q_at[i + 1], k0=k_at[j], k1=k_at[j + 1], lo=0)
        for i, j in np.argwhere(cut).tolist()
    ]
    bands = [*_rectangles(full, q_at, k_at), *diagonal]
    return tuple(sorted(bands, key=lambda band: (band.q0, band.k0)))


def _edges(blocks: int, seqlen: int) -> tuple[Ints, Ints]:
    """Return the indices of the blocks that hold positions, and the edges between these."""
    edge = np.arange(blocks + 1, dtype=np.int64) * seqlen // blocks
    kept = np.flatnonzero(np.diff(edge))
    return kept, np.append(edge[kept], seqlen)


def _rectangles(full: Bools, q_edge: list[int], k_edge: list[int]) -> list[Band]:
    """Merge the True cells into rectangles: runs along a row, then equal runs down the rows."""
    bands = []
    since: dict[tuple[int, int], int] = {}  # open run of columns -> its first row
    for row in range(len(full) + 1):
        runs = _runs(full[row]) if row < len(full) else []
        for run in [run for run in since if run not in runs]:
            top = q_edge[since.pop(run)]
            bands.append(Band(q0=top, q1=q_edge[row], k0=k_edge[run[0]], k1=k_edge[run[1]]))
        for run in runs:
            since.setdefault(run, row)
    return bands


def _runs(line: Bools) -> list[tuple[int, int]]:
    """Return the maximal runs `[start, stop)` of True."""
    change = np.flatnonzero(np.diff(line.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(change[::2], change[1::2], strict=True))
