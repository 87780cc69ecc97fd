"""`memory=`: which draft is taken, that the ledger proves the cap, and what is refused."""

from dataclasses import replace

import pytest

from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.memory.ledger import ledger
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.planning.levels import ALL_LEVELS, Level
from harness.prepare.planner_context import context_on
from harness.schedule.within_memory import CappedPlan
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy
from strategies.ultraattn.finish import Plans, ReportedPlan
from strategies.ultraattn.memory_cap import kept_cap, plan_within
from strategies.ultraattn.planning import PlanningMode

QUICK = "ultraattn:seconds=0.02"
MODE = PlanningMode(levels=ALL_LEVELS)
CAUSAL = Problem(
    pattern=make_pattern("causal", 4099),
    heads_q=6,
    heads_kv=2,
    head_dim=128,
    dtype=Dtype.BFLOAT16,
    cp=5,
)


def drafts(mode: PlanningMode) -> Plans:
    """With the kernel level a gather of all keys, without it keys one by one."""
    name = "allgather" if Level.KERNEL in mode.levels else "owner"
    made = {d: strategy(f"{name}:placement=stripe").plan(CAUSAL, d) for d in Direction}
    return {d: ReportedPlan(plan=plan, report={}) for d, plan in made.items()}


def peak(plan: Plan) -> int:
    return max(ledger(verify(plan)).peak_bytes)


def gib(found: ReportedPlan | CappedPlan) -> float:
    return peak(found.plan) / 2**30


def test_the_first_draft_that_keeps_the_cap_in_both_directions_is_taken() -> None:
    whole = drafts(MODE)
    roomy = plan_within(MODE, max(map(gib, whole.values())), drafts, peak)
    assert {d: found.plan for d, found in roomy.items()} == {d: p.plan for d, p in whole.items()}
    cap = 0.95 * gib(whole[Direction.BACKWARD])  # more than the forward gather holds
    assert gib(whole[Direction.FORWARD]) < cap
    held = plan_within(MODE, cap, drafts, peak)
    for direction, found in held.items():
        assert isinstance(found, ReportedPlan)
        assert gib(found) <= cap
        said = found.report["memory"]
        assert said["levels"] == sorted(ALL_LEVELS - {Level.KERNEL})
        assert said["peak_bytes"] == gib(found) * 2**30
        assert found.plan.strategy == "owner:placement=stripe"
        assert direction is found.plan.direction


def test_a_cap_that_one_direction_keeps_is_refused_in_the_other() -> None:
    cap = gib(plan_within(MODE, 1e-6, drafts, peak)[Direction.FORWARD]) + 1e-6
    forward, backward = (plan_within(MODE, cap, drafts, peak)[d] for d in Direction)
    assert kept_cap(forward, cap, "here") is forward
    with pytest.raises(UnsupportedError, match=r"memory .* must be at least .* \(here\)") as caught:
        kept_cap(backward, cap, "here")
    (way_out,) = caught.value.nearest
    least = float(way_out.removeprefix("memory="))
    found = plan_within(MODE, least, drafts, peak)[Direction.BACKWARD]
    assert isinstance(found, ReportedPlan)
    assert cap < gib(found) <= least


def test_the_option_caps_what_plans_are_made_for() -> None:
    context = context_on(cluster("h100-1x8"))
    free = strategy(QUICK).plan(CAUSAL, Direction.BACKWARD, context)
    roomy = strategy(f"{QUICK},memory=80").plan(CAUSAL, Direction.BACKWARD, context)
    assert roomy.tasks == free.tasks
    other = replace(CAUSAL, head_dim=32, dtype=Dtype.FLOAT32, batch=2)
    with pytest.raises(UnsupportedError, match="memory") as caught:
        strategy(f"{QUICK},memory=0.0001").plan(CAUSAL, Direction.BACKWARD, context)
    text = f"{QUICK},{caught.value.nearest[0]}"
    plans = [strategy(text).plan(each, Direction.BACKWARD, context) for each in (CAUSAL, other)]
    assert [plan.problem for plan in plans] == [CAUSAL, other]
    assert plans[0].tasks == plans[1].tasks
    assert plans[0].strategy == text
    chosen = strategy(text)
    assert chosen.strategy.report is not None
    said = chosen.strategy.report(CAUSAL, Direction.BACKWARD, chosen.options, context)["memory"]
    assert max(ledger(verify(plans[0])).peak_bytes) == said["peak_bytes"] <= said["cap_bytes"]
