"""Blocks of rows: every pair that a mask allows is in them once, and no other."""

from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.plan.masks import Mask, MaskKind
from harness.plan.row_blocks import batches, masked_cells, parts, spans
from patterns import Band
from patterns.areas import BandArrays
from tests.patterns.generators import times_covered


@st.composite
def masks(draw: st.DrawFn) -> tuple[Mask, np.ndarray]:
    """A mask of a band or of bands that descend, and who meets whom, by definition."""
    steps = st.sampled_from((1, 2, 3))
    q, k = (
        range(start, start + count * step, step)
        for start, count, step in (
            (draw(st.integers(0, 20)), draw(st.integers(1, 60)), draw(steps)) for _ in "qk"
        )
    )
    bounds = st.none() | st.integers(-30, 30)
    if draw(st.booleans()):
        lo, hi = draw(bounds), draw(bounds)
        if lo is not None and hi is not None and lo > hi:
            lo, hi = hi, lo
        distance = np.array(q)[:, None] - np.array(k)[None, :]
        allowed = (distance >= (-999 if lo is None else lo)) & (
            distance <= (999 if hi is None else hi)
        )
        return Mask(MaskKind.BAND, q, k, lo, hi), allowed
    bands, at, key = [], 0, 0
    for rows, cols, gap, skip in draw(
        st.lists(st.tuples(*[st.integers(1, 30)] * 2, *[st.integers(0, 3)] * 2), min_size=1)
    ):
        lo = draw(st.sampled_from((None, 0, at - key)))
        bands.append(Band(q0=at, q1=at + rows, k0=key, k1=key + cols, lo=lo))
        at, key = at + rows + gap, key + cols + skip
    return Mask(MaskKind.PACKED, q, k, bands=BandArrays.of(bands)), times_covered(bands, q, k) > 0


@given(
    masks(), st.sampled_from(((1, 2, 1, 9), (4, 8, 2, 5), (32, 128, 64, 1 << 14), (3, 7, 1, 40)))
)
def test_batches_hold_every_pair_once_and_no_other(
    case: tuple[Mask, np.ndarray], sizes: tuple[int, int, int, int]
) -> None:
    mask, allowed = case
    short, long, step, most = sizes
    found = np.zeros((len(mask.q) + long, len(mask.k)), dtype=int)
    kept, columns = 0, np.zeros(len(mask.k), dtype=int)
    with (
        patch("harness.plan.row_blocks._SHORT_ROWS", short),
        patch("harness.plan.row_blocks._LONG_ROWS", long),
        patch("harness.plan.row_blocks._LONG", 8),
        patch("harness.plan.row_blocks._STEP", step),
        patch("harness.plan.row_blocks._MOST_KEYS", most),
    ):
        bound, worked = parts(mask), masked_cells(mask)
        for batch in batches(mask):
            length = batch.seen.shape[1]
            keys = sum(count for _, count in batch.edges) + (batch.common or (0, 0))[1]
            # Blocks that are not aligned share columns that one of them meets and another does not.
            assert len(batch.rows) == 1 or len(batch.rows) * keys <= 2 * most
            kept += len(batch.rows) * length
            for block, row in enumerate(batch.rows.tolist()):
                seen = batch.seen[block % len(batch.seen)]
                used = np.zeros(len(mask.k), dtype=bool)
                at = 0
                for first, count in batch.edges:
                    for column in range(first[block], first[block] + count):
                        if 0 <= column < len(mask.k):
                            found[row : row + length, column] += seen[:, at]
                            used[column] |= seen[:, at].any()
                        else:
                            assert not seen[:, at].any()
                        at += 1
                if batch.common is not None:
                    first, count = batch.common
                    found[row : row + length, first[block] : first[block] + count] += 1
                    used[first[block] : first[block] + count] = True
                columns += used

    assert found[: len(mask.q)].tolist() == allowed.astype(int).tolist()
    assert int(columns.max()) <= bound
    assert worked >= allowed.sum()


@given(masks())
def test_a_span_is_the_run_of_keys_that_a_row_meets(case: tuple[Mask, np.ndarray]) -> None:
    mask, allowed = case
    first, last = spans(mask)
    columns = np.arange(len(mask.k))

    assert ((first[:, None] <= columns) & (columns < last[:, None])).tolist() == allowed.tolist()
    assert (first[first == last] == 0).all()


def test_a_long_window_is_mostly_without_a_mask() -> None:
    rows = range(10_007)
    made = list(batches(Mask(MaskKind.BAND, rows, rows, lo=0, hi=2000)))
    masked = sum(batch.seen.shape[1] * len(batch.rows) * batch.seen.shape[2] for batch in made)
    plain = sum(
        batch.seen.shape[1] * len(batch.rows) * batch.common[1]
        for batch in made
        if batch.common is not None
    )

    assert plain > 5 * masked
    assert max(len(batch.rows) * batch.seen.shape[2] for batch in made) < 1 << 14
