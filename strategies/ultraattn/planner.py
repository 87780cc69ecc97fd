"""All levels in turn: remap, nodes, devices, kernels, streams.

    meshes       GATHER        keys by collectives or rings, dealt tokens, few large kernels
                 HEADS         ranks that share heads, inside nodes and between them
    candidates   REMAP         the order of blocks and who owns them
                 NODE, DEVICE  which rank computes each block, and what is sent for it
    select       which candidates are worth the other levels, and which plans are returned
    finish       KERNEL        fewer, larger kernels and transfers
                 SCHEDULE      when each begins

Blocks at their rows' owners, which the other levels improve, are candidates too. Both directions
share the layout that is fastest for the two together. A level that is off leaves what it gets as it
is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from harness.cluster.machine import LinkClass, link_between
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import legs_of
from harness.planning.levels import Level
from harness.planning.strategy import Context
from harness.schedule.post_late import posted_late
from harness.simulate.bounds import problem_bound_s
from strategies.ultraattn.candidates import Candidate, Origin, Trial, dealt, row_owners, tilings
from strategies.ultraattn.finish import Draft, Plans, ReportedPlan, as_published, shortest
from strategies.ultraattn.meshes import mesh_plans
from strategies.ultraattn.planning import Planning, PlanningMode, planning_of
from strategies.ultraattn.report import q_bytes, tilings_report
from strategies.ultraattn.selection import (
    SecondsByDirection,
    best_fair,
    fastest,
    favoured,
    is_fair,
    no_slower,
    total,
)

_NEAR = 1.1  # what may come out the faster when both are refined
_GAINS = 1.15  # times a bound on both directions: nearer to it no tilings are searched
_CLOSE = 1.002  # times that are as good as the least: then what crosses between nodes decides


def plan_both(problem: Problem, mode: PlanningMode, context: Context) -> Plans:
    """Plan both directions over one layout.

    Args:
        problem: The problem.
        mode: How.
        context: The cluster.
    """
    planning = planning_of(problem, mode, context)
    if mode.published:
        return finish(planning, next(candidates(planning)))
    meshes = mesh_plans(planning)
    plans = [select(planning, list(candidates(planning)))] if _may_gain(planning, meshes) else []
    plans += meshes
    times = [{d: _clock_s(planning, each) for d, each in pair.items()} for pair in plans]
    return plans[favoured(times, mode.favour)]


def _may_gain(planning: Planning, meshes: Sequence[Plans]) -> bool:
    """Whether tilings could gain much: no plan of heads and context is near the bound."""
    bound_s = sum(problem_bound_s(planning.problem, d, planning.machine) for d in Direction)
    taken = [sum(_clock_s(planning, each) for each in pair.values()) for pair in meshes]
    return min(taken, default=inf) > _GAINS * bound_s


def _clock_s(planning: Planning, plan: ReportedPlan) -> float:
    known: float | None = plan.report.get("judged_s")
    return planning.clock(plan.plan) if known is None else known


def candidates(planning: Planning) -> Iterator[Candidate]:
    """Yield layouts with who computes each block: remap, node and device level.

    The public code has one, of its own layout. Rows at their owners take no planning: where tokens
    lie as they come or, in one node, as a zigzag or a stripe deals them.
    """
    published = planning.mode.published
    for layout in planning.layouts():
        if planning.tiles:
            yield from tilings(planning, layout)
        if not (planning.tiles and published):
            yield row_owners(planning, layout)
    if planning.remaps and not published:
        yield from dealt(planning)


def select(planning: Planning, tried: Sequence[Candidate]) -> Plans:
    """Finish what is worth it, and return the plans of the least time in both directions together.

    Neither direction may be slower than simple plans (see `selection.fair`): the first layout's
    rows at their owners, and those of a zigzag and a stripe.
    """
    rows = next(each for each in tried if each.origin is Origin.ROW_OWNER)
    simple = [rows, *(each for each in tried if each.origin is Origin.DEALT)]
    shortlist = _shortlist(planning, tried, rows)
    plans = [finish(planning, each) for each in shortlist]
    rival = _rival(planning, simple, shortlist[0], plans[0])
    plans += [finish(planning, rival)] if rival else []
    plans += _row_owner_plans(planning, simple, plans)
    times = [_judged_s(planning, each) for each in plans]
    return plans[best_fair(times, _least(planning, simple))]


def finish(planning: Planning, candidate: Candidate) -> Plans:
    """Fuse and schedule a candidate, and report on all levels: kernel level and schedule.

    Late transfers, or all of it, are left out where a calibration knows better.
    """
    return {d: _finished(planning, trial) for d, trial in candidate.trials.items()}


def _shortlist(planning: Planning, tried: Sequence[Candidate], rows: Candidate) -> list[Candidate]:
    """Return the best by the timeline, then the best by the judge if that is another one."""
    fast = [c for c in tried if c.origin is not Origin.DEALT and no_slower(_times(c), _times(rows))]
    best = _best(planning, fast)
    if planning.judge is None:
        return [best]
    liked = min(fast, key=lambda each: total(_judged_s(planning, each.trials)))
    return [best] if liked.trials == best.trials else [best, liked]


def _rival(
    planning: Planning, simple: Sequence[Candidate], best: Candidate, plans: Plans
) -> Candidate | None:
    """Return the better of zigzag and stripe, if it comes near the best or its plans need it."""
    rows, *others = simple
    placed = [each for each in others if no_slower(_times(each), _times(rows))]
    if not placed:
        return None
    other = _best(planning, placed)
    near = total(_times(other)) <= _NEAR * total(_times(best))
    least = fastest([_times(each) for each in simple])
    return other if near or not is_fair(_seconds(plans), least) else None


def _row_owner_plans(
    planning: Planning, simple: Sequence[Candidate], plans: Sequence[Plans]
) -> list[Plans]:
    """Return the best simple plans as they are, where a calibration judges.

    What they do not send slows no kernel. They are refined where no other plan is as fast.
    """
    if planning.judge is None:
        return []
    judge = planning.judge
    rows = min(simple, key=lambda each: total(_judged_s(planning, each.trials)))
    plain = {direction: _as_it_is(trial) for direction, trial in rows.trials.items()}
    least = _least(planning, simple)
    if any(is_fair(_judged_s(planning, each), least) for each in plans):
        return [plain]
    refined = finish(planning, rows)
    faster = {d: min(plain[d], refined[d], key=lambda p: judge(p.plan)) for d in Direction}
    return [plain, faster]


def _best(planning: Planning, tried: Sequence[Candidate]) -> Candidate:
    """Return the candidate of the least time, and of those as good, what crosses the least."""
    totals = [total(_times(each)) for each in tried]
    close = [c for c, seconds in zip(tried, totals, strict=True) if seconds <= min(totals) * _CLOSE]
    gpus = planning.shape.gpus
    return min(close, key=lambda c: sum(_crossing(t.plan, gpus) for t in c.trials.values()))


def _crossing(plan: Plan, gpus: int) -> int:
    """Return the bytes that cross between nodes."""
    return sum(
        leg_bytes(plan, leg)
        for task in plan.tasks
        for leg in legs_of(task)
        if link_between(leg.src, leg.dst, gpus) is LinkClass.NIC
    )


def _times(candidate: Candidate) -> SecondsByDirection:
    return _seconds(candidate.trials)


def _seconds(both: Mapping[Direction, Trial] | Plans) -> SecondsByDirection:
    return {direction: each.seconds for direction, each in both.items()}


def _judged_s(planning: Planning, both: Mapping[Direction, Trial] | Plans) -> SecondsByDirection:
    """Return the seconds of plans, by the judge if there is one."""
    if planning.judge is None:
        return _seconds(both)
    return {direction: planning.judge(each.plan) for direction, each in both.items()}


def _least(planning: Planning, simple: Sequence[Candidate]) -> SecondsByDirection:
    return fastest([_judged_s(planning, each.trials) for each in simple])


def _finished(planning: Planning, trial: Trial) -> ReportedPlan:
    mode = planning.mode
    levels = as_published if mode.published else shortest
    bare = Draft(plan=trial.plan, seconds=trial.seconds)
    made = levels(bare, planning.machine, mode.levels, mode.seconds)
    report = {**_reported(trial), **made.report, "makespan_s": made.seconds}
    found = ReportedPlan(plan=made.plan, report=report)
    if mode.published or not planning.schedules:
        return found
    late = replace(found, plan=posted_late(made.plan, planning.machine))
    judge = planning.judge
    if judge is None:
        return late
    return min(late, found, _as_it_is(trial), key=lambda each: judge(each.plan))


def _as_it_is(trial: Trial) -> ReportedPlan:
    return ReportedPlan(plan=trial.plan, report={**_reported(trial), "refined": False})


def _reported(trial: Trial) -> dict[str, Any]:
    """Return the results of the levels up to the tiling."""
    return {
        Level.REMAP: _order_report(trial),
        **tilings_report(trial.tiling, q_bytes(trial.plan)),
        "layout_s": trial.seconds,
        "makespan_s": trial.seconds,
    }


def _order_report(trial: Trial) -> dict[str, Any]:
    if isinstance(trial.order, Placement):
        return {"order": [], "placement": trial.order.value}
    return {"order": list(trial.order)}
