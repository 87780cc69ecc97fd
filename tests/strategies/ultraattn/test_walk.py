"""The long walk: its counts, its rules and what it reaches."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.ultraattn.account import FORWARD, Instance, account
from strategies.ultraattn.grid import grid_of_table, instance_of
from strategies.ultraattn.search import cells_of_blocks, judged
from strategies.ultraattn.walk import State, Walk
from tests.strategies.ultraattn.brute import optima
from tests.strategies.ultraattn.examples import case, instances, table


@given(instances(), st.data())
@settings(max_examples=25)
def test_its_counts_are_those_of_the_account(instance: Instance, data: st.DataObject) -> None:
    devices = st.integers(0, instance.devices - 1)
    blocks = len(instance.blocks)
    state = State(instance, data.draw(st.lists(devices, min_size=blocks, max_size=blocks)))
    for _ in range(6):
        block = data.draw(st.integers(0, blocks - 1))
        state.move(block, state.device[block], data.draw(devices))
        lines = account(instance, cells_of_blocks(instance, tuple(state.device)))
        assert state.received == [line.received for line in lines]
        assert state.sent == [line.sent for line in lines]
        assert state.load == [line.work for line in lines]


@given(instances(), st.integers(0, 9))
@settings(max_examples=15)
def test_small_optima_are_reached_within_the_cap(instance: Instance, seed: int) -> None:
    best = optima(instance)
    assert best is not None
    walk = Walk(instance, seed)
    end = time.process_time() + 5
    while walk.best is None or walk.best.value > best[0]:
        assert time.process_time() < end
        walk.run(end, best[0])
    found = judged(instance, walk.best.devices)
    assert found is not None  # within the cap
    assert (found.value, found.volume) == (walk.best.value, walk.best.volume)
    assert found.value == best[0]


def test_fixed_blocks_stay() -> None:
    instance = instance_of(grid_of_table(table("star", 8)), 8, FORWARD, fix_diagonal=True)
    walk = Walk(instance, 1)
    walk.run(time.process_time() + 5, 7)
    assert walk.best is not None
    cells = cells_of_blocks(instance, walk.best.devices)
    assert instance.fixed
    assert all(cells[i][j] == device for i, j, device in instance.fixed)


@pytest.mark.parametrize(
    ("name", "size", "devices", "value"),
    [("star", 8, 8, 6), ("streaming", 16, 16, 10), ("global_local", 16, 16, 15)],
)
def test_it_comes_near_known_values(name: str, size: int, devices: int, value: int) -> None:
    walk = Walk(case(name, size, devices))
    end = time.process_time() + 20
    while time.process_time() < end and (walk.best is None or walk.best.value > value):
        walk.run(end, value)
    assert walk.best is not None
    assert walk.best.value <= value
