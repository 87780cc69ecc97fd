"""Plans under a cap of memory: fewer levels hold less, and so does fetching late.

Large kernels need all of their chunks side by side, so the kernel level is left out first; then
tilings are, and a rank attends its own queries, of which nothing is sent. Of each, fetches are as
early as the cap allows (`schedule.within_memory`). The first that keeps the cap is taken, if it
does so in both directions, which share the places of tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.planning.levels import Level
from harness.schedule.within_memory import CappedPlan, within_memory
from strategies.ultraattn.finish import Plans, ReportedPlan
from strategies.ultraattn.planning import PlanningMode

_GIB = 2**30
_LEFT_OUT = (
    frozenset[Level](),
    frozenset({Level.KERNEL}),
    frozenset({Level.KERNEL, Level.NODE, Level.DEVICE}),
)
"""Levels that are left out, from one draft to the next."""


def plan_within(
    mode: PlanningMode,
    memory_gib: float,
    plans_of: Callable[[PlanningMode], Plans],
    peak_of: Callable[[Plan], int],
) -> Mapping[Direction, ReportedPlan | CappedPlan]:
    """Return plans that keep a cap; of a direction in which none does, the one that holds least.

    Args:
        mode: How to plan, with all levels that may be on.
        memory_gib: Most GiB of a rank, inputs included, of the problem as `plans_of` plans it.
        plans_of: Plans by the levels of a mode.
        peak_of: Bytes of the fullest rank of a plan.
    """
    cap = memory_gib * _GIB
    best: dict[Direction, ReportedPlan | CappedPlan] = {}
    for levels in dict.fromkeys(mode.levels - left_out for left_out in _LEFT_OUT):
        drafts = plans_of(replace(mode, levels=levels))
        held = {d: within_memory(draft.plan, cap, peak_of) for d, draft in drafts.items()}
        kept = {d: _reported(drafts[d], one, memory_gib, levels) for d, one in held.items()}
        fits = {d: one.peak_bytes <= cap for d, one in held.items()}
        if all(fits.values()):
            return kept
        for d, one in held.items():
            best[d] = _better(best.get(d), kept[d] if fits[d] else one)
    return best


def _better(
    known: ReportedPlan | CappedPlan | None, other: ReportedPlan | CappedPlan
) -> ReportedPlan | CappedPlan:
    """Return the first that keeps the cap, or else the one that holds least."""
    if known is None or isinstance(known, ReportedPlan) or isinstance(other, ReportedPlan):
        return known if isinstance(known, ReportedPlan) else other
    return min(known, other, key=lambda one: one.peak_bytes)


def kept_cap(found: ReportedPlan | CappedPlan, memory_gib: float, made_for: str) -> ReportedPlan:
    """Return a plan that keeps the cap.

    Raises:
        UnsupportedError: No plan was found that does; names the least that one holds.
    """
    if isinstance(found, ReportedPlan):
        return found
    least = -(-found.peak_bytes * 1000 // _GIB) / 1000
    raise UnsupportedError(
        f"ultraattn: memory ({memory_gib:g} GiB) must be at least {least:g}, the least that a rank "
        f"holds of the plans that are known ({made_for})",
        (f"memory={least:g}",),
    )


def _reported(
    draft: ReportedPlan, held: CappedPlan, memory_gib: float, levels: frozenset[Level]
) -> ReportedPlan:
    said = {
        "cap_bytes": round(memory_gib * _GIB),
        "peak_bytes": held.peak_bytes,
        "levels": sorted(levels),
        "ahead": held.ahead,
    }
    return ReportedPlan(plan=held.plan, report={**draft.report, "memory": said})
