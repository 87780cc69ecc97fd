"""The last two levels: fusing never costs what a schedule gained."""

from dataclasses import replace

import pytest

from harness.cluster.machine import Cluster
from harness.cluster.presets import cluster
from harness.plan.problem import Direction
from harness.planning.levels import Level
from harness.prepare.planner_context import context_on
from harness.records.defaults import usual
from harness.simulate.simulator import simulate
from harness.verify.proof import verify
from strategies import strategy
from strategies.ultraattn.finish import Draft, as_published, seconds_of, shortest

BOTH = {Level.KERNEL, Level.SCHEDULE}


def machine(nodes: int, gpus: int) -> Cluster:
    return replace(cluster("h100-8x8"), nodes=nodes, gpus_per_node=gpus)


def bare(pattern: str, direction: Direction, where: Cluster) -> Draft:
    """Tiled and nothing more, with next to no search, so that it is the same every time."""
    p = usual(pattern, where.nodes * where.gpus_per_node, 65536, 2)
    text = "ultraattn:levels=device,seconds=0.001"
    plan = strategy(text).plan(p, direction, context_on(where))
    return Draft(plan=plan, seconds=seconds_of(where, plan))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("pattern", ["star", "streaming"])
def test_fusing_costs_nothing_of_what_a_schedule_gains(pattern: str, direction: Direction) -> None:
    where = machine(8, 2)
    made = bare(pattern, direction, where)
    scheduled = shortest(made, where, {Level.SCHEDULE}, 0.0)
    both = shortest(made, where, BOTH, 0.0)
    assert both.seconds <= scheduled.seconds <= made.seconds
    kept = both.report[Level.KERNEL]["kept"]
    assert (len(both.plan.tasks) < len(made.plan.tasks)) == (kept > 0)
    assert set(both.report) == BOTH
    # A tile that has come to be the first of its accumulator costs a little less than was said.
    assert simulate(verify(both.plan), where).makespan_s == pytest.approx(both.seconds, rel=0.02)


def test_where_time_is_left_the_order_of_a_list_is_tried_too() -> None:
    where = machine(1, 8)
    plan = strategy("grid").plan(usual("star", 8, 65536, 2), Direction.FORWARD, context_on(where))
    made = Draft(plan=plan, seconds=seconds_of(where, plan))
    quick, whole = (shortest(made, where, BOTH, seconds) for seconds in (0.0, 4.0))
    assert quick.report[Level.SCHEDULE][
        "proved"
    ]  # of what was fused: more time orders it no better
    assert whole.seconds < quick.seconds


def test_levels_that_are_off_leave_a_plan_as_it_is() -> None:
    where = machine(2, 2)
    made = bare("star", Direction.BACKWARD, where)
    assert shortest(made, where, (), 1.0) is made
    fused = shortest(made, where, {Level.KERNEL}, 1.0)
    assert set(fused.report) == {Level.KERNEL}
    assert fused.seconds < made.seconds
    assert len(as_published(made, where, (), 1.0).plan.tasks) == len(made.plan.tasks)
