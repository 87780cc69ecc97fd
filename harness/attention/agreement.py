"""One plan for all ranks of a group: made and verified once, compared, run, and held to its bytes.

What a rank can see by itself it refuses at once. Before a plan first runs in a group its hash is
compared, so that ranks with different plans are told and do not wait in vain.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from harness.errors import PlanError, UnsupportedError
from harness.execute.interpreter import Run, execute
from harness.execute.transport import GroupTransport, LocalTransport, Transport
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.sizes import traffic
from harness.plan.tasks import Resident
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import Owners, remembered

_BACKENDS = {"gloo": "cpu", "nccl": "cuda"}
_MOST_AGREED = 4096
_T = TypeVar("_T")

_AGREED: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
"""Hashes of the plans that the ranks of a group have compared; gone with the group."""


class Ready(NamedTuple):
    """A verified plan, and what each rank sends and receives in it, in bytes."""

    program: Program
    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]


@lru_cache(maxsize=128)
def planned(
    chosen: Chosen,
    problem: Problem,
    direction: Direction,
    context: Context,
    owners: Owners | None = None,
) -> Ready:
    """Plan and verify, once for each problem.

    Raises:
        PlanError: The plan is wrong, or its tokens lie elsewhere than their owners have them.
    """
    program = remembered(chosen, problem, direction, context, owners)
    sent, received = (dict(enumerate(side)) for side in traffic(program.plan))
    return Ready(program, sent, received)


def run_plan(ready: Ready, inputs: Mapping[Resident, torch.Tensor], transport: Transport) -> Run:
    """Run a plan and hold what moved against what was planned."""
    run = execute(ready.program, inputs, transport)
    traffic = transport.traffic
    for rank in transport.ranks:
        named = (ready.sent_bytes.get(rank, 0), ready.received_bytes.get(rank, 0))
        moved = (traffic.sent_bytes.get(rank, 0), traffic.received_bytes.get(rank, 0))
        if moved != named:
            raise PlanError(
                "the bytes that move are the bytes that the plan names",
                rank=rank,
                task=None,
                detail=f"sent and received {moved} bytes, planned {named}",
            )
    return run


def seat(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return the group (None = alone), this rank in it, and its size."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None, 0, 1
        group = dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("attention: this process is not a member of the group")
    return group, rank, dist.get_world_size(group)


def transport_of(group: dist.ProcessGroup | None) -> Transport:
    """The transport of this rank in a group; None = alone."""
    return LocalTransport(1) if group is None else GroupTransport(group)


def check_device(device: torch.device, group: dist.ProcessGroup | None) -> None:
    """Refuse a device that the group's backend does not reach, where that can be told."""
    if group is None:
        return
    backend = dist.get_backend(group)
    reached = _BACKENDS.get(backend)
    if reached is not None and device.type != reached:
        right = [name for name, kind in _BACKENDS.items() if kind == device.type]
        raise UnsupportedError(
            f"attention: a {backend} group moves no {device.type} tensors",
            (f"tensors on {reached}", *(f"a {name} group" for name in right)),
        )


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
