"""The published tables: as drawn in the paper, and as its nodes see them."""

import numpy as np
import pytest

from patterns.table import simplify
from strategies.ultraattn.blocks import grid_of_table
from strategies.ultraattn.solver.published_instances import (
    SEED,
    SEED_TABLES,
    at_degree,
    logged,
    node_blocks,
)


def rows(text: str) -> list[list[int]]:
    return [[int(digit) for digit in row] for row in text.split()]


def test_the_worked_example_is_the_first_column_and_the_diagonal() -> None:
    assert SEED.tolist() == rows("1000 1100 1010 1001")


@pytest.mark.parametrize(
    ("name", "blocks", "work"),
    [
        ("full", 1, 1),
        ("causal", 1, 0.5),
        ("strided", 56, 56),
        ("global_local", 46, 46),
        ("star", 7, 5),
        ("streaming", 26, 22),
    ],
)
def test_the_six_patterns_hold_the_published_blocks(name: str, blocks: int, work: float) -> None:
    table = SEED_TABLES[name]
    assert np.count_nonzero(table) == blocks
    assert grid_of_table(table).total / 2 == work


def test_strided_is_the_pattern_of_original_order_at_its_new_places() -> None:
    for c in range(16):
        for d in range(16):
            sees = c % 4 == d % 4 and abs(c - d) <= 8
            assert SEED_TABLES["strided"][4 * (c % 4) + c // 4, 4 * (d % 4) + d // 4] == sees


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (2, "11111100 11111100 11111111 11111111 11111111 11111111 00111111 00111111"),
        (3, "11110000 11110000 11110000 11110000 11111111 11111111 11111111 11111111"),
        (5, "11111111 11000000 10100000 10010000 10001000 10000100 10000010 10000001"),
        (9, "11111111 11111111 11110000 11110000 11001100 11001100 11000011 11000011"),
        (15, "11110000 11110000 11110000 11110000 00001111 00001111 00001111 00001111"),
    ],
)
def test_logged_tables_are_as_in_the_logs(index: int, text: str) -> None:
    assert logged()[index].table.tolist() == rows(text)


def test_nodes_see_each_distinct_block_once_and_all_of_the_pattern() -> None:
    kinds = {
        name: [len(node_blocks(t, n, 8)) for n in (2, 4, 8)] for name, t in SEED_TABLES.items()
    }
    assert kinds == {
        "full": [1, 1, 1],
        "causal": [2, 2, 2],
        "strided": [1, 1, 3],
        "global_local": [4, 4, 4],
        "star": [3, 2, 2],
        "streaming": [3, 4, 2],
    }
    blocks = node_blocks(SEED_TABLES["global_local"], 4, 8)
    assert list(blocks) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert simplify(blocks[1, 1]).tolist() == np.eye(4).tolist()


def test_a_degree_is_a_multiple_of_the_table() -> None:
    with pytest.raises(ValueError, match=r"degree \(12\) must be a multiple .* 16"):
        at_degree(SEED_TABLES["strided"], 12)
