"""Communicators of a device program over torch.distributed: one group of processes for each lane.

Never run on NCCL yet.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from harness.play.player import BindGroup
from harness.play.streams import Request
from harness.program.check_progress import matched
from harness.program.operations import COMMUNICATORS, DeviceProgram, Group, Lane, PostEnd


def linked_ranks(program: DeviceProgram, device: torch.device) -> BindGroup:
    """Make a communicator for each lane that a program uses, and connect its ranks.

    All processes of the default group call this together. Ranks connect in one order, before
    anything else is told: to connect holds the hosts of both ends.

    Args:
        program: The programs of all ranks.
        device: Where this process's arenas are.
    """
    used = {
        operation.lane
        for rank in program.ranks
        for operation in rank.operations
        if isinstance(operation, Group)
    }
    groups = {lane: _new_group(device) for lane in Lane if lane in used & COMMUNICATORS}
    here, byte = dist.get_rank(), torch.zeros(1, dtype=torch.uint8, device=device)
    for src, dst, lane in matched(program.ranks).connections:
        if here in (src, dst):
            end = (PostEnd.SEND, dst, byte) if here == src else (PostEnd.RECEIVE, src, byte)
            for request in _group_starter(groups, lane, (end,))():
                request.wait()
    return partial(_group_starter, groups)


def _new_group(device: torch.device) -> dist.ProcessGroup:
    """A communicator; on CUDA its own stream has priority over kernels."""
    if device.type != "cuda":
        made = dist.new_group(backend="gloo")
    else:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        made = dist.new_group(backend="nccl", pg_options=options, device_id=device)
    assert isinstance(made, dist.ProcessGroup)  # every rank is a member
    return made


def _group_starter(
    groups: Mapping[Lane, dist.ProcessGroup],
    lane: Lane,
    posts: Sequence[tuple[PostEnd, int, torch.Tensor]],
) -> Callable[[], Sequence[Request]]:
    operations = [
        dist.P2POp(
            dist.isend if end is PostEnd.SEND else dist.irecv,
            tensor,
            group=groups[lane],
            group_peer=peer,
        )
        for end, peer, tensor in posts
    ]
    return partial(dist.batch_isend_irecv, operations)
