"""Fetching late: the plan stays right, inputs come no sooner than said, and ranks hold less."""

from dataclasses import replace

import pytest

from harness.cluster.presets import cluster
from harness.memory.ledger import ledger
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Task, Tensor, Tile, Transfer
from harness.schedule.within_memory import fetched_late, within_memory
from harness.simulate.simulator import simulate
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

KEYS = {Tensor.K, Tensor.V}


def made(direction: Direction, name: str = "owner:placement=stripe", cp: int = 6) -> Plan:
    problem = Problem(
        pattern=make_pattern("causal", 1001),
        heads_q=6,
        heads_kv=2,
        head_dim=40,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    return strategy(name).plan(problem, direction)


def peak(plan: Plan) -> int:
    return max(ledger(verify(plan)).peak_bytes)


def bare(task: Task) -> str:
    """A task without its edges."""
    return repr(replace(task, after=()))


def kept_ahead(plan: Plan) -> int:
    """Most tiles of a rank between a fetch of keys and the tile that needs it, the latter apart."""
    tiles: dict[int, list[int]] = {}
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Tile):
            tiles.setdefault(task.place.rank, []).append(index)
    most = 0
    for index, task in enumerate(plan.tasks):
        if not isinstance(task, Transfer) or task.leg.pieces[0].tensor not in KEYS:
            continue
        line = tiles[task.leg.dst.rank]
        needed = next(at for at, tile in enumerate(line) if index in plan.tasks[tile].after)
        behind = [line.index(n) for n in task.after if n in line]
        most = max(most, needed - 1 - max(behind, default=-1))
    return most


@pytest.mark.parametrize("direction", Direction)
def test_fewer_tiles_ahead_hold_less_and_stay_right(direction: Direction) -> None:
    plan = made(direction)
    assert kept_ahead(plan) > 3
    peaks = []
    for ahead in (3, 1, 0):
        late = fetched_late(plan, ahead)
        assert kept_ahead(late) == ahead
        assert sorted(map(bare, late.tasks)) == sorted(map(bare, plan.tasks))
        peaks.append(peak(late))
    assert peaks == sorted(peaks, reverse=True)
    # Backward, sums that a rank keeps throughout are most of what it holds.
    assert peaks[-1] < peak(plan) or direction is Direction.BACKWARD


def test_a_fetch_that_waits_costs_time_on_any_runtime() -> None:
    plan, machine = made(Direction.FORWARD), cluster("h100-1x8")
    times = [simulate(verify(each), machine).makespan_s for each in (plan, fetched_late(plan, 0))]
    assert times[0] < times[1]


def test_the_plan_that_fetches_furthest_ahead_under_the_cap_is_taken() -> None:
    plan = made(Direction.FORWARD)
    free = within_memory(plan, peak(plan), peak)
    assert (free.plan, free.ahead) == (plan, None)
    cap = peak(fetched_late(plan, 1))
    held = within_memory(plan, cap, peak)
    assert held.ahead is not None
    assert held.ahead >= 1
    assert held.peak_bytes == peak(held.plan) <= cap
    none = within_memory(plan, 1, peak)
    assert none.peak_bytes == peak(fetched_late(plan, 0)) > 1
