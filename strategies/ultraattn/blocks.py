"""From a pattern to a grid of blocks with whole-numbered work, and how fine the grid should be.

A FULL block counts 2, a CAUSAL one 1, so every number is whole. Where blocks are uneven or cut in
another way, work is the exact area, scaled down by rounding only where a block is very large.

Source: UltraAttn (SC'25), section 4.1: the work of a block and the partition degree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, gcd

import numpy as np

from harness.plan.sharding import split
from patterns import CAUSAL, FULL, Pattern
from patterns.areas import Ints
from patterns.geometry import Chunk
from patterns.table import Table
from strategies.ultraattn.solver.instance import Fixed, Instance, Matrix, Weights, even_owners
from strategies.ultraattn.solver.search import packed_assignment

_FINEST = 4096  # units of work that a whole block is told apart in
_SEARCHED = 16  # multiples of the smallest degree that are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The blocks of a pattern.

    Attributes:
        work: Per row, per column; 0 where nothing is allowed.
        full: Work of the largest block when all of it is allowed.
    """

    work: Matrix
    full: int

    @property
    def total(self) -> int:
        """All work."""
        return sum(map(sum, self.work))


def grid_of_table(table: Table) -> Grid:
    """Return the grid of a block table: FULL 2, CAUSAL 1."""
    values = {FULL: 2, CAUSAL: 1}
    return Grid(
        work=tuple(tuple(values.get(int(cell), 0) for cell in row) for row in table), full=2
    )


def grid_of(pattern: Pattern, rows: Sequence[Chunk], columns: Sequence[Chunk]) -> Grid:
    """Return the grid of a pattern on query chunks (rows) and key chunks (columns)."""
    areas = pattern.areas(rows, columns)
    kinds = _kinds(areas, [len(chunk) for chunk in rows], [len(chunk) for chunk in columns])
    if kinds is not None:
        return Grid(work=_matrix(kinds), full=2)
    full = max(max(map(len, rows)) * max(map(len, columns)), 1)  # all of them may be empty
    common = gcd(full, *areas[areas > 0].tolist())
    areas, full = areas // common, full // common
    if full > _FINEST:
        areas = np.where(areas > 0, np.maximum((areas * _FINEST + full // 2) // full, 1), 0)
        full = _FINEST
    return Grid(work=_matrix(areas), full=full)


def _kinds(areas: Ints, rows: Sequence[int], columns: Sequence[int]) -> Ints | None:
    """Return 2 for FULL and 1 for CAUSAL; None if blocks have other kinds or sizes.

    Sizes that differ by a token are alike: equal blocks are then solved once, and what a device may
    get too much is a row of tokens per block.
    """
    if any(max(side) - min(side) > 1 or min(side) < 2 for side in (rows, columns)):
        return None
    n, m = np.array(rows)[:, None], np.array(columns)[None, :]
    half = np.abs(2 * areas - n * m) <= np.maximum(n, m)
    half &= abs(max(rows) - max(columns)) <= 1
    whole = areas == n * m
    if not (whole | half | (areas == 0)).all():
        return None
    return np.where(whole, 2, (half & (areas > 0)).astype(areas.dtype))


def _matrix(values: np.ndarray) -> Matrix:
    return tuple(tuple(map(int, row)) for row in values)


def instance_of(
    grid: Grid,
    devices: int,
    weights: Weights,
    *,
    slack: int = 0,
    fix_diagonal: bool = False,
    inside: Matrix = (),
) -> Instance:
    """Return the assignment problem of a grid whose chunks are dealt out contiguously.

    The cap is ceil(total / devices) in whole blocks, plus `slack` in units of work. Where no
    assignment can keep it (indivisible blocks, a fixed diagonal), it is raised to a load that one
    reaches: the cap of the result minus the paper's tells by how much.

    Args:
        grid: The blocks.
        devices: How many.
        weights: Prices of chunks.
        slack: Work that a device may have beyond the paper's cap.
        fix_diagonal: Give every diagonal block to the owner of its row where no diagonal block is
            empty, as the authors' code does.
        inside: See `Instance`.
    """
    rows, columns = len(grid.work), len(grid.work[0])
    row_owner, column_owner = even_owners(rows, devices), even_owners(columns, devices)
    fixed: Fixed = ()
    if fix_diagonal and rows == columns and all(grid.work[i][i] for i in range(rows)):
        fixed = tuple((i, i, row_owner[i]) for i in range(rows))
    cap = paper_cap(grid, devices) + slack
    instance = Instance(
        work=grid.work,
        row_owner=row_owner,
        column_owner=column_owner,
        devices=devices,
        weights=weights,
        cap=cap,
        fixed=fixed,
        inside=inside,
    )
    loads = [0] * devices
    for (i, j), device in zip(instance.blocks, packed_assignment(instance), strict=True):
        loads[device] += grid.work[i][j]
    return replace(instance, cap=max(cap, *loads))


def paper_cap(grid: Grid, devices: int) -> int:
    """Return the paper's load cap, ceil(total / devices) in whole blocks, in units of work."""
    return -(-grid.total // (devices * grid.full)) * grid.full


def imbalance(grid: Grid, devices: int) -> float:
    """Return r(P) = ceil(C / G) / (C / G) - 1, C = work in whole blocks; 0 for no work.

    Source: UltraAttn (SC'25), section 4.1.
    """
    share = Fraction(grid.total, grid.full * devices)
    return float(ceil(share) / share - 1) if share else 0.0


def partition_degree(
    pattern: Pattern, devices: int, epsilon: float = 0.1, *, step: int | None = None
) -> int:
    """Return the smallest degree P whose imbalance is at most `epsilon`.

    Degrees tried are the multiples of `step`: of the device count by default, so that every device
    owns as many chunks; 1 is the paper's rule. If none of the first 16 meets epsilon, the best.

    Args:
        pattern: Who attends whom.
        devices: How many.
        epsilon: Largest r(P); the paper publishes no value.
        step: P is a multiple of it.
    """
    step = devices if step is None else step
    best: tuple[float, int] | None = None
    for size in range(step, step * _SEARCHED + 1, step):
        rows, columns = split(pattern.seqlen_q, size), split(pattern.seqlen_kv, size)
        r = imbalance(grid_of(pattern, rows, columns), devices)
        if r <= epsilon:
            return size
        best = min(best or (r, size), (r, size))
    assert best is not None
    return best[1]
