"""Coverings: few rows in which every two values of different axes meet, where they can."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product

from allpairspy import AllPairs

CoveringRow = tuple[object, ...]
Together = tuple[tuple[int, object], ...]
"""Values that are to stand in one row, each with the number of its axis."""

_TRIES = 8


def covering(
    axes: Sequence[Sequence[object]],
    fits: Callable[[Sequence[object]], bool],
    *,
    seed: int,
    also: Iterable[Together] = (),
) -> Iterator[CoveringRow]:
    """Yield rows such that every two values of different axes that can meet do.

    The library's covering is not complete where rows are refused: it ends at the first row that
    brings nothing new. What it leaves out is completed here, row by row, by the best of a few.

    Args:
        axes: The values of each axis.
        fits: Whether a row, or the first values of one, may be.
        seed: Of the order in which values are tried; equal seeds give equal rows.
        also: More that is to meet, where it can.
    """
    draw = random.Random(seed)  # nothing secret: a fixed order
    shuffled = [draw.sample(list(axis), len(axis)) for axis in axes]
    missing = dict.fromkeys(_pairs(shuffled), None) | dict.fromkeys(also, None)
    for row in map(tuple, AllPairs(shuffled, filter_func=fits)):
        _meet(missing, row)
        yield row
    for together in list(missing):
        if together in missing:
            found = [_completed(shuffled, fits, dict(together), draw) for _ in range(_TRIES)]
            rows = [row for row in found if row is not None]
            if rows:
                best = max(rows, key=lambda row: sum(_in(other, row) for other in missing))
                _meet(missing, best)
                yield best


def _pairs(axes: Sequence[Sequence[object]]) -> Iterator[Together]:
    for (i, first), (j, second) in combinations(enumerate(axes), 2):
        for a, b in product(first, second):
            yield (i, a), (j, b)


def _in(together: Together, row: CoveringRow) -> bool:
    return all(row[axis] == value for axis, value in together)


def _meet(missing: dict[Together, None], row: CoveringRow) -> None:
    """Strike out what meets in a row."""
    for together in [each for each in missing if _in(each, row)]:
        del missing[together]


def _completed(
    axes: Sequence[Sequence[object]],
    fits: Callable[[Sequence[object]], bool],
    fixed: dict[int, object],
    draw: random.Random,
    begun: CoveringRow = (),
) -> CoveringRow | None:
    """Find a row that fits and has the fixed values, in a random order; None if no row does."""
    at = len(begun)
    if at == len(axes):
        return begun
    choices = [fixed[at]] if at in fixed else draw.sample(list(axes[at]), len(axes[at]))
    for value in choices:
        row = (*begun, value)
        if fits(row):
            whole = _completed(axes, fits, fixed, draw, row)
            if whole is not None:
                return whole
    return None
