"""Grids: work of blocks, the cap, and the degree."""

import numpy as np
import pytest

from harness.plan.sharding import split
from patterns import make_pattern, refine
from patterns.tables import star_table
from strategies.ultraattn.blocks import (
    grid_of,
    grid_of_table,
    imbalance,
    instance_of,
    paper_cap,
    partition_degree,
)
from strategies.ultraattn.solver.instance import FORWARD, account, own_rows


@pytest.mark.parametrize(("size", "expected"), [(2, 1.00), (3, 0.78), (4, 0.0), (5, 0.28)])
def test_imbalance_of_causal_on_four_devices_is_the_papers(size: int, expected: float) -> None:
    seqlen = 60
    parts = split(seqlen, size)
    grid = grid_of(make_pattern("causal", seqlen), parts, parts)
    assert grid.full == 2
    assert imbalance(grid, 4) == pytest.approx(expected, abs=0.005)


def test_the_degree_is_the_smallest_that_meets_epsilon() -> None:
    causal = make_pattern("causal", 120)
    assert partition_degree(causal, 4, 0.5, step=1) == 4  # degrees 1 to 3 are worse; 4 has none
    assert partition_degree(causal, 4, 0.8, step=1) == 3
    assert partition_degree(causal, 4, 1.0, step=1) == 2
    assert partition_degree(causal, 3, 0.0) % 3 == 0


def test_a_pattern_that_refines_has_the_grid_of_its_refined_table() -> None:
    parts = split(96, 12)
    grid = grid_of(make_pattern("star", 96), parts, parts)
    assert grid == grid_of_table(refine(star_table(4), 3))


def test_uneven_chunks_weigh_their_exact_areas() -> None:
    pattern = make_pattern("causal", 7)
    parts = [range(2), range(2, 6), range(6, 7)]
    grid = grid_of(pattern, parts, parts)
    assert grid.work == ((3, 0, 0), (8, 10, 0), (2, 4, 1))
    assert grid.full == 16


def test_chunks_that_differ_by_a_token_are_alike() -> None:
    for seqlen in (7, 8, 1001, 1003):
        parts = split(seqlen, 3)
        grid = grid_of(make_pattern("causal", seqlen), parts, parts)
        assert (grid.work, grid.full) == (((1, 0, 0), (2, 1, 0), (2, 2, 1)), 2)


def test_large_uneven_chunks_are_rounded_but_never_to_nothing() -> None:
    pattern = make_pattern("causal", 100_003)
    parts = [range(33_330), range(33_330, 66_668), range(66_668, 100_003)]
    grid = grid_of(pattern, parts, parts)
    assert grid.full == 4096
    assert [w for row in grid.work for w in row if w] == pytest.approx(
        [2048, 4096, 2048, 4096, 4096, 2048], abs=1
    )
    window = make_pattern("window:left=0", 100_003)
    assert all(grid_of(window, parts, parts).work[i][i] == 1 for i in range(3))


def test_oblong_grids_take_cross_attention() -> None:
    pattern = make_pattern("full", 30, 70, cross=True)
    grid = grid_of(pattern, split(30, 3), split(70, 5))
    assert grid.work == ((2,) * 5,) * 3


def test_the_cap_is_the_papers_and_rises_only_where_nothing_fits() -> None:
    causal = grid_of_table(refine(np.array([[2]], dtype=np.int8), 8))
    assert paper_cap(causal, 8) == 8
    assert instance_of(causal, 8, FORWARD).cap == 8
    assert instance_of(causal, 8, FORWARD, slack=3).cap == 11
    # three FULL beside the fixed half leave four of 28 over: the authors' code adds half a block
    assert instance_of(causal, 8, FORWARD, fix_diagonal=True).cap == 9


def test_the_diagonal_is_fixed_only_where_all_of_it_is_there() -> None:
    whole = grid_of_table(np.array([[1, 0], [1, 2]], dtype=np.int8))
    holed = grid_of_table(np.array([[1, 1], [1, 0]], dtype=np.int8))
    assert instance_of(whole, 2, FORWARD, fix_diagonal=True).fixed == ((0, 0, 0), (1, 1, 1))
    assert instance_of(holed, 2, FORWARD, fix_diagonal=True).fixed == ()


def test_more_chunks_than_a_multiple_of_the_devices_are_dealt_unevenly() -> None:
    instance = instance_of(grid_of_table(np.ones((5, 5), dtype=np.int8)), 3, FORWARD)
    lines = account(instance, own_rows(instance))
    assert [line.work for line in lines] == [20, 20, 10]
    assert [line.B for line in lines] == [3, 3, 4]
