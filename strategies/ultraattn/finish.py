"""The last two levels: a plan whose blocks have their ranks is fused and scheduled."""

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from harness.cluster.machine import Cluster
from harness.plan.plan import Plan
from harness.planning.levels import Level
from harness.schedule.fuse import fused_at_once
from harness.schedule.kernel_tiling import tile_kernels
from harness.schedule.stream_schedule import Method, schedule_streams
from harness.simulate.timeline import Timeline, graph_of

_LITTLE = 0.25  # of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A plan on its way.

    Attributes:
        plan: The plan.
        seconds: What it takes.
        said: What each level came to.
    """

    plan: Plan
    seconds: float
    said: Mapping[str, Any] = field(default_factory=dict)

    def then(self, level: Level, plan: Plan, said: Mapping[str, Any]) -> "Made":
        """Return what a level makes of it."""
        return Made(plan=plan, seconds=said["makespan_s"], said={**self.said, level: said})


def shortest(made: Made, cluster: Cluster, levels: Container[Level], seconds: float) -> Made:
    """Schedule, fuse what shortens the schedule, and schedule that.

    Fused in the order of a list, tiles wait together that a schedule would set apart. Small plans,
    which are fused in little time, try the list too, for half as long at least.

    Args:
        made: What to finish.
        cluster: Where it runs.
        levels: KERNEL and SCHEDULE are done if they are here.
        seconds: CPU seconds; the first lists and fusing may take longer.
    """
    if Level.SCHEDULE not in levels:
        return _fused(made, cluster) if Level.KERNEL in levels else made
    end = time.process_time() + seconds
    found = _scheduled(made, cluster, seconds)
    if Level.KERNEL not in levels:
        return found
    begin = time.process_time()
    fused = _fused(found, cluster)
    small = time.process_time() - begin < _LITTLE * seconds
    found = _scheduled(fused, cluster, max(end - time.process_time(), 0.0))
    if not small:
        return found
    left_s = max(end - time.process_time(), seconds / 2)
    other = _scheduled(_fused(_listed(made, cluster), cluster), cluster, left_s)
    return min(found, other, key=lambda one: one.seconds)


def as_published(made: Made, cluster: Cluster, levels: Container[Level], seconds: float) -> Made:
    """Fuse at once and schedule, or order breadth first, as the public code does."""
    if Level.SCHEDULE in levels:
        made = _listed(made, cluster)
    if Level.KERNEL in levels:
        plan = fused_at_once(made.plan)
        kept = len(made.plan.tasks) - len(plan.tasks)
        said = {"kept": kept, "makespan_s": seconds_of(cluster, plan)}
        made = made.then(Level.KERNEL, plan, said)
    if Level.SCHEDULE in levels:
        return _scheduled(made, cluster, seconds)
    first = schedule_streams(made.plan, cluster, method=Method.BREADTH_FIRST)
    return replace(made, plan=first.plan, seconds=first.makespan_s)


def seconds_of(cluster: Cluster, plan: Plan) -> float:
    """Return the makespan of a plan in its order."""
    return Timeline(graph_of(plan, cluster)).makespan


def _listed(made: Made, cluster: Cluster) -> Made:
    listed = schedule_streams(made.plan, cluster, method=Method.CRITICAL_PATH)
    return replace(made, plan=listed.plan, seconds=listed.makespan_s)


def _fused(made: Made, cluster: Cluster) -> Made:
    found = tile_kernels(made.plan, cluster)
    said = {"kept": len(found.kept), "makespan_s": found.after_s}
    return made.then(Level.KERNEL, found.plan, said)


def _scheduled(made: Made, cluster: Cluster, seconds: float) -> Made:
    found = schedule_streams(made.plan, cluster, time_limit_s=seconds)
    before_s = made.said.get(Level.SCHEDULE, {}).get("seconds", 0.0)
    said = {
        "makespan_s": found.makespan_s,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "proved": found.proved,
        "source": found.source,
        "seconds": before_s + found.seconds,
    }
    return made.then(Level.SCHEDULE, found.plan, said)
