"""The population: how chains take the places of others, its rules and what it reaches."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.ultraattn.blocks import grid_of_table, instance_of
from strategies.ultraattn.solver import assign
from strategies.ultraattn.solver.instance import FORWARD, Instance, account
from strategies.ultraattn.solver.population import Population
from strategies.ultraattn.solver.search import (
    BestAssignment,
    Chains,
    cells_of_blocks,
    evaluated,
    flow_limits,
    packed_assignment,
    prices,
)
from tests.strategies.ultraattn.brute import optima
from tests.strategies.ultraattn.examples import case, instances, table


def packed_best(instance: Instance) -> BestAssignment:
    found = evaluated(instance, packed_assignment(instance))
    assert found is not None
    return found


@given(instances(), st.integers(0, 99), st.sampled_from([0.0, 0.01, 0.3]))
@settings(max_examples=25)
def test_chains_go_on_in_the_numbers_that_a_colder_heat_gives_them(
    instance: Instance, seed: int, colder: float
) -> None:
    n, count, limit, price = instance.devices, 40, flow_limits(instance, 1), prices(instance)
    rng = np.random.default_rng(seed)
    chains = Chains(instance, rng.integers(n, size=(count, len(instance.blocks))), seed)
    before = list(map(tuple, chains.device.tolist()))
    weights = {}
    for devices in before:
        lines = account(instance, cells_of_blocks(instance, devices))
        flow = np.array([*(x.received for x in lines), *(x.sent for x in lines)])
        over = np.maximum(np.array([*flow, *(x.work for x in lines)]) - limit, 0)
        penalty = float(over @ (price * over)) + 0.2 * sum(x.received for x in lines)
        weights[devices] = np.exp(-colder * penalty) * before.count(devices)
    whole = sum(weights.values())
    chains.resample(limit, price, 0.2, colder)
    after = list(map(tuple, chains.device.tolist()))
    assert len(after) == count
    for devices, weight in weights.items():
        copies = before.count(devices)  # each of them is rounded on its own
        assert abs(after.count(devices) - count * weight / whole) <= copies + 1e-2
    chains.step(limit, price, 0.2, heat=50.0)  # and their counts go with them
    for devices, flow in zip(chains.device.tolist(), chains.flow, strict=True):
        lines = account(instance, cells_of_blocks(instance, tuple(devices)))
        assert flow[:n].tolist() == [line.received for line in lines]
        assert flow[2 * n :].tolist() == [line.work for line in lines]


@given(instances(), st.integers(0, 9))
@settings(max_examples=10)
def test_small_optima_are_reached_within_the_cap(instance: Instance, seed: int) -> None:
    best = optima(instance)
    assert best is not None
    population = Population(instance, seed, packed_best(instance))
    population.run(time.process_time() + 5, best[0])
    assert (
        evaluated(instance, population.best.devices) == population.best
    )  # its numbers, within the cap
    assert population.best.value == best[0]


def test_fixed_blocks_stay() -> None:
    instance = instance_of(grid_of_table(table("star", 8)), 8, FORWARD, fix_diagonal=True)
    population = Population(instance, 1, packed_best(instance))
    population.run(time.process_time() + 5, 8)
    cells = cells_of_blocks(instance, population.best.devices)
    assert population.best.value <= 8
    assert instance.fixed
    assert all(cells[i][j] == owner for i, j, owner in instance.fixed)


@pytest.mark.parametrize(("seconds", "wanted"), [(2.0, False), (59.0, False), (60.0, True)])
def test_only_long_budgets_have_a_population(
    monkeypatch: pytest.MonkeyPatch, seconds: float, wanted: bool
) -> None:
    """So that plans of the default budget stay what they are."""
    asked = []

    class SeenError(Exception):
        """A population was made, or the walk began without one."""

    def population(*_: object) -> None:
        asked.append(True)
        raise SeenError

    def walk(*_: object) -> None:
        raise SeenError

    monkeypatch.setattr(assign, "_coarse_start", lambda *_: [])
    monkeypatch.setattr(assign, "Population", population)
    monkeypatch.setattr(assign.SingleChain, "run", walk)
    with pytest.raises(SeenError):
        assign.assign(case("streaming", 16, 8), seconds=seconds)
    assert bool(asked) == wanted
