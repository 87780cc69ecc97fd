"""Pairs of chunks as one: plans carry over, at twice the value."""

from dataclasses import replace

import numpy as np
import pytest

from strategies.ultraattn.blocks import grid_of_table, instance_of
from strategies.ultraattn.solver import assign as module
from strategies.ultraattn.solver.assign import assign
from strategies.ultraattn.solver.coarse import coarsened, refined
from strategies.ultraattn.solver.instance import FORWARD, account, all_received
from strategies.ultraattn.solver.instance import most as most_of
from tests.strategies.ultraattn.examples import case, table


@pytest.mark.parametrize("name", ["causal", "star", "streaming", "full"])
def test_a_coarse_plan_is_a_plan_at_twice_the_value(name: str) -> None:
    instance = case(name, 16, 4)
    coarse = coarsened(instance)
    assert coarse is not None
    assert (len(coarse.work), coarse.total) == (8, instance.total)
    found = assign(coarse, seconds=0.3)
    lines = account(instance, refined(instance, found.cells))
    assert most_of(lines) == 2 * found.value
    assert all_received(lines) == 2 * found.volume
    assert [line.work for line in lines] == [line.work for line in found.lines(coarse)]


def test_oblong_tables_have_pairs_too() -> None:
    cells = np.ones((4, 6), dtype=np.int8)
    instance = instance_of(grid_of_table(cells), 2, FORWARD)
    assert coarsened(instance) is None  # three columns each: a pair has two owners
    wide = instance_of(grid_of_table(np.ones((4, 8), dtype=np.int8)), 2, FORWARD)
    coarse = coarsened(wide)
    assert coarse is not None
    assert coarse.work == ((8,) * 4,) * 2


@pytest.mark.parametrize("change", ["owners", "fixed", "inside"])
def test_what_has_no_pairs_is_left_alone(change: str) -> None:
    instance = case("star", 8, 8 if change == "owners" else 4)
    if change == "fixed":
        instance = instance_of(grid_of_table(table("star", 8)), 4, FORWARD, fix_diagonal=True)
    if change == "inside":
        instance = replace(instance, inside=instance.work)
    assert coarsened(instance) is None


def test_a_large_instance_starts_from_its_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = case("causal", 16, 4)
    given = module._coarse_start(instance, 3.0, 0)
    value = most_of(account(instance, given[0]))
    # With no time for more, what came from pairs is what is found.
    monkeypatch.setattr(module, "_coarse_start", lambda *_: given)
    assert assign(instance, seconds=0.01).value <= value
    monkeypatch.setattr(module, "_coarse_start", lambda *_: [])
    assert assign(instance, seconds=0.01).value > value
