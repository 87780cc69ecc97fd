"""The ranks of a group run one plan: compared before it first runs.

What a rank can see by itself it refuses at once. Before a plan first runs in a group its hash is
compared, so that ranks with different plans are told and do not wait in vain.
"""

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from harness.attention.ready import Owners, Ready, planned
from harness.errors import PlanError
from harness.plan.problem import Direction, Problem
from harness.planning.strategy import Chosen, Context

_MOST_AGREED = 4096
_T = TypeVar("_T")

_AGREED: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
"""Hashes of the plans that the ranks of a group have compared; gone with the group."""


def exchange(group: dist.ProcessGroup | None, value: _T) -> list[_T]:
    """Return every rank's value, in rank order."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agreed(
    chosen: Chosen,
    problem: Problem,
    direction: Direction,
    context: Context,
    owners: Owners,
    group: dist.ProcessGroup | None,
) -> Ready:
    """Return the plan of all ranks; compare it with theirs before it runs for the first time.

    Ranks that make the same calls come here in the same order, so all of them compare or none.

    Raises:
        PlanError: Some rank has another plan; names it, and what each rank plans.
    """
    ready = planned(chosen, problem, direction, context, owners)
    if group is None:
        return ready
    plan = ready.program.plan
    agreed = _AGREED.setdefault(group, set())
    if plan.hash in agreed:
        return ready
    told = exchange(group, (plan.hash, f"{plan.strategy} {direction.value} of {problem}"))
    others = [rank for rank, (digest, _) in enumerate(told) if digest != told[0][0]]
    if others:
        ranks = {
            name: [r for r, (_, other) in enumerate(told) if other == name] for _, name in told
        }
        raise PlanError(
            "all ranks of a group run one plan",
            rank=others[0],
            task=None,
            detail="; ".join(f"ranks {members} plan {name}" for name, members in ranks.items()),
        )
    if len(agreed) >= _MOST_AGREED:
        agreed.clear()
    agreed.add(plan.hash)
    return ready
