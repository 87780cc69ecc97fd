"""Turn a tile into as few kernel calls as its geometry allows.

Rows and columns are offsets into the tile's concatenated query and key chunks. Chunks that continue
one another are joined first, so a tile over a whole sequence is one causal call. What no kernel's
own mask can express, a window or many short documents, is one call with a mask of positions, which
the kernel cuts (see `row_blocks`): the number of calls depends on runs of chunks, not on tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from harness.plan.masks import Mask, MaskKind
from harness.plan.packing import packed
from patterns.pattern import Pattern

ChunkPositions = tuple[range, ...]
"""Positions of chunks, in storage order."""


class Call(NamedTuple):
    """One kernel call: rows and columns are half-open offsets into the tile."""

    rows: tuple[int, int]
    cols: tuple[int, int]
    mask: Mask


def lower(pattern: Pattern, q: ChunkPositions, kv: ChunkPositions) -> tuple[Call, ...]:
    """List the kernel calls of a tile, in a fixed order; those of the latest patterns are known.

    Args:
        pattern: Who attends whom.
        q: Positions of the tile's query chunks, in storage order.
        kv: As `q`, for keys.

    Returns:
        Calls over disjoint (row, column) sets that together cover every unmasked pair once. In BAND
        and PACKED calls a row may see none of the keys.
    """
    return lowering(pattern)(q, kv)


# A pattern of many documents takes megabytes: few are kept, each with the calls of many tiles.
@lru_cache(maxsize=16)
def lowering(pattern: Pattern) -> Callable[[ChunkPositions, ChunkPositions], tuple[Call, ...]]:
    """Return `lower` for one pattern."""
    return lru_cache(maxsize=4096)(partial(_lower, pattern))


def _lower(pattern: Pattern, q: ChunkPositions, kv: ChunkPositions) -> tuple[Call, ...]:
    calls: list[Call] = []
    for row, q_run in runs_of(q):
        for col, kv_run in runs_of(kv):
            calls += _pair(pattern, q_run, kv_run, row, col)
    return joined(calls)


def joined(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Join disjoint calls that touch: full rectangles, and triangles with what lies between them.

    Returns:
        As few calls as that gives, in a fixed order.
    """
    return tuple(_ordered(_stairs(_joined(_ordered(calls)))))


def runs_of(chunks: Sequence[range]) -> Iterator[tuple[int, range]]:
    """Join chunks that continue one another; yield (offset, positions)."""
    offset, start, run = 0, 0, range(0)
    for chunk in chunks:
        if not chunk:
            continue
        if run and (joined := _continued(run, chunk)) is not None:
            run = joined
        else:
            if run:
                yield start, run
            start, run = offset, chunk
        offset += len(chunk)
    if run:
        yield start, run


def _continued(first: range, second: range) -> range | None:
    step = second[0] - first[-1]
    if step < 1 or (len(first) > 1 and first.step != step):
        return None
    if len(second) > 1 and second.step != step:
        return None
    return range(first[0], second[-1] + 1, step)


def _inside(run: range, low: int, high: int) -> tuple[int, int]:
    """Offsets of the positions of a run in low <= position < high."""
    first = max(0, -(-(low - run.start) // run.step))
    last = min(len(run), -(-(high - run.start) // run.step))
    return first, max(first, last)


def _pair(pattern: Pattern, q: range, k: range, row: int, col: int) -> Iterator[Call]:
    packs, alone = packed(pattern, q, k)
    for rows, cols, bands in packs:
        mask = Mask(MaskKind.PACKED, q[slice(*rows)], k[slice(*cols)], bands=bands)
        yield Call((row + rows[0], row + rows[1]), (col + cols[0], col + cols[1]), mask)
    for band in alone:
        r0, r1 = _inside(q, band.q0, band.q1)
        c0, c1 = _inside(k, band.k0, band.k1)
        yield from _band(q[r0:r1], k[c0:c1], band.lo, band.hi, row + r0, col + c0)


def _band(q: range, k: range, lo: int | None, hi: int | None, row: int, col: int) -> Iterator[Call]:
    """Calls for lo <= q - k <= hi on a rectangle whose corner is at (row, col)."""
    if not q or not k:
        return
    if lo is not None and q[0] - k[-1] >= lo:
        lo = None
    if hi is not None and q[-1] - k[0] <= hi:
        hi = None
    if lo is None and hi is None:
        yield _call(q, k, MaskKind.FULL, row, col)
        return
    if q.step != k.step:
        yield _banded(q, k, lo, hi, row, col)
        return
    step = q.step
    # In index space, with key index j and query index i: low <= i - j <= high.
    shift = k.start - q.start
    low = None if lo is None else -(-(lo + shift) // step)
    high = None if hi is None else (hi + shift) // step
    first = max(0, low) if low is not None else 0
    last = min(len(q), len(k) + high) if high is not None else len(q)
    key_first = max(0, first - high) if high is not None else 0
    key_last = min(len(k), last - low) if low is not None else len(k)
    if (first, last, key_first, key_last) != (0, len(q), 0, len(k)):
        yield from _band(q[first:last], k[key_first:key_last], lo, hi, row + first, col + key_first)
    elif high is None and low is not None:
        yield from _causal(q, k, -low, row, col)
    else:
        yield _banded(q, k, lo, hi, row, col)


def _banded(q: range, k: range, lo: int | None, hi: int | None, row: int, col: int) -> Call:
    return Call((row, row + len(q)), (col, col + len(k)), Mask(MaskKind.BAND, q, k, lo, hi))


def _causal(q: range, k: range, shift: int, row: int, col: int) -> Iterator[Call]:
    """Calls for j <= i + shift, shift >= 0: a full rectangle, then a top-left triangle."""
    if shift:
        yield _call(q, k[:shift], MaskKind.FULL, row, col)
    yield _call(q, k[shift:], MaskKind.CAUSAL, row, col + shift)


def _call(q: range, k: range, kind: MaskKind, row: int, col: int) -> Call:
    mask = Mask(kind=kind, q=q, k=k, lo=None, hi=None)
    return Call((row, row + len(q)), (col, col + len(k)), mask)


def _joined(calls: Sequence[Call]) -> list[Call]:
    """Join full rectangles that share their rows and touch, then those that share columns."""
    wide: list[Call] = []
    for call in calls:
        if wide and _full(wide[-1], call) and wide[-1].rows == call.rows:
            left = wide[-1]
            if left.cols[1] == call.cols[0]:
                wide[-1] = _whole(call.rows, (left.cols[0], call.cols[1]))
                continue
        wide.append(call)
    tall: list[Call] = []
    above: dict[tuple[int, int], int] = {}
    for call in wide:
        index = above.get(call.cols)
        if index is not None and _full(tall[index], call) and tall[index].rows[1] == call.rows[0]:
            tall[index] = _whole((tall[index].rows[0], call.rows[1]), call.cols)
            continue
        above[call.cols] = len(tall)
        tall.append(call)
    return tall


def _ordered(calls: Sequence[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: (call.rows, call.cols))


def _stairs(calls: list[Call]) -> list[Call]:
    """Join triangles that continue one another's diagonal with the rectangle between them.

    ::

        A            A: square triangle, B: triangle below and to the right of it,
        F B          F: full rows of B that end where B begins and reach below A
    """
    triangles = [call for call in calls if call.mask.kind is MaskKind.CAUSAL]
    # Calls are disjoint, so that one at most has these rows and ends at this column.
    others = {
        (call.rows, call.cols[1]): call for call in calls if call.mask.kind is not MaskKind.CAUSAL
    }
    stairs: list[Call] = []
    changed = False
    for low in triangles:
        between = others.get((low.rows, low.cols[0]))
        if not (stairs and between and _fills(stairs[-1], between, low)):
            stairs.append(low)
            continue
        high = stairs.pop()
        del others[between.rows, between.cols[1]]
        if between.cols[0] < high.cols[0]:
            rest = _whole(between.rows, (between.cols[0], high.cols[0]))
            others[rest.rows, rest.cols[1]] = rest
        rows, cols = (high.rows[0], low.rows[1]), (high.cols[0], low.cols[1])
        q, k = range(rows[1] - rows[0]), range(cols[1] - cols[0])
        stairs.append(Call(rows, cols, Mask(kind=MaskKind.CAUSAL, q=q, k=k)))
        changed = True
    return _joined(_ordered(list(others.values()))) + stairs if changed else calls


def _fills(high: Call, between: Call, low: Call) -> bool:
    """Whether two triangles and what lies between them, if it is full, form one triangle."""
    square = high.rows[1] - high.rows[0] == high.cols[1] - high.cols[0]
    corner = (high.rows[1], high.cols[1]) == (low.rows[0], low.cols[0])
    full = between.mask.kind is MaskKind.FULL
    return square and corner and full and between.cols[0] <= high.cols[0]


def _full(first: Call, second: Call) -> bool:
    return first.mask.kind is MaskKind.FULL and second.mask.kind is MaskKind.FULL


def _whole(rows: tuple[int, int], cols: tuple[int, int]) -> Call:
    # A full call's positions do not matter to a kernel, only how many there are.
    q, k = range(rows[1] - rows[0]), range(cols[1] - cols[0])
    return Call(rows, cols, Mask(kind=MaskKind.FULL, q=q, k=k, lo=None, hi=None))
