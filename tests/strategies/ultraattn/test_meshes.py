"""Heads and context in the planner: no slower than plans of one kind, and said what was chosen."""

import pytest

from harness.cluster.presets import cluster
from harness.commands.plan_levels import level_lines
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Collective, CollectiveKind, Tile
from harness.planning.levels import ALL_LEVELS, read_levels
from harness.planning.strategy import Context
from harness.prepare.planner_context import context_on
from harness.records.defaults import usual
from strategies import strategy
from strategies.ultraattn.meshes import mesh_plans
from strategies.ultraattn.planning import PlanningMode, planning_of

MESHES = "ultraattn:levels=remap+gather+heads"


def best(p: Problem, context: Context, levels: str = "all") -> list[dict[Direction, Plan]]:
    """Return the plans of the best meshes."""
    mode = PlanningMode(levels=read_levels(levels))
    pairs = mesh_plans(planning_of(p, mode, context))
    return [{direction: each.plan for direction, each in pair.items()} for pair in pairs]


@pytest.mark.parametrize(("pattern", "machine"), [("causal", "h100-8x8"), ("star", "h100-hamming")])
def test_it_is_as_fast_as_plans_of_one_kind(pattern: str, machine: str) -> None:
    p, context = usual(pattern, 16, 131072, 32, 8), context_on(cluster(machine))
    assert context.evaluate is not None
    for direction in Direction:
        ours = context.evaluate(strategy(MESHES).plan(p, direction, context))
        for text in ("allgather:placement=zigzag", "usp", "usp:4x4"):
            other = context.evaluate(strategy(text).plan(p, direction, context))
            assert ours <= 1.01 * other, (direction, text)


def test_what_is_favoured_is_no_slower_than_for_both() -> None:
    """Forward is fastest without trades, backward with heads that forward traded."""
    p, context = usual("causal", 16, 131072, 32, 8), context_on(cluster("h100-hamming"))
    assert context.estimate is not None
    ways = ("both", *(direction.value for direction in Direction))
    taken = {
        (way, direction): context.estimate(
            strategy(f"{MESHES},favour={way}").plan(p, direction, context)
        )
        for way in ways
        for direction in Direction
    }
    for direction in Direction:
        assert taken[direction.value, direction] == min(taken[way, direction] for way in ways)
    assert taken["forward", Direction.FORWARD] < taken["backward", Direction.FORWARD]


def test_levels_that_are_off_are_not_used() -> None:
    """Without `heads` nothing is traded; with heads alone every rank has all keys of its heads."""
    p, context = usual("causal", 8, 65536, 16, 8), context_on(cluster("h100-8x8"))

    def kinds(levels: str) -> set[CollectiveKind]:
        plans = [plan for pair in best(p, context, levels) for plan in pair.values()]
        tasks = [task for plan in plans for task in plan.tasks]
        return {task.kind for task in tasks if isinstance(task, Collective)}

    assert CollectiveKind.ALL_TO_ALL not in kinds("remap+gather")
    assert kinds("heads") == {CollectiveKind.ALL_TO_ALL}
    assert not best(p, context, "remap+node+device+kernel+schedule")


def test_a_row_of_every_kind_is_dealt_to_every_part() -> None:
    """Streaming has four kinds of rows: areas in one tile a rank are equal to a tenth percent."""
    p = usual("streaming", 8, 16384, 6, 3)
    plans = best(p, context_on(cluster("h100-hamming")), "remap+gather")
    for pair in plans:
        tiles = [task for task in pair[Direction.FORWARD].tasks if isinstance(task, Tile)]
        loads = [
            sum(t.area * t.heads.bit_count() for t in tiles if t.place.rank == r) for r in range(8)
        ]
        assert max(loads) <= 1.001 * min(loads)


def test_lines_say_who_shares_heads_and_how_keys_come() -> None:
    p, context = usual("full", 16, 65536, 16, 8), context_on(cluster("h100-8x8"))
    mode = PlanningMode(levels=ALL_LEVELS)
    pair = mesh_plans(planning_of(p, mode, context))[0]
    report = {
        **pair[Direction.FORWARD].report,
        "on": "all",
        "cluster": "h100-8x8",
        "gpus_per_node": 8,
        "calibrated": False,
        "made_for": "bfloat16",
    }
    said = level_lines(report, Direction.FORWARD)
    heads = report["heads"]
    assert f"({heads['inside']} inside a node x {heads['between']} between nodes)" in said
    assert f"{report['gather']['parts']} parts, {report['gather']['way']}; tokens dealt" in said
