"""Ways to break a plan: each returns another plan whose edges are renumbered."""

from collections.abc import Sequence
from dataclasses import replace

from harness.plan.plan import Plan
from harness.plan.tasks import Collective, Leg, Task, Transfer

Entry = int | tuple[Task, tuple[int, ...]]
"""An old task by its id, or a new task with old ids that it comes after."""


def reordered(plan: Plan, entries: Sequence[Entry]) -> Plan:
    """Return the plan with these tasks; whoever waited for a dropped one waits for its edges."""
    place = {entry: new for new, entry in enumerate(entries) if isinstance(entry, int)}

    def moved(old: int) -> set[int]:
        if old in place:
            return {place[old]}
        return {new for earlier in plan.tasks[old].after for new in moved(earlier)}

    tasks = []
    for entry in entries:
        task, after = (plan.tasks[entry], plan.tasks[entry].after) if _old(entry) else entry
        edges = sorted({new for old in after for new in moved(old)})
        tasks.append(replace(task, after=tuple(edges)))
    return replace(plan, tasks=tuple(tasks))


def _old(entry: Entry) -> bool:
    return isinstance(entry, int)


def dropped(plan: Plan, index: int) -> Plan:
    return reordered(plan, [i for i in range(len(plan.tasks)) if i != index])


def inserted(plan: Plan, at: int, task: Task, after: Sequence[int] = ()) -> Plan:
    ids: list[Entry] = list(range(len(plan.tasks)))
    return reordered(plan, [*ids[:at], (task, tuple(after)), *ids[at:]])


def moved(plan: Plan, index: int, to: int, *, edges: bool = True) -> Plan:
    """Move a task before the one that is now at `to`; without its edges it waits for nothing."""
    ids: list[Entry] = [i for i in range(len(plan.tasks)) if i != index]
    ids.insert(to if to <= index else to - 1, index)
    changed = reordered(plan, ids)
    return changed if edges else with_edges(changed, ids.index(index), ())


def changed(plan: Plan, index: int, task: Task) -> Plan:
    return replace(plan, tasks=(*plan.tasks[:index], task, *plan.tasks[index + 1 :]))


def with_edges(plan: Plan, index: int, after: Sequence[int]) -> Plan:
    return changed(plan, index, replace(plan.tasks[index], after=tuple(after)))


def with_leg(task: Task, number: int, leg: Leg) -> Task:
    """Return a transfer or collective with one leg exchanged."""
    if isinstance(task, Transfer):
        return replace(task, leg=leg)
    assert isinstance(task, Collective)
    return replace(task, legs=(*task.legs[:number], leg, *task.legs[number + 1 :]))
