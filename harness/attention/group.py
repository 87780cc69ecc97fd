"""The ranks that share attention: which group, which of its ranks this is, what it can move."""

import torch
import torch.distributed as dist

from harness.errors import UnsupportedError
from harness.execute.transport import GroupTransport, LocalTransport, Transport

_BACKENDS = {"gloo": "cpu", "nccl": "cuda"}


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
