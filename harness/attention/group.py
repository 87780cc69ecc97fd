"""The ranks that share attention: which group, which of its ranks this is, what it can move."""

import os
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.errors import UnsupportedError
from harness.execute.transport import GroupTransport, LocalTransport, Transport

_BACKENDS = {"gloo": "cpu", "nccl": "cuda"}


def seat(group: dist.ProcessGroup | DeviceMesh | None) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return the group (None = alone), this rank in it, and its size.

    Args:
        group: A process group; or a mesh of one axis, such as `mesh["cp"]`; or None, the default
            group, if there is one.

    Raises:
        ValueError: It is neither, or this process is not in it.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"attention: group has the axes {group.mesh_dim_names or group.ndim}, and must "
                'have one; give one of them, as mesh["cp"]'
            )
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            _warn_of_launched()
            return None, 0, 1
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        rank = dist.get_rank(group)
    elif group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to all others
        rank = -1
    else:
        raise ValueError(
            f"attention: group ({group!r}) must be a process group, as torch.distributed.new_group "
            'gives one, or a mesh of one axis, as mesh["cp"]'
        )
    if rank < 0:
        raise ValueError("attention: this process is not a member of the group")
    return group, rank, dist.get_world_size(group)


def _warn_of_launched() -> None:
    """Warn who was launched beside others and is about to attend alone; once a process."""
    world = os.environ.get("WORLD_SIZE", "")
    if world.isdecimal() and int(world) > 1:
        warnings.warn(
            f"attention: WORLD_SIZE is {world}, but there is no process group, so each process "
            "attends alone (cp = 1); call torch.distributed.init_process_group first",
            stacklevel=2,
        )


def transport_of(group: dist.ProcessGroup | None) -> Transport:
    """The transport of this rank in a group; None = alone. NCCL needs a task's messages at once."""
    if group is None:
        return LocalTransport(1)
    return GroupTransport(group, batched="nccl" in dist.get_backend_config(group))


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
