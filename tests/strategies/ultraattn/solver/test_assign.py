"""Device tilings: against brute force, known optima, bounds that hold, and proofs that are due."""

import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.plan.problem import Direction
from harness.schedule.scip import SolverStatus
from strategies.ultraattn.blocks import grid_of_table, instance_of
from strategies.ultraattn.solver import assign as module
from strategies.ultraattn.solver import branch_price, columns
from strategies.ultraattn.solver.assign import Assigned, assign
from strategies.ultraattn.solver.block_milp import decide_by_blocks
from strategies.ultraattn.solver.bounds import lines_bound, lower_bound
from strategies.ultraattn.solver.instance import FORWARD, Instance, account, all_received, most
from strategies.ultraattn.solver.published_instances import logged
from strategies.ultraattn.solver.search import ManyChains, cells_of_blocks
from strategies.ultraattn.solver.store import Cache, assign_cached
from tests.strategies.ultraattn.brute import optima, traffic
from tests.strategies.ultraattn.examples import SEED, case, instances, table

_B = Direction.BACKWARD


def checked(instance: Instance, found: Assigned) -> Assigned:
    """An answer, once its numbers are those of its cells and keep the rules."""
    lines = account(instance, found.cells)
    assert most(lines) == found.value
    assert all_received(lines) == found.volume
    assert max(line.work for line in lines) <= instance.cap
    assert all(found.cells[i][j] == device for i, j, device in instance.fixed)
    assert found.bound <= found.value
    assert (
        (found.status is SolverStatus.OPTIMAL) == (found.bound == found.value) == (found.gap == 0)
    )
    return found


@given(instances())
@settings(max_examples=15)
def test_the_optimum_is_that_of_brute_force(instance: Instance) -> None:
    best = optima(instance)
    assert best is not None  # the cap is one that some assignment keeps
    assert lower_bound(instance) <= best[0]
    found = checked(instance, assign(instance, prove=True))
    assert (found.value, found.bound) == (best[0], best[0])
    assert found.volume >= best[2]


@given(instances())
@settings(max_examples=15)
def test_both_programs_decide_as_brute_force_does(instance: Instance) -> None:
    best = optima(instance)
    assert best is not None
    end = time.process_time() + 60
    for value in (best[0] - 1, best[0]):
        if value < 0:
            continue
        by_sets = branch_price.decide(instance, value, end)
        assert by_sets is not None
        answer, by_blocks = decide_by_blocks(instance, value, 60)
        if value < best[0]:
            assert by_sets.status is SolverStatus.INFEASIBLE
            assert answer.status is SolverStatus.INFEASIBLE
            continue
        for devices in (by_sets.devices, by_blocks):
            assert devices is not None
            lines = account(instance, cells_of_blocks(instance, devices))
            assert most(lines) <= value
            assert max(line.work for line in lines) <= instance.cap


@given(instances(), st.integers(0, 3))
@settings(max_examples=25)
def test_what_nobody_can_use_of_a_maximum_is_counted(instance: Instance, more: int) -> None:
    """Others add whole steps, so a device whose own amount leaves a part of one wastes it."""
    best = optima(instance)
    assert best is not None
    limit = best[0] + more
    found = columns.enumerate_columns(instance, limit)
    assert found is not None
    n, w = instance.devices, instance.weights
    for device, mask, coefficient in zip(found.device, found.mask, found.coefficient, strict=True):
        owners = {b: int(device) for k, b in enumerate(instance.blocks) if int(mask) >> k & 1}
        flows = traffic(instance, owners)
        for side, others in enumerate(((w.row_out, w.column_out), (w.row_in, w.column_in))):
            counted = coefficient[len(instance.blocks) + side * n :][:n].tolist()
            own = flows[device][side]
            fill = (a * others[0] + b * others[1] for a in range(20) for b in range(20))
            reached = max(own + more for more in fill if own + more <= limit)
            assert counted[device] >= own
            assert counted[device] - own <= limit - reached  # only what nobody can use
            if len(set(others) - {0}) == 1 or others[1] % others[0] == 0:
                assert counted[device] - own == limit - reached
            for d in range(n):
                assert d == device or counted[d] == flows[d][side]


def test_the_worked_example_has_24_optimal_assignments_by_the_solver_too() -> None:
    """Forbid each optimum that is found until none is left."""
    instance = instance_of(grid_of_table(SEED), 4, FORWARD)
    assert assign(instance, prove=True).value == 4
    found = columns.enumerate_columns(instance, 4)
    assert found is not None
    by_device = [
        [(int(m), c) for m, c in zip(found.mask[mine], found.coefficient[mine], strict=True)]
        for mine in (np.flatnonzero(found.device == d) for d in range(4))
    ]
    partial = [(0, np.zeros(found.coefficient.shape[1]))]
    for sets in by_device:
        partial = [(m | n, c + d) for m, c in partial for n, d in sets if not m & n]
    whole = [c for m, c in partial if m == 2**7 - 1 and c[7:].max() <= 4]
    assert len(whole) == 24
    assert instance_of(grid_of_table(SEED), 4, FORWARD, fix_diagonal=True).fixed
    fixed = instance_of(grid_of_table(SEED), 4, FORWARD, fix_diagonal=True)
    assert assign(fixed, prove=True).value == 5


KNOWN = [
    # pattern, degree, devices, direction, proved optimum; facts measured with other solvers
    ("causal", 4, 4, Direction.FORWARD, 5),
    ("full", 4, 4, Direction.FORWARD, 4),
    ("full", 8, 8, Direction.FORWARD, 8),
    ("full", 16, 16, Direction.FORWARD, 12),
    ("star", 8, 8, Direction.FORWARD, 6),
    ("streaming", 8, 8, Direction.FORWARD, 6),
    ("streaming", 8, 4, Direction.FORWARD, 6),
    ("star", 8, 8, _B, 8),
]


@pytest.mark.parametrize(("name", "size", "devices", "direction", "value"), KNOWN)
def test_known_optima_are_proved(
    name: str, size: int, devices: int, direction: Direction, value: int
) -> None:
    instance = case(name, size, devices, direction)
    found = checked(instance, assign(instance, prove=True))
    assert (found.value, found.bound) == (value, value)


def test_the_group_of_global_and_local_blocks_has_its_optima() -> None:
    cells = table("global_local", 16)[:8, :8]
    free = instance_of(grid_of_table(cells), 8, FORWARD)
    fixed = instance_of(grid_of_table(cells), 8, FORWARD, fix_diagonal=True)
    assert checked(free, assign(free, prove=True)).bound == 7
    assert checked(fixed, assign(fixed, prove=True)).bound == 10


def test_an_answer_without_time_says_so() -> None:
    instance = case("causal", 16, 8)
    found = checked(instance, assign(instance, seconds=0.05))
    assert found.status is SolverStatus.FEASIBLE
    assert found.source == "budget"
    assert 0 < found.gap < 1


@pytest.mark.slow  # how good the plan is depends on what the machine does in two seconds
def test_the_default_budget_is_kept() -> None:
    instance = case("causal", 16, 8)
    found = checked(instance, assign(instance))
    assert found.seconds < 2.6  # CPU seconds; SCIP looks at its clock between two steps
    assert found.value <= 16


def test_a_search_gets_its_time_whatever_the_bounds_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that took a second left the blocks of a causal node as they were first put."""
    instance = instance_of(grid_of_table(table("causal", 8)), 8, FORWARD)
    found: list[tuple[str, float]] = []
    run = ManyChains.run

    def slow(*of: float) -> bool:
        while time.process_time() <= of[-1] + 0.2:  # a program is not cut off while it is set up
            pass
        found.append(("programs", time.process_time()))
        return False

    def noted(search: ManyChains, end: float, *rest: int, **more: int) -> None:
        found.append(("search", end - time.process_time()))
        run(search, end, *rest, **more)

    monkeypatch.setattr(module, "refute", slow)
    monkeypatch.setattr(ManyChains, "run", noted)
    begin = time.process_time()
    assert assign(instance, seconds=0.4).value < 20
    first, second, third = found[:3]
    assert (first[0], second[0], third[0]) == ("search", "programs", "search")
    assert 0.0 < first[1] <= 0.04
    assert second[1] - begin == pytest.approx(0.4, abs=0.1)  # half of the time, and what it overran
    assert third[1] > 0.05


def test_more_slack_never_costs() -> None:
    values = []
    for slack in (0, 2, 6):
        instance = instance_of(grid_of_table(table("star", 8)), 8, FORWARD, slack=slack)
        values.append(assign(instance, prove=True).value)
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]


def test_a_given_assignment_is_never_made_worse() -> None:
    instance = case("streaming", 16, 8)
    good = assign(instance, seconds=1.5)
    again = assign(instance, seconds=0.0, given=[good.cells])
    assert (again.value, again.volume) == (good.value, good.volume)


def test_an_impossible_cap_is_refused() -> None:
    instance = case("full", 4, 4)
    with pytest.raises(ValueError, match="raise the cap"):
        assign(Instance(**{**_fields(instance), "cap": 6}))


def _fields(instance: Instance) -> dict[str, object]:
    return {name: getattr(instance, name) for name in type(instance).__dataclass_fields__}


def test_a_hot_column_needs_several_devices() -> None:
    cells = np.zeros((8, 8), dtype=np.int8)
    cells[:, 0] = 1
    instance = instance_of(grid_of_table(cells), 8, FORWARD)
    assert lines_bound(instance) == 14  # UltraAttn's log: V* = 14 for this table
    assert assign(instance).value == 14


def test_fewer_key_heads_make_columns_cheap_and_plans_cheaper() -> None:
    light = FORWARD.__class__(row_in=4, row_out=4, column_in=2, column_out=0, unit=4)
    grid = grid_of_table(table("star", 8))
    cheap, dear = instance_of(grid, 4, light), instance_of(grid, 4, FORWARD)
    found = checked(cheap, assign(cheap, seconds=1))
    assert found.value / light.unit < checked(dear, assign(dear, prove=True)).bound


@pytest.mark.slow
def test_logged_instances_are_proved_at_most_at_the_logged_value() -> None:
    seconds = []
    for each in logged():
        for fix in (True, False):
            instance = instance_of(grid_of_table(each.table), 8, FORWARD, fix_diagonal=fix)
            found = checked(instance, assign(instance, prove=True))
            assert found.status is SolverStatus.OPTIMAL
            assert found.value <= each.value
            seconds.append(found.seconds)
    assert np.median(seconds) <= 2
    assert max(seconds) <= 15  # CPU seconds on a busy machine; alone all end within 10


def test_ctrl_c_while_planning_leaves_no_trace(tmp_path: Path) -> None:
    instance = case("causal", 8, 8, _B)
    cache = Cache(tmp_path)
    kept = assign(case("star", 8, 4), prove=True)
    cache.put(case("star", 8, 4), kept)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for wait_s in (0.1, 1.5):  # while it bounds, and while it prices sets of blocks
        with (
            subprocess.Popen(["sh", "-c", f"sleep {wait_s}; kill -INT {os.getpid()}"]),
            pytest.raises(KeyboardInterrupt),
        ):
            assign_cached(instance, cache, seconds=30, prove=True)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert assign_cached(case("star", 8, 4), cache, prove=True) == kept
    again = checked(instance, assign_cached(instance, cache, seconds=0.3))
    assert cache.get(instance) == again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "direction", "value"),
    [
        ("causal", 8, Direction.FORWARD, 7),
        ("causal", 4, Direction.FORWARD, 8),
        ("causal", 8, _B, 12),
        ("streaming", 8, _B, 9),
        ("group", 8, Direction.FORWARD, 8),
        ("group", 8, _B, 13),
        ("full", 8, _B, 13),
    ],
)
def test_slower_optima_are_proved(
    name: str, devices: int, direction: Direction, value: int
) -> None:
    instance = case(name, 8, devices, direction)
    found = checked(instance, assign(instance, prove=True))
    assert (found.value, found.bound) == (value, value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "value", "seconds"),
    [
        ("causal", 8, 14, 30),
        ("star", 8, 12, 30),
        ("streaming", 8, 11, 60),  # a walk stays at 12; a crowd follows where there is time
        ("global_local", 8, 9, 30),
        ("causal", 16, 12, 30),
        ("star", 16, 10, 30),
        ("streaming", 16, 9, 30),
        ("global_local", 16, 15, 30),
    ],
)
def test_large_grids_reach_the_best_known_values(
    name: str, devices: int, value: int, seconds: float
) -> None:
    instance = case(name, 16, devices)
    found = checked(instance, assign(instance, seconds=seconds))
    assert found.value <= value
    assert found.bound >= 1
