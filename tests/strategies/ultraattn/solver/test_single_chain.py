"""The long walk: its counts, its rules and what it reaches."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.ultraattn.blocks import grid_of_table, instance_of
from strategies.ultraattn.solver.instance import FORWARD, Instance, account
from strategies.ultraattn.solver.search import (
    Chains,
    cells_of_blocks,
    evaluated,
    flow_limits,
    prices,
)
from strategies.ultraattn.solver.single_chain import SingleChain
from tests.strategies.ultraattn.brute import optima
from tests.strategies.ultraattn.examples import case, instances, table


@given(instances(), st.integers(0, 99), st.booleans())
@settings(max_examples=25)
def test_its_counts_are_those_of_the_account(instance: Instance, seed: int, many: bool) -> None:
    """So they are for one chain whose moves are looked at together, and for many chains."""
    count, n = (5 if many else 1), instance.devices
    rng = np.random.default_rng(seed)
    chains = Chains(instance, rng.integers(n, size=(count, len(instance.blocks))), seed)
    limit, price = flow_limits(instance, 1), prices(instance)
    fixed = [b for b in range(len(instance.blocks)) if b not in chains.tables.free]
    for _ in range(8):
        before = chains.device.copy()
        if many:
            chains.step(limit, price, 0.0, heat=50.0)  # nearly all are accepted
        else:
            looks = chains.first(limit, price, heat=50.0, looks=7)
            assert 1 <= looks <= 7
        assert (chains.device == before)[:, fixed].all()
        assert ((chains.device != before).sum(axis=1) <= 2).all()  # a move, or two change places
        for device, flow in zip(chains.device, chains.flow, strict=True):
            lines = account(instance, cells_of_blocks(instance, tuple(device.tolist())))
            expected = [
                *(line.received for line in lines),
                *(line.sent for line in lines),
                *(line.work for line in lines),
            ]
            assert flow.tolist() == expected


@given(instances(), st.integers(0, 99))
@settings(max_examples=25)
def test_in_the_cold_only_what_does_not_rise_is_made(instance: Instance, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chains = Chains(instance, rng.integers(instance.devices, size=(1, len(instance.blocks))), seed)
    limit, price = flow_limits(instance, 1), prices(instance)

    def penalty() -> float:
        over = np.maximum(chains.flow[0] - limit, 0)
        return float(over @ (price * over))

    for _ in range(8):
        before, devices = penalty(), chains.device.copy()
        looks = chains.first(limit, price, heat=1e-9, looks=9)
        assert penalty() <= before + 1e-3
        assert looks == 9 or (chains.device != devices).any()


def test_of_moves_looked_at_the_first_that_is_accepted_is_made() -> None:
    instance = case("star", 8, 4)
    chains = Chains(instance, np.zeros((1, len(instance.blocks)), dtype=np.int64), 0)
    limit, price = flow_limits(instance, 1), prices(instance)
    for _ in range(20):  # so hot that a move is refused only where nothing moves, one in four
        assert chains.first(limit, price, heat=1e9, looks=100) <= 30


@given(instances(), st.integers(0, 9))
@settings(max_examples=15)
def test_small_optima_are_reached_within_the_cap(instance: Instance, seed: int) -> None:
    best = optima(instance)
    assert best is not None
    walk = SingleChain(instance, seed)
    end = time.process_time() + 5
    while walk.best is None or walk.best.value > best[0]:
        assert time.process_time() < end
        walk.run(end, best[0])
    found = evaluated(instance, walk.best.devices)
    assert found is not None  # within the cap
    assert (found.value, found.volume) == (walk.best.value, walk.best.volume)
    assert found.value == best[0]


def test_fixed_blocks_stay() -> None:
    instance = instance_of(grid_of_table(table("star", 8)), 8, FORWARD, fix_diagonal=True)
    walk = SingleChain(instance, 1)
    walk.run(time.process_time() + 5, 7)
    assert walk.best is not None
    cells = cells_of_blocks(instance, walk.best.devices)
    assert instance.fixed
    assert all(cells[i][j] == device for i, j, device in instance.fixed)


@pytest.mark.parametrize(
    ("name", "size", "devices", "value"),
    [
        ("star", 8, 8, 6),
        ("streaming", 16, 16, 10),
        ("global_local", 16, 16, 15),
        ("causal", 16, 16, 14),
    ],
)
def test_it_comes_near_known_values(name: str, size: int, devices: int, value: int) -> None:
    walk = SingleChain(case(name, size, devices))
    end = time.process_time() + 20
    while time.process_time() < end and (walk.best is None or walk.best.value > value):
        walk.run(end, value)
    assert walk.best is not None
    assert walk.best.value <= value
