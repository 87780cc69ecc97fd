"""Bands and their closed-form areas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patterns import Band, band_area
from patterns.geometry import clip, floor_sum, lead, shrink, staircase_area
from tests.patterns.generators import allows, chunks, times_covered


@st.composite
def bands(draw: st.DrawFn) -> Band:
    q0, k0 = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    lo = draw(st.none() | st.integers(-25, 25))
    hi = draw(st.none() | st.integers(-25 if lo is None else lo, 30))
    q1, k1 = q0 + draw(st.integers(1, 20)), k0 + draw(st.integers(1, 20))
    return Band(q0=q0, q1=q1, k0=k0, k1=k1, lo=lo, hi=hi)


@given(bands(), st.lists(st.tuples(chunks(43), chunks(47)), min_size=8, max_size=8))
def test_the_area_of_a_band_is_the_number_of_pairs_that_it_allows(
    band: Band, pairs: list[tuple[range, range]]
) -> None:
    for q, k in pairs:
        expected = sum(allows(band, at, key) for at in q for key in k)

        assert expected == band_area(band, q, k)


@given(bands(), st.lists(st.tuples(chunks(43), chunks(47)), min_size=8, max_size=8))
def test_the_lead_of_a_band_is_its_largest_key_index_minus_query_index(
    band: Band, pairs: list[tuple[range, range]]
) -> None:
    for q, k in pairs:
        leads = [
            j - i for i, at in enumerate(q) for j, key in enumerate(k) if allows(band, at, key)
        ]
        assert not leads or max(leads) == lead(band, q, k)


def test_a_query_that_falls_between_two_keys_does_not_lead() -> None:
    diagonal = Band(q0=0, q1=30, k0=0, k1=30, lo=0, hi=0)

    # of queries 2, 3, 4, 5, ... and keys 1, 4, 7, ... the first to meet are 4 (index 2) and 4 (1)
    assert lead(diagonal, range(2, 9), range(1, 20, 3)) == -1


@given(bands(), chunks(43), chunks(47))
def test_a_shrunk_band_allows_the_same_pairs_and_keeps_only_bounds_that_cut(
    band: Band, q: range, k: range
) -> None:
    if not band_area(band, q, k):
        return
    small = shrink(band, q, k)

    assert times_covered([band], q, k).tolist() == times_covered([small], q, k).tolist()
    assert {small.q0, small.q1 - 1} <= set(q)
    assert {small.k0, small.k1 - 1} <= set(k)
    inner_q, inner_k = clip(q, small.q0, small.q1), clip(k, small.k0, small.k1)
    if q.step == k.step == 1:  # then every edge of the rectangle holds a pair
        covered = times_covered([small], inner_q, inner_k)
        assert all(edge.any() for edge in (covered[0], covered[-1], covered[:, 0], covered[:, -1]))
    gaps = [at - key for at in inner_q for key in inner_k]
    assert small.lo is None or min(gaps) < small.lo
    assert small.hi is None or max(gaps) > small.hi


def test_shrinking_drops_rows_and_columns_that_hold_nothing() -> None:
    window = Band(q0=0, q1=2000, k0=0, k1=2000, lo=0, hi=128)

    expected = Band(q0=1000, q1=1128, k0=872, k1=1000, hi=128)
    assert expected == shrink(window, range(1000, 1900), range(0, 1000))
    causal = Band(q0=0, q1=20, k0=0, k1=20, lo=0)
    assert shrink(causal, range(2, 6), range(0, 10)) == Band(q0=2, q1=6, k0=0, k1=6, lo=0)
    ahead = Band(q0=0, q1=20, k0=0, k1=20, hi=0)
    assert shrink(ahead, range(2, 13), range(1, 5)) == Band(q0=2, q1=5, k0=2, k1=5, hi=0)


@given(st.integers(0, 30), st.integers(1, 12), st.integers(0, 30), st.integers(0, 40))
def test_a_floor_sum_is_the_sum_of_its_terms(
    count: int, divisor: int, factor: int, offset: int
) -> None:
    expected = sum((factor * i + offset) // divisor for i in range(count))

    assert expected == floor_sum(count, divisor, factor, offset)


@pytest.mark.parametrize(("shift", "area"), [(-3, 0), (-2, 1), (0, 6), (1, 9), (2, 12), (4, 15)])
def test_a_staircase_of_three_queries_and_five_keys_counts_by_hand(shift: int, area: int) -> None:
    assert area == staircase_area(3, 5, shift)


def test_areas_of_ten_million_tokens_are_exact() -> None:
    size = 10**7
    causal = Band(q0=0, q1=size, k0=0, k1=size, lo=0)
    everything = range(size)

    assert size * (size + 1) // 2 == band_area(causal, everything, everything)
    # stripes: query 8i + 3 sees keys 8j + 5 with j < i
    n = size // 8
    assert n * (n - 1) // 2 == band_area(causal, range(3, size, 8), range(5, size, 8))
    # unequal steps: query 2i sees the multiples of 5 up to it, 2i // 5 + 1 of them
    expected = sum(2 * i // 5 + 1 for i in range(size // 2))
    assert expected == band_area(causal, range(0, size, 2), range(0, size, 5))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q1": 4}, r"q \[4, 4\) x k \[2, 9\) must hold at least one position"),
        ({"k0": -1}, r"k \[-1, 9\) must hold"),
        ({"lo": 3, "hi": 2}, r"lo \(3\) must be <= hi \(2\)"),
    ],
)
def test_a_band_without_pairs_is_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Band(**({"q0": 4, "q1": 6, "k0": 2, "k1": 9} | wrong))
