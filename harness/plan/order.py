"""A plan with an order: what each rank does, one after another.

A plan says what must come before what; a schedule adds, per rank, the order in which it issues the
tasks that it takes part in. Two ranks that exchange several transfers must issue them in the same
order, and no two ranks may wait for each other.
"""

import json
from dataclasses import dataclass
from itertools import pairwise

from harness.base.json_fields import json_text
from harness.errors import CycleError, MisfitError, OrderError, PlanError, UnorderedError
from harness.plan.dependencies import sortable
from harness.plan.grid import grid
from harness.plan.plan import Plan, to_json
from harness.plan.reader import from_json
from harness.plan.tasks import legs_of, ranks_of

_GRID_RANKS = 8


@dataclass(frozen=True)
class ScheduledPlan:
    """A plan and the order in which each rank issues its tasks.

    Attributes:
        plan: What is done.
        order: Per rank, the ids of the tasks that it takes part in, in program order.
    """

    plan: Plan
    order: tuple[tuple[int, ...], ...]


def in_plan_order(plan: Plan) -> ScheduledPlan:
    """Let every rank issue its tasks in the order of the plan."""
    order: list[list[int]] = [[] for _ in range(plan.problem.cp)]
    for index, task in enumerate(plan.tasks):
        for rank in ranks_of(task):
            order[rank].append(index)
    return ScheduledPlan(plan, tuple(map(tuple, order)))


def verify_schedule(scheduled: ScheduledPlan) -> None:
    """Prove that a schedule of a verified plan runs to its end.

    Raises:
        MisfitError: A rank lacks one of its tasks, or has one twice or of another rank.
        UnorderedError: A rank issues a task before one that it must come after.
        OrderError: Two ranks issue their common transfers in different orders.
        CycleError: Ranks wait for one another.
    """
    try:
        _complete(scheduled)
        position = [{task: at for at, task in enumerate(tasks)} for tasks in scheduled.order]
        _local_edges(scheduled, position)
        _same_order(scheduled, position)
        _no_cycle(scheduled)
    except PlanError as error:
        if scheduled.plan.problem.cp <= _GRID_RANKS:
            error.add_note(grid(scheduled.plan, mark=error.task))
        raise


def _complete(scheduled: ScheduledPlan) -> None:
    wanted = in_plan_order(scheduled.plan).order
    rule = "every rank issues each of its tasks once"
    if len(scheduled.order) != len(wanted):
        detail = f"{len(scheduled.order)} orders for {len(wanted)} ranks"
        raise MisfitError(rule, rank=None, task=None, detail=detail)
    for rank, (mine, all_mine) in enumerate(zip(scheduled.order, wanted, strict=True)):
        wrong = sorted(set(mine) ^ set(all_mine))
        twice = [first for first, second in pairwise(sorted(mine)) if first == second]
        if wrong or twice:
            task = (wrong or twice)[0]
            what = "twice" if not wrong else "foreign" if task in mine else "missing"
            known = task if 0 <= task < len(scheduled.plan.tasks) else None
            raise MisfitError(rule, rank=rank, task=known, detail=f"task {task} is {what}")


def _local_edges(scheduled: ScheduledPlan, position: list[dict[int, int]]) -> None:
    for rank, at in enumerate(position):
        for task in scheduled.order[rank]:
            for earlier in scheduled.plan.tasks[task].after:
                if at.get(earlier, -1) > at[task]:
                    raise UnorderedError(
                        "a rank issues a task after those that it waits for",
                        rank=rank,
                        task=task,
                        detail=f"task {earlier} is issued later",
                    )


def _same_order(scheduled: ScheduledPlan, position: list[dict[int, int]]) -> None:
    """Transfers from one rank to another are issued in one order at both ends."""
    between: dict[tuple[int, int], list[int]] = {}
    for index, task in enumerate(scheduled.plan.tasks):
        pairs = {(leg.src.rank, leg.dst.rank) for leg in legs_of(task)}
        for src, dst in pairs:
            if src != dst:
                between.setdefault((src, dst), []).append(index)
    for (src, dst), tasks in between.items():
        sent = sorted(tasks, key=position[src].__getitem__)
        received = sorted(tasks, key=position[dst].__getitem__)
        for first, second in zip(sent, received, strict=True):
            if first != second:
                raise OrderError(
                    "two ranks issue their transfers in the same order",
                    rank=dst,
                    task=second,
                    detail=f"rank {src} sends task {first} where rank {dst} receives task {second}",
                )


def _no_cycle(scheduled: ScheduledPlan) -> None:
    """The union of program orders and edges has a topological order."""
    tasks = scheduled.plan.tasks
    before: list[set[int]] = [set(task.after) for task in tasks]
    for order in scheduled.order:
        for first, second in pairwise(order):
            before[second].add(first)
    done = sortable(before, [()] * len(tasks))
    if len(done) < len(tasks):
        cycle = _cycle(before, set(range(len(tasks))) - set(done))
        raise CycleError(
            "no ranks wait for one another",
            rank=ranks_of(tasks[cycle[0]])[0],
            task=cycle[0],
            detail=" waits for ".join(f"task {task}" for task in (*cycle, cycle[0])),
        )


def _cycle(before: list[set[int]], stuck: set[int]) -> list[int]:
    """Walk back from a task that never ran until one repeats."""
    path, task = [], min(stuck)
    while task not in path:
        path.append(task)
        task = min(before[task] & stuck)
    return path[path.index(task) :]


def schedule_to_json(scheduled: ScheduledPlan) -> str:
    """Write a schedule as canonical JSON."""
    body = {"schema": 1, "plan": json.loads(to_json(scheduled.plan)), "order": scheduled.order}
    return json_text(body, compact=True, sort_keys=True)


def schedule_from_json(text: str) -> ScheduledPlan:
    """Read what `schedule_to_json` wrote.

    Raises:
        ValueError: The text is no schedule of schema 1.
    """
    body = json.loads(text)
    if body.get("schema") != 1 or "order" not in body:
        raise ValueError(f"schedule schema ({body.get('schema')}) must be 1; write it again")
    plan = from_json(json_text(body["plan"]))
    return ScheduledPlan(plan, tuple(tuple(tasks) for tasks in body["order"]))
