"""Orders of blocks: given, modulo and found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patterns import make_pattern
from patterns.tables import global_local_table, strided_order, strided_table
from strategies.ultraattn.account import BACKWARD, FORWARD
from strategies.ultraattn.device import assign
from strategies.ultraattn.grid import Grid, grid_of_table, instance_of
from strategies.ultraattn.remap import checked, find_order, modulo, reordered


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
    order, plan = find_order(grid, devices, FORWARD, seconds=0.3)
    assert plan.value == 0
    assert sorted(order) == list(range(16))


def test_strided_on_eight_devices_is_no_worse_than_by_hand() -> None:
    grid = grid_of_table(strided_table(16, 4, 3))
    hand = assign(instance_of(reordered(grid, modulo(16, 4)), 8, FORWARD), seconds=0.3)
    _, plan = find_order(grid, 8, FORWARD, seconds=0.3)
    assert hand.value == 4
    assert plan.value <= hand.value


def test_a_shuffled_block_diagonal_is_found_without_a_stride() -> None:
    rng = np.random.default_rng(3)
    groups = np.kron(np.eye(3, dtype=np.int8), np.ones((4, 4), dtype=np.int8))
    shuffle = rng.permutation(12)
    grid = grid_of_table(groups[np.ix_(shuffle, shuffle)])
    assert assign(instance_of(grid, 3, BACKWARD), seconds=0.3).value > 0
    _, plan = find_order(grid, 3, BACKWARD, seconds=0.3)
    assert plan.value == 0


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_no_order_is_worse_than_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = grid_of_table((rng.random((6, 6)) < 0.5).astype(np.int8))
    plain = assign(instance_of(grid, 3, FORWARD), seconds=0.5)
    order, plan = find_order(grid, 3, FORWARD, seconds=0.5)
    assert (plan.value, plan.volume) <= (plain.value, plain.volume)
    assert plan.cells  # and it is a plan of that order
    assert instance_of(reordered(grid, order), 3, FORWARD).total == grid.total


def test_a_pattern_that_no_order_helps_keeps_its_own() -> None:
    grid = grid_of_table(np.ones((4, 4), dtype=np.int8))
    assert find_order(grid, 4, FORWARD, seconds=0.2)[0] == (0, 1, 2, 3)
    grid = grid_of_table(global_local_table(8, 1, 1))
    assert sorted(find_order(grid, 4, FORWARD, seconds=0.2)[0]) == list(range(8))


def test_bad_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="permutation"):
        checked([0, 2, 2], 3)
    with pytest.raises(ValueError, match="stride"):
        modulo(4, 5)
    with pytest.raises(ValueError, match="same blocks"):
        find_order(Grid(work=((2, 2),), full=2), 2, FORWARD)
