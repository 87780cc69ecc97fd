"""Prove a device program: no races, no deadlock for any timing, the plan's work, within limits.

This shares no code with what emits programs. It reads the program as a device would, and the plan.
"""

from harness.cluster.machine import node_of
from harness.errors import DeviceProgramError
from harness.plan.plan import Plan
from harness.plan.tasks import Memory
from harness.program.check_bytes import check_bytes
from harness.program.check_job import check_job
from harness.program.check_progress import check_progress, matched
from harness.program.operations import (
    COMMUNICATORS,
    COPY_LANES,
    MOST_LANES,
    MOST_POSTS,
    DeviceProgram,
    Group,
    Kernel,
    KernelLaunch,
    Lane,
    RankProgram,
)

_NEAR = frozenset({Lane.NVLINK_EVEN, Lane.NVLINK_ODD})


def check_program(plan: Plan, program: DeviceProgram) -> None:
    """Prove a device program.

    Args:
        plan: The plan that it is said to do.
        program: The program.

    Raises:
        DeviceProgramError: It breaks a rule, which is named.
    """
    ranks = [rank.rank for rank in program.ranks]
    if program.plan != plan.hash or ranks != list(range(plan.problem.cp)):
        raise DeviceProgramError(
            "a program is of its plan, with all ranks in order",
            rank=None,
            detail=f"it has ranks {ranks} of plan {program.plan}; the plan is {plan.hash}",
        )
    for rank in program.ranks:
        check_limits(rank, program.gpus_per_node)
    messages = matched(program.ranks)
    order = check_progress(program.ranks, messages)
    for rank in program.ranks:
        check_bytes(rank)
    check_job(plan, program.ranks, messages, order)


def check_limits(program: RankProgram, gpus_per_node: int) -> None:
    """Prove that a rank's operations are within what its device can do.

    Raises:
        DeviceProgramError: A group is too large, there are too many lanes, or an operation is on a
            lane that cannot do it.
    """
    lanes = {operation.lane for operation in program.operations}
    if len(lanes) > MOST_LANES:
        raise DeviceProgramError(
            f"a rank has at most {MOST_LANES} lanes", rank=program.rank, detail=f"{len(lanes)}"
        )
    for number, operation in enumerate(program.operations):
        match operation:
            case KernelLaunch():
                wrong = _misplaced(operation)
            case Group():
                wrong = _misposted(operation, program.rank, gpus_per_node)
            case _:
                wrong = ""
        if wrong:
            raise DeviceProgramError(
                "an operation is on a lane that can do it, within the lane's limits",
                rank=program.rank,
                operation=number,
                detail=wrong,
            )


def _misplaced(launch: KernelLaunch) -> str:
    """Why a launch cannot be where it is; empty if it can."""
    memories = [view.memory for view in (*launch.reads, *launch.writes)]
    if launch.lane is Lane.COMPUTE:
        return "" if len(set(memories)) == 1 else "a kernel works in one memory"
    if launch.lane not in COPY_LANES or launch.kernel is not Kernel.COPY:
        return f"{launch.kernel.value} is no work for {launch.lane.value}"
    ends = (
        [Memory.DEVICE, Memory.HOST]
        if launch.lane is Lane.TO_HOST
        else [Memory.HOST, Memory.DEVICE]
    )
    return "" if memories == ends else f"{launch.lane.value} does not copy that way"


def _misposted(group: Group, rank: int, gpus_per_node: int) -> str:
    """Why a group cannot be what it is; empty if it can."""
    if group.lane not in COMMUNICATORS:
        return f"{group.lane.value} has no communicator"
    if not 0 < len(group.posts) <= MOST_POSTS:
        return f"a group has {len(group.posts)} posts; it must have 1 to {MOST_POSTS}"
    for post in group.posts:
        near = node_of(post.peer, gpus_per_node) == node_of(rank, gpus_per_node)
        if post.peer == rank or near is not (group.lane in _NEAR):
            return f"rank {post.peer} is not reached by {group.lane.value}"
        if not post.view.is_dense or post.view.memory is not Memory.DEVICE:
            return f"{post.view} is not side by side in device memory"
    return ""
