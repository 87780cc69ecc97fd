"""The tree of restricted partitions: renamings that are ones, goes on, and decides as it should."""

import time
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings

from harness.schedule.scip import SolverStatus
from strategies.ultraattn.blocks import grid_of_table, instance_of
from strategies.ultraattn.solver.branch_price import Tree, _lines, decide, renamings
from strategies.ultraattn.solver.columns import enumerate_columns
from strategies.ultraattn.solver.instance import BACKWARD, FORWARD, Instance, account, most
from strategies.ultraattn.solver.published_instances import SEED, SEED_TABLES, node_blocks
from strategies.ultraattn.solver.search import cells_of_blocks
from tests.strategies.ultraattn.brute import optima
from tests.strategies.ultraattn.examples import instances

# Devices are interchangeable in pairs; the optimum, 7, is not proved without branching.
LOWER = instance_of(grid_of_table(node_blocks(SEED_TABLES["streaming"], 2, 8)[1, 0]), 8, FORWARD)


def far() -> float:
    return time.process_time() + 60


def renamed(instance: Instance, to: tuple[int, ...]) -> Instance:
    """The instance with device d called to[d], its chunks moved with it (one chunk a device)."""
    back = [to.index(d) for d in range(len(to))]
    return replace(
        instance,
        work=tuple(
            tuple(instance.work[back[i]][back[j]] for j in range(len(to))) for i in range(len(to))
        ),
        fixed=tuple(sorted((to[i], to[j], to[d]) for i, j, d in instance.fixed)),
    )


@pytest.mark.parametrize("name", ["seed", "seed fixed", "column", "lower", "odd fixed"])
def test_renamings_are_all_that_leave_the_instance_as_it_is(name: str) -> None:
    table = {
        "column": SEED * [1, 0, 0, 0],
        "lower": node_blocks(SEED_TABLES["causal"], 1, 4)[0, 0],
    }.get(name, SEED)
    instance = instance_of(grid_of_table(table), 4, FORWARD, fix_diagonal=name == "seed fixed")
    if name == "odd fixed":
        instance = replace(instance, fixed=((2, 0, 3),))
    same = [to for to in permutations(range(4)) if renamed(instance, to) == instance]
    lines = _lines(instance)
    found = list(renamings(instance, lines))
    assert len(found) == len(same)
    expected = {"seed": 6, "seed fixed": 6, "column": 6, "lower": 1, "odd fixed": 1}
    assert len(same) == expected[name]
    keys = list(lines)
    images = {
        tuple(renaming[k * 4 + d] for k in range(len(keys)) for d in range(4)) for renaming in found
    }
    assert images == {
        tuple(keys.index((line, to[chunk])) * 4 + to[d] for line, chunk in keys for d in range(4))
        for to in same
    }


@given(instances())
@settings(max_examples=25, deadline=None)
def test_it_decides_as_brute_force_does(instance: Instance) -> None:
    best = optima(instance)
    assert best is not None
    for value in range(max(0, best[0] - 2), best[0] + 2):
        decision = decide(instance, value, far())
        assert decision is not None
        if value < best[0]:
            assert decision.status is SolverStatus.INFEASIBLE
            continue
        assert decision.status is SolverStatus.FEASIBLE
        assert decision.devices is not None
        lines = account(instance, cells_of_blocks(instance, decision.devices))
        assert most(lines) <= value
        assert max(line.work for line in lines) <= instance.cap


def test_a_tree_that_branches_decides_both_ways() -> None:
    cross = node_blocks(SEED_TABLES["global_local"], 2, 8)[0, 0]
    for instance, value in ((instance_of(grid_of_table(cross), 8, BACKWARD), 11), (LOWER, 7)):
        columns = enumerate_columns(instance, value - 1)
        assert columns is not None
        tree = Tree(instance, columns, value - 1, far())
        assert tree.run(far()).status is SolverStatus.INFEASIBLE
        assert tree.nodes > 0
    found = decide(instance, value, far())
    assert found is not None
    assert found.devices is not None
    assert most(account(instance, cells_of_blocks(instance, found.devices))) == value


def test_a_tree_without_time_goes_on_later() -> None:
    columns = enumerate_columns(LOWER, 6)
    assert columns is not None
    tree = Tree(LOWER, columns, 6, far())
    assert tree.run(time.process_time()).status is SolverStatus.TIME_LIMIT
    slice_s = 0.01
    while tree.run(time.process_time() + slice_s).status is SolverStatus.TIME_LIMIT:
        slice_s *= 1.5
        assert slice_s < 30
    whole = Tree(LOWER, columns, 6, far())
    whole.run(far())
    assert tree.nodes >= whole.nodes > 0
    assert tree.run(far()).status is SolverStatus.INFEASIBLE
