"""Block tables: the published ones, refinement, lowering, and files."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patterns import FULL, Band, make_pattern, refine, remap_order, simplify
from patterns.table import table_bands
from patterns.tables import (
    global_local_table,
    read_table,
    star_table,
    streaming_table,
    strided_order,
    strided_table,
)
from tests.patterns.generators import dense, times_covered

VOLUME = np.array([0.0, 1.0, 0.5])  # of EMPTY, FULL, CAUSAL


def parse(text: str) -> np.ndarray:
    """Read the form in which the authors print tables, `[[2000][1200]]`."""
    return np.array([[int(digit) for digit in row] for row in text.strip("[]").split("][")])


def remapped_strided() -> np.ndarray:
    order = np.array(strided_order(16, 4))
    return strided_table(16, 4, 3)[np.ix_(order, order)]


# name, table, cells that are not empty, their volume
PUBLISHED = [
    ("strided", remapped_strided(), 56, 56),
    ("global_local", global_local_table(16, 1, 1), 46, 46),
    ("star", star_table(4), 7, 5),
    ("streaming", streaming_table(8, 3), 26, 22),
    ("full", np.array([[1]]), 1, 1),
    ("causal", np.array([[2]]), 1, 0.5),
]
tables = st.tuples(st.integers(1, 4), st.integers(1, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.integers(0, 2), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    ).map(lambda rows: np.array(rows, dtype=np.int8))
)


@pytest.mark.parametrize(("name", "table", "cells", "volume"), PUBLISHED)
def test_the_published_tables_have_their_published_counts_and_density(
    name: str, table: np.ndarray, cells: int, volume: float
) -> None:
    assert cells == np.count_nonzero(table)
    assert volume == VOLUME[table].sum()
    size = 16 * 9973
    density = make_pattern(name, size).total_area / size**2
    assert volume / table.size == pytest.approx(density, rel=1e-4)


def test_star_and_streaming_are_printed_as_by_the_authors() -> None:
    assert parse("[[2000][1200][1020][1002]]").tolist() == star_table(4).tolist()
    streaming = "[[20000000][12000000][11200000][11120000][10112000][10011200][10001120][10000112]]"
    assert parse(streaming).tolist() == streaming_table(8, 3).tolist()


def test_strided_is_four_groups_that_miss_two_corners() -> None:
    group = parse("[[1110][1111][1111][0111]]")

    assert np.kron(np.eye(4, dtype=int), group).tolist() == remapped_strided().tolist()


def test_global_local_is_first_row_first_column_and_diagonal() -> None:
    assert parse("[[11111][11000][10100][10010][10001]]").tolist() == (
        global_local_table(5, 1, 1).tolist()
    )
    assert parse("[[11111][11111][11110][11111][11011]]").tolist() == (
        global_local_table(5, 2, 2).tolist()
    )


def test_strided_blocks_see_their_residue_up_to_eight_blocks_away() -> None:
    table = strided_table(16, 4, 3)
    for c in range(16):
        for d in range(16):
            assert (c % 4 == d % 4 and abs(c - d) <= 8) == bool(table[c, d])


@pytest.mark.parametrize("extra", ["", ":blocks=12,stride=3,local=2"])
def test_strided_original_remapped_is_strided(extra: str) -> None:
    size = 240
    original, remapped = (
        make_pattern(f"strided_original{extra}", size),
        make_pattern(f"strided{extra}", size),
    )
    order = remap_order(original)
    width = size // len(order)
    positions = np.concatenate([np.arange(b * width, (b + 1) * width) for b in order])

    assert dense(remapped).tolist() == original.allowed(positions, positions).tolist()
    assert dense(original).tolist() != dense(remapped).tolist()
    assert remap_order(remapped) is None


def test_the_published_remap_sends_block_4i_plus_r_to_place_4r_plus_i() -> None:
    order = remap_order(make_pattern("strided_original", 16))

    assert all(order[4 * r + i] == 4 * i + r for r in range(4) for i in range(4))


# the load of a rank that owns one eighth of the rows: max / mean - 1
IMBALANCE = [
    ("full", 0.0),
    ("causal", 0.875),
    ("strided", 0.0),
    ("strided_original", 1 / 7),
    ("global_local", 18 / 5.75 - 1),
    ("star", 0.4),
    ("streaming", 3.5 / 2.75 - 1),
]


@pytest.mark.parametrize(("name", "expected"), IMBALANCE)
def test_row_owners_are_imbalanced_as_published(name: str, expected: float) -> None:
    size = 8 * 99_990
    rows = [range(i * size // 8, (i + 1) * size // 8) for i in range(8)]
    load = make_pattern(name, size).areas(rows, [range(size)])[:, 0]

    assert expected == pytest.approx(load.max() / load.mean() - 1, abs=1e-4)


def test_refining_splits_a_causal_cell_into_a_triangle() -> None:
    expected = parse("[[200111][120111][112111]]")

    assert expected.tolist() == refine(np.array([[2, 1]], dtype=np.int8), 3).tolist()


@given(tables, st.integers(1, 6))
def test_simplifying_undoes_refining(table: np.ndarray, factor: int) -> None:
    raw = simplify(table)

    assert raw.tolist() == simplify(refine(table, factor)).tolist()
    ratio = table.shape[0] // raw.shape[0]
    assert table.tolist() == refine(raw, ratio).tolist()


def test_a_table_that_is_no_refinement_stays() -> None:
    assert remapped_strided().tolist() == simplify(remapped_strided()).tolist()
    assert star_table(4).tolist() == simplify(star_table(4)).tolist()
    assert simplify(refine(np.array([[2]]), 12)).tolist() == [[2]]


def test_refining_by_less_than_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"factor \(0\) must be >= 1"):
        refine(star_table(4), 0)


@given(tables, st.integers(1, 5))
def test_refining_keeps_the_mask_of_equal_lengths_where_causal_cells_lie_on_the_diagonal(
    table: np.ndarray, factor: int
) -> None:
    size = 23
    rows, columns = np.indices(table.shape)
    table = np.where((rows == columns) | (table != 2), table, FULL)[: min(table.shape)]
    table = table[:, : min(table.shape)]

    coarse, fine = table_bands(table, size, size), table_bands(refine(table, factor), size, size)
    assert times_covered(coarse, range(size), range(size)).tolist() == (
        times_covered(fine, range(size), range(size)).tolist()
    )


@pytest.mark.parametrize(
    ("name", "bands"),
    [("full", 1), ("causal", 1), ("strided", 12), ("global_local", 17), ("star", 5)],
)
def test_full_cells_merge_into_few_bands(name: str, bands: int) -> None:
    assert bands == len(make_pattern(name, 160).bands)


def test_equal_runs_of_adjacent_rows_merge() -> None:
    table = parse("[[11011][11011][11000][01100]]")

    assert [(band.q0, band.q1, band.k0, band.k1) for band in table_bands(table, 8, 10)] == [
        (0, 6, 0, 4),
        (0, 4, 6, 10),
        (6, 8, 2, 6),
    ]


def test_causal_cells_off_the_diagonal_are_full_below_it_and_absent_above() -> None:
    # keys 0-3, 4-7, 8-11 against queries 0-2, 3-5, 6-8, 9-11: cell (1, 0) has no later key
    table = np.array([[2, 2, 0], [2, 0, 0], [2, 2, 2], [0, 2, 0]], dtype=np.int8)

    assert table_bands(table, 12, 12) == (
        Band(q0=0, q1=3, k0=0, k1=4, lo=0),
        Band(q0=3, q1=9, k0=0, k1=4),
        Band(q0=6, q1=9, k0=4, k1=8, lo=0),
        Band(q0=6, q1=9, k0=8, k1=12, lo=0),
        Band(q0=9, q1=12, k0=4, k1=8),
    )


def write_all(folder: Path, rows: list[list[int]]) -> list[Path]:
    np.save(folder / "t.npy", np.array(rows))
    (folder / "t.json").write_text(json.dumps(rows))
    (folder / "t.txt").write_text("\n".join("".join(map(str, row)) for row in rows) + "\n\n")
    return [folder / name for name in ("t.npy", "t.json", "t.txt")]


@pytest.mark.parametrize("shape", [(11, 11), (5, 17), (3, 2), (16, 4)])
def test_a_table_file_of_any_kind_gives_the_mask_of_its_cells(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    rows = [[2, 1, 0], [0, 2, 1]]
    edges_q = [0, shape[0] // 2, shape[0]]
    edges_k = [0, shape[1] // 3, 2 * shape[1] // 3, shape[1]]
    expected = np.zeros(shape, dtype=bool)
    for i, j in np.ndindex(2, 3):
        for q in range(edges_q[i], edges_q[i + 1]):
            for k in range(edges_k[j], edges_k[j + 1]):
                expected[q, k] = rows[i][j] == 1 or (rows[i][j] == 2 and k <= q)
    for path in write_all(tmp_path, rows):
        pattern = make_pattern(f"table:file={path}", *shape, cross=True)

        assert rows == read_table(path).tolist()
        assert f"table:file={path}" == pattern.text
        assert expected.tolist() == dense(pattern).tolist()
        assert expected.astype(int).tolist() == (
            times_covered(pattern.bands, range(shape[0]), range(shape[1])).tolist()
        )


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("t.txt", "201\n\n11", "has 2 blocks in line 3, but 3 in line 1"),
        ("t.txt", "201\n103", "has '3' in line 2"),
        ("t.txt", "2 x", "has 'x' in line 1"),
        ("t.txt", "2,0\n1,2", "has ',' in line 1"),
        ("t.txt", "20\n1-1", "has '-' in line 2"),
        ("t.txt", "0.5 1", "has '.' in line 1"),
        ("t.txt", "2\u0661", "has '\u0661' in line 1"),
        ("t.txt", "", "has 0 rows of 0 blocks"),
        ("t.txt", "1" * 4097, "has 1 rows of 4097 blocks"),
        ("t.txt", b"\xff\xfe", "is no text"),
        ("t.json", "[[1, 0], [1.5, 0]]", "has 1.5 in row 2, column 1"),
        ("t.json", "[[1.0, 0.0]]", "has 1.0 in row 1, column 1"),
        ("t.json", "[[1, true]]", "has true in row 1, column 2"),
        ("t.json", "[[1, -1]]", "has -1 in row 1, column 2"),
        ("t.json", "[[1, 0], [2]]", "has 1 blocks in row 2, but 2 in row 1"),
        ("t.json", "[1, 0]", "holds no list of rows"),
        ("t.json", '{"rows": 1}', "holds no list of rows"),
        ("t.json", "[[1,", "is no JSON (Expecting value: line 1 column 5 (char 4))"),
        ("t.npy", "no array", "holds no array as numpy.save writes one"),
        ("t.npy", "", "holds no array as numpy.save writes one"),
        ("t.npy", [[1, 0], [2, 3]], "has 3 in row 2, column 2"),
        ("t.npy", [[1.0, 0.0]], "holds numbers of type float64"),
        ("t.npy", [1, 2], "holds an array of shape (2,)"),
        ("t.npy", [[]], "has 1 rows of 0 blocks"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_the_place_and_the_rule(
    tmp_path: Path, name: str, content: str | bytes | list[object], why: str
) -> None:
    path = tmp_path / name
    if isinstance(content, list):
        np.save(path, np.array(content))
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="table") as caught:
        make_pattern(f"table:file={path}", 8)
    rule = "it must be a rectangle of 1..4096 rows and columns of 0 (EMPTY)"
    assert str(caught.value).startswith(f"table: file {str(path)!r} {why}; {rule}")


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.txt' cannot be read"):
        make_pattern(f"table:file={tmp_path / 'nothing.txt'}", 8)
