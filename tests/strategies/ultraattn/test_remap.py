"""Orders of blocks: given, modulo and found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patterns import make_pattern
from patterns.tables import strided_order, strided_table
from strategies.ultraattn.blocks import Grid, grid_of_table, instance_of
from strategies.ultraattn.remap import BlockOrder, checked, modulo, orders
from strategies.ultraattn.solver.assign import assign
from strategies.ultraattn.solver.instance import FORWARD, even_owners


def reordered(grid: Grid, order: BlockOrder) -> Grid:
    """The grid with rows and columns at their places."""
    return Grid(work=tuple(tuple(grid.work[i][j] for j in order) for i in order), full=grid.full)


def value(grid: Grid, order: BlockOrder, devices: int) -> int:
    """The largest amount of a plan of an order."""
    return assign(instance_of(reordered(grid, order), devices, FORWARD), seconds=0.3).value


def fetched(grid: Grid, order: BlockOrder, devices: int) -> list[int]:
    """How many chunks each row owner lacks, the most first."""
    table = np.array(reordered(grid, order).work) > 0
    owner = np.array(even_owners(len(order), devices))
    lacks = [table[owner == d].any(axis=0) & (owner != d) for d in range(devices)]
    return sorted((int(each.sum()) for each in lacks), reverse=True)


def test_modulo_is_the_papers_map() -> None:
    order = modulo(16, 4)
    assert order == strided_order(16, 4)
    place = {block: p for p, block in enumerate(order)}
    assert all(place[4 * i + r] == 4 * r + i for i in range(4) for r in range(4))
    assert [place[c] // 4 for c in range(16)] == [c % 4 for c in range(16)]


def test_a_reordered_grid_is_the_pattern_after_its_remap() -> None:
    original = grid_of_table(strided_table(16, 4, 3))
    gathered = make_pattern("strided", 64)
    parts = [range(4 * i, 4 * i + 4) for i in range(16)]
    areas = gathered.areas(parts, parts)
    assert reordered(original, modulo(16, 4)).work == tuple(
        tuple(int(a > 0) * 2 for a in row) for row in areas
    )


@pytest.mark.parametrize("devices", [2, 4])
def test_strided_in_original_order_finds_the_hand_made_value(devices: int) -> None:
    grid = grid_of_table(strided_table(16, 4, 3))
    order, *_ = orders(grid, [devices])
    assert value(grid, tuple(range(16)), devices) > 0
    assert value(grid, order, devices) == 0


def test_strided_on_eight_devices_is_no_worse_than_by_hand() -> None:
    grid = grid_of_table(strided_table(16, 4, 3))
    assert value(grid, modulo(16, 4), 8) == 4
    assert min(value(grid, order, 8) for order in orders(grid, [8])) <= 4


def test_a_shuffled_block_diagonal_is_found_without_a_stride() -> None:
    rng = np.random.default_rng(3)
    groups = np.kron(np.eye(3, dtype=np.int8), np.ones((4, 4), dtype=np.int8))
    shuffle = rng.permutation(12)
    grid = grid_of_table(groups[np.ix_(shuffle, shuffle)])
    assert value(grid, tuple(range(12)), 3) > 0
    assert value(grid, orders(grid, [3])[0], 3) == 0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_an_order_is_a_permutation_that_lets_row_owners_fetch_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = grid_of_table((rng.random((6, 6)) < 0.5).astype(np.int8))
    plain = fetched(grid, tuple(range(6)), 3)
    for order in orders(grid, [3]):
        assert sorted(order) == list(range(6))
        found = fetched(grid, order, 3)
        assert (found[0], sum(found)) < (plain[0], sum(plain))


def test_a_pattern_that_no_order_helps_keeps_its_own() -> None:
    assert orders(grid_of_table(np.ones((4, 4), dtype=np.int8)), [4]) == []


def test_a_given_order_comes_first_where_it_is_as_good() -> None:
    grid = grid_of_table(strided_table(16, 4, 3))
    given = modulo(16, 4)[::-1]
    assert orders(grid, [4], given=[given])[0] == given


def test_bad_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="permutation"):
        checked([0, 2, 2], 3)
    with pytest.raises(ValueError, match="stride"):
        modulo(4, 5)
    with pytest.raises(ValueError, match="permutation"):
        orders(grid_of_table(np.eye(4, dtype=np.int8)), [2], given=[(0, 1)])
