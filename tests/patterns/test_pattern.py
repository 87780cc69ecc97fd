"""Every pattern: its bands, areas, relations and regions agree with its definition."""

import pickle
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patterns import PATTERNS, Band, Block, Pattern, Relation, areas, make_pattern, sampled
from tests.patterns.generators import (
    CROSS_TEXTS,
    Grid,
    any_patterns,
    dense,
    grids,
    relation_by_search,
    submask,
    times_covered,
)


@pytest.mark.parametrize("text", CROSS_TEXTS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (3, 3), (37, 37), (9, 31), (31, 5)])
def test_the_bands_cover_every_allowed_pair_once_and_no_other(
    text: str, seqlen_q: int, seqlen_kv: int
) -> None:
    pattern = make_pattern(text, seqlen_q, seqlen_kv, cross=True)
    covered = times_covered(pattern.bands, range(seqlen_q), range(seqlen_kv))

    assert dense(pattern).astype(int).tolist() == covered.tolist()


@pytest.mark.parametrize(
    "name", [name for name, kind in PATTERNS.items() if kind.sample is not None]
)
@pytest.mark.parametrize("seqlen", [1, 3, 37])
def test_the_bands_of_every_pattern_of_the_table_are_its_definition(name: str, seqlen: int) -> None:
    pattern = make_pattern(sampled(name, seqlen), seqlen)
    covered = times_covered(pattern.bands, range(seqlen), range(seqlen))
    assert dense(pattern).astype(int).tolist() == covered.tolist()


def test_a_pattern_can_be_checked_as_it_is_or_says_with_what() -> None:
    for name, kind in PATTERNS.items():
        must = [key for key, parameter in kind.parameters.items() if parameter.default is None]
        assert kind.sample is None or not must or kind.sample(64), name
    assert [name for name, kind in PATTERNS.items() if kind.sample is None] == ["table"]


@given(any_patterns)
def test_the_bands_of_any_pattern_cover_every_allowed_pair_once_and_no_other(
    pattern: Pattern,
) -> None:
    covered = times_covered(pattern.bands, range(pattern.seqlen_q), range(pattern.seqlen_kv))

    assert dense(pattern).astype(int).tolist() == covered.tolist()


@given(grids())
def test_areas_are_dense_counts_one_by_one_and_all_at_once(grid: Grid) -> None:
    pattern, qs, ks = grid
    mask = dense(pattern)
    expected = [[int(submask(mask, q, k).sum()) for k in ks] for q in qs]

    assert expected == [[pattern.area(q, k) for k in ks] for q in qs]
    assert expected == pattern.areas(qs, ks).tolist()
    assert int(mask.sum()) == pattern.total_area


@given(grids())
def test_the_relation_is_the_one_that_a_search_on_the_dense_mask_finds(grid: Grid) -> None:
    pattern, qs, ks = grid
    mask = dense(pattern)
    for q in qs:
        for k in ks:
            assert relation_by_search(submask(mask, q, k)) == pattern.relation(q, k), (q, k)


@given(grids())
def test_regions_cover_the_mask_of_two_chunks_once_and_each_meets_it(grid: Grid) -> None:
    pattern, qs, ks = grid
    mask = dense(pattern)
    for q in qs:
        for k in ks:
            regions = pattern.regions(q, k)
            assert submask(mask, q, k).astype(int).tolist() == times_covered(regions, q, k).tolist()
            assert all(times_covered([region], q, k).any() for region in regions)
            assert sorted(regions, key=lambda band: (band.q0, band.k0)) == list(regions)


CAUSAL_BY_HAND = [
    # causal: zigzag neighbours, stripes before and after, a rectangle over the diagonal
    ("causal", range(0, 6), range(0, 6), Block(Relation.CAUSAL, 0)),
    ("causal", range(6, 12), range(0, 5), Block(Relation.FULL)),
    ("causal", range(0, 5), range(6, 12), Block(Relation.EMPTY)),
    ("causal", range(1, 40, 4), range(3, 40, 4), Block(Relation.CAUSAL, -1)),
    ("causal", range(3, 40, 4), range(1, 40, 4), Block(Relation.CAUSAL, 0)),
    ("causal", range(4, 10), range(0, 10), Block(Relation.CAUSAL, 4)),
    ("causal", range(0, 12, 2), range(0, 12), Block(Relation.PARTIAL)),
    ("window:left=2", range(0, 9), range(0, 9), Block(Relation.PARTIAL)),
    ("window:left=30", range(0, 9), range(0, 9), Block(Relation.CAUSAL, 0)),
    ("window:left=0,right=3", range(7, 12), range(9, 15), Block(Relation.PARTIAL)),
]


@pytest.mark.parametrize(("text", "q", "k", "expected"), CAUSAL_BY_HAND)
def test_relations_known_by_hand(text: str, q: range, k: range, expected: Block) -> None:
    assert expected == make_pattern(text, 40).relation(q, k)


def test_bottom_right_alignment_lets_the_last_query_see_every_key() -> None:
    short = make_pattern("causal:align=bottom_right", 3, 5, cross=True)
    tall = make_pattern("causal:align=bottom_right", 5, 3, cross=True)

    assert dense(short).astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert (dense(tall).astype(int).tolist()) == [
        [0, 0, 0],
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
    ]
    assert Block(Relation.CAUSAL, 2) == short.relation(range(3), range(5))
    assert Block(Relation.CAUSAL, -2) == tall.relation(range(5), range(3))


def test_a_window_counts_keys_on_both_sides_of_the_query() -> None:
    window = make_pattern("window:left=2,right=1", 5)

    rows = [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert rows == dense(window).astype(int).tolist()


def test_documents_attend_themselves_only() -> None:
    causal = make_pattern("documents:lengths=1+3", 4)
    full = make_pattern("documents:lengths=1+3,mask=full", 4)

    assert (dense(causal).astype(int).tolist()) == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 1],
    ]
    assert (dense(full).astype(int).tolist()) == [
        [1, 0, 0, 0],
        [0, 1, 1, 1],
        [0, 1, 1, 1],
        [0, 1, 1, 1],
    ]


def test_the_regions_of_a_causal_chunk_pair_drop_queries_that_see_nothing() -> None:
    causal = make_pattern("causal", 20)

    assert (Band(q0=5, q1=10, k0=5, k1=8, lo=0),) == causal.regions(range(10), range(5, 8))
    assert (Band(q0=8, q1=10, k0=1, k1=7),) == causal.regions(range(8, 10), range(1, 7))
    assert causal.regions(range(2, 4), range(9, 12)) == ()


@pytest.mark.parametrize("step", [None, 128])
def test_areas_of_many_chunks_add_up_for_ten_million_tokens(step: int | None) -> None:
    size = 10**7
    lengths = "+".join(["199999", "200001"] * 25)
    for text in ("causal", "window:left=4095", f"documents:lengths={lengths}", "streaming"):
        pattern = make_pattern(text, size)
        edges = [i * size // 128 for i in range(129)]
        chunks = (
            [range(edges[i], edges[i + 1]) for i in range(128)]
            if step is None
            else [range(i, size, step) for i in range(128)]
        )
        grid = pattern.areas(chunks, chunks)

        assert np.int64 == grid.dtype
        assert pattern.total_area == int(grid.sum())
        assert int(grid[5, 3]) == pattern.area(chunks[5], chunks[3])


@pytest.mark.parametrize(("cells", "triples"), [(9, 1 << 15), (1 << 21, 5), (40, 7)])
def test_areas_do_not_depend_on_how_the_work_is_cut(
    monkeypatch: pytest.MonkeyPatch, cells: int, triples: int
) -> None:
    pattern = make_pattern("streaming:blocks=6", 61)
    qs, ks = [range(0, 23), range(23, 61), range(5, 5)], [range(i, 61, 4) for i in range(4)]
    expected = [[pattern.area(q, k) for k in ks] for q in qs]
    monkeypatch.setattr(areas, "BAND_CELLS", cells)
    monkeypatch.setattr(areas, "_TRIPLES", triples)

    assert pattern.areas(qs, ks).tolist() == expected


def test_closed_forms_hold_for_ten_million_tokens() -> None:
    size = 10**7
    triangle = size * (size + 1) // 2
    left = 4095

    assert size * size == make_pattern("full", size).total_area
    assert triangle == make_pattern("causal", size).total_area
    expected = (left + 1) * size - left * (left + 1) // 2
    assert expected == make_pattern(f"window:left={left}", size).total_area
    assert isinstance(make_pattern("causal", size).total_area, int)


def test_a_hundred_thousand_documents_are_counted_exactly() -> None:
    pattern = make_pattern("documents:lengths=" + "+".join(["70", "30"] * 50_000), 5_000_000)
    edges = [i * 5_000_000 // 127 for i in range(128)]
    chunks = [range(edges[i], edges[i + 1]) for i in range(127)]

    assert pattern.total_area == 50_000 * (70 * 71 // 2 + 30 * 31 // 2)
    grid = pattern.areas(chunks, chunks)
    assert pattern.total_area == int(grid.sum())
    assert int(grid[2, 2]) == pattern.area(chunks[2], chunks[2])
    assert pattern.relation(chunks[2], chunks[2]).relation == Relation.PARTIAL


@given(any_patterns)
def test_patterns_survive_pickling(pattern: Pattern) -> None:
    copy = pickle.loads(pickle.dumps(pattern))

    assert pattern == copy
    assert dense(pattern).tolist() == dense(copy).tolist()


def test_equal_text_and_lengths_make_equal_patterns() -> None:
    assert make_pattern("star", 12) == make_pattern("star:blocks=4", 12)
    assert hash(make_pattern("star", 12)) == hash(make_pattern("star:blocks=4", 12))
    assert make_pattern("star", 12) != make_pattern("star", 13)
    assert make_pattern("star", 12) != make_pattern("star:blocks=3", 12)


@pytest.mark.parametrize("chunk", [range(0, 8), range(6, 0, -1), range(-1, 3)])
def test_chunks_outside_the_sequence_are_refused(chunk: range) -> None:
    pattern = make_pattern("causal", 7, 9, cross=True)
    with pytest.raises(ValueError, match=r"causal: query chunk .* must lie in \[0, 7\)"):
        pattern.area(chunk, range(2))
    with pytest.raises(ValueError, match=r"causal: query chunk .* must lie in \[0, 7\)"):
        pattern.areas([range(2), chunk], [range(2)])


def test_positions_outside_the_sequence_are_refused() -> None:
    pattern = make_pattern("causal", 7, 9, cross=True)
    with pytest.raises(ValueError, match=r"causal: key positions 2..9 must lie in \[0, 9\)"):
        pattern.allowed(np.array([6]), np.array([2, 9]))


def test_a_picture_shades_cells_by_density() -> None:
    assert make_pattern("causal", 4).picture(4) == "█▒··\n███▒"
    # 4, 3 of 8 pairs; 1 of 8
    assert make_pattern("window:left=1", 8).picture(4) == "▒▒··\n·░▒▒"
    assert make_pattern("full", 1).picture(9) == "█"
    with pytest.raises(ValueError, match=r"width \(0\) must be >= 1"):
        make_pattern("full", 3).picture(0)


@given(grids(), st.randoms())
def test_the_mask_of_chosen_positions_is_that_part_of_the_whole_mask(
    grid: Grid, random: Random
) -> None:
    pattern = grid[0]
    q = [random.randrange(pattern.seqlen_q) for _ in range(4)]
    k = [random.randrange(pattern.seqlen_kv) for _ in range(3)]

    part = pattern.allowed(np.array(q), np.array(k))
    assert dense(pattern)[np.ix_(q, k)].tolist() == part.tolist()
