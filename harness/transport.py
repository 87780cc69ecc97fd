"""How bytes move between ranks: inside one process, or through torch.distributed.

The only file that knows torch.distributed. A transport moves whole contiguous buffers; it counts
what it moves at the call, from the tensors themselves, so that the count can be held against the
plan's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(slots=True)
class Traffic:
    """What each rank sent and received: bytes, and messages."""

    sent_bytes: dict[int, int] = field(default_factory=dict)
    received_bytes: dict[int, int] = field(default_factory=dict)
    messages: dict[int, int] = field(default_factory=dict)

    def sent(self, rank: int, tensor: torch.Tensor) -> None:
        """Count one message that leaves a rank."""
        size = tensor.numel() * tensor.element_size()
        self.sent_bytes[rank] = self.sent_bytes.get(rank, 0) + size
        self.messages[rank] = self.messages.get(rank, 0) + 1

    def received(self, rank: int, tensor: torch.Tensor) -> None:
        """Count one message that reaches a rank."""
        size = tensor.numel() * tensor.element_size()
        self.received_bytes[rank] = self.received_bytes.get(rank, 0) + size


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the buffer may be read (received) or reused (sent)."""


class Transport(Protocol):
    """Moves contiguous buffers between ranks; `tag` names one message of a run."""

    ranks: tuple[int, ...]
    """The ranks that live in this process."""
    traffic: Traffic

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Start to send; the buffer must stay unchanged until the handle is done."""

    def receive(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Start to receive into a buffer."""


class _Done:
    """A transfer that is over; it keeps its buffer, as one under way would, until waited for."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer: torch.Tensor | None = buffer

    def wait(self) -> None:
        """Let the buffer go."""
        self._buffer = None


class LocalTransport:
    """All ranks in one process: a send leaves its buffer, the receive copies it.

    Ranks run their tasks in the plan's order, so that a send is always called before its receive.
    """

    def __init__(self, cp: int) -> None:
        self.ranks = tuple(range(cp))
        self.traffic = Traffic()
        self._mail: dict[int, torch.Tensor] = {}

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Leave a buffer for its receiver."""
        del dst
        self.traffic.sent(src, buffer)
        self._mail[tag] = buffer
        return _Done(buffer)

    def receive(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Copy the buffer that was left."""
        del src
        self.traffic.received(dst, buffer)
        buffer.copy_(self._mail.pop(tag))
        return _Done(buffer)


class _Work:
    """A torch.distributed request, waited for at most once."""

    def __init__(self, request: dist.Work, buffer: torch.Tensor) -> None:
        self._request: dist.Work | None = request
        self._buffer: torch.Tensor | None = buffer

    def wait(self) -> None:
        if self._request is not None:
            self._request.wait()
            self._request = self._buffer = None


class GroupTransport:
    """One rank per process, over an initialised torch.distributed group (gloo or nccl).

    Args:
        group: The process group; None is the default one.
        on_message: Called with a line for each message, for the log of a rank that hangs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        on_message: Callable[[str], None] | None = None,
    ) -> None:
        self.ranks = (dist.get_rank(group),)
        self.traffic = Traffic()
        self._group = group
        self._log = on_message

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Start an isend."""
        self.traffic.sent(src, buffer)
        if self._log is not None:
            self._log(f"send {tag} to {dst}, {buffer.numel() * buffer.element_size()} bytes")
        request = dist.isend(buffer, group=self._group, group_dst=dst, tag=tag)
        assert request is not None  # this rank is a member of the group
        return _Work(request, buffer)

    def receive(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Start an irecv."""
        self.traffic.received(dst, buffer)
        if self._log is not None:
            self._log(f"receive {tag} from {src}, {buffer.numel() * buffer.element_size()} bytes")
        request = dist.irecv(buffer, group=self._group, group_src=src, tag=tag)
        assert request is not None  # this rank is a member of the group
        return _Work(request, buffer)
