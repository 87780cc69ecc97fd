"""The last two levels: a plan whose blocks have their ranks is fused and scheduled."""

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.cluster.machine import Cluster
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.planning.levels import Level
from harness.schedule.fuse import fused_at_once
from harness.schedule.kernel_tiling import tile_kernels
from harness.schedule.stream_schedule import Method, schedule_streams
from harness.simulate.timeline import Timeline, graph_of

_LITTLE = 0.25  # of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPlan:
    """A plan and what each level came to.

    Attributes:
        plan: The plan.
        report: Per level, figures for people and for JSON.
    """

    plan: Plan
    report: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        """Seconds of the plan, by its timeline."""
        seconds: float = self.report["makespan_s"]
        return seconds


Plans = Mapping[Direction, ReportedPlan]
"""Plans of both directions over one layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan between two levels.

    Attributes:
        plan: The plan.
        seconds: Time of the plan.
        report: Results of the levels so far.
    """

    plan: Plan
    seconds: float
    report: Mapping[str, Any] = field(default_factory=dict)

    def then(self, level: Level, plan: Plan, said: Mapping[str, Any]) -> "Draft":
        """Return the result of a level."""
        return Draft(plan=plan, seconds=said["makespan_s"], report={**self.report, level: said})


def shortest(draft: Draft, cluster: Cluster, levels: Container[Level], seconds: float) -> Draft:
    """Schedule, fuse what shortens the schedule, and schedule that.

    Fused in the order of a list, tiles wait together that a schedule would set apart. Small plans,
    which are fused in little time, try the list too, for half as long at least.

    Args:
        draft: The plan to finish.
        cluster: Where it runs.
        levels: KERNEL and SCHEDULE are done if they are here.
        seconds: CPU seconds; the first lists and fusing may take longer.
    """
    if Level.SCHEDULE not in levels:
        return _fused(draft, cluster) if Level.KERNEL in levels else draft
    end = time.process_time() + seconds
    found = _scheduled(draft, cluster, seconds)
    if Level.KERNEL not in levels:
        return found
    begin = time.process_time()
    fused = _fused(found, cluster)
    small = time.process_time() - begin < _LITTLE * seconds
    found = _scheduled(fused, cluster, max(end - time.process_time(), 0.0))
    if not small:
        return found
    left_s = max(end - time.process_time(), seconds / 2)
    other = _scheduled(_fused(_listed(draft, cluster), cluster), cluster, left_s)
    return min(found, other, key=lambda one: one.seconds)


def as_published(draft: Draft, cluster: Cluster, levels: Container[Level], seconds: float) -> Draft:
    """Fuse at once and schedule, or order breadth first, as the public code does."""
    if Level.SCHEDULE in levels:
        draft = _listed(draft, cluster)
    if Level.KERNEL in levels:
        plan = fused_at_once(draft.plan)
        kept = len(draft.plan.tasks) - len(plan.tasks)
        said = {"kept": kept, "makespan_s": seconds_of(cluster, plan)}
        draft = draft.then(Level.KERNEL, plan, said)
    if Level.SCHEDULE in levels:
        return _scheduled(draft, cluster, seconds)
    first = schedule_streams(draft.plan, cluster, method=Method.BREADTH_FIRST)
    return replace(draft, plan=first.plan, seconds=first.makespan_s)


def seconds_of(cluster: Cluster, plan: Plan) -> float:
    """Return the makespan of a plan in its order."""
    return Timeline(graph_of(plan, cluster)).makespan


def _listed(draft: Draft, cluster: Cluster) -> Draft:
    listed = schedule_streams(draft.plan, cluster, method=Method.CRITICAL_PATH)
    return replace(draft, plan=listed.plan, seconds=listed.makespan_s)


def _fused(draft: Draft, cluster: Cluster) -> Draft:
    found = tile_kernels(draft.plan, cluster)
    said = {"kept": len(found.kept), "makespan_s": found.after_s}
    return draft.then(Level.KERNEL, found.plan, said)


def _scheduled(draft: Draft, cluster: Cluster, seconds: float) -> Draft:
    found = schedule_streams(draft.plan, cluster, time_limit_s=seconds)
    before_s = draft.report.get(Level.SCHEDULE, {}).get("seconds", 0.0)
    said = {
        "makespan_s": found.makespan_s,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "proved": found.proved,
        "source": found.source,
        "seconds": before_s + found.seconds,
    }
    return draft.then(Level.SCHEDULE, found.plan, said)
