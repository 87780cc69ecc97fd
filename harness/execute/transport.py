"""How bytes move between ranks: inside one process, or through torch.distributed.

A transport moves whole contiguous buffers; it counts
what it moves at the call, from the tensors themselves, so that the count can be held against the
plan's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(slots=True)
class Traffic:
    """Bytes and messages that each rank sent and received."""

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

    def batch(self) -> AbstractContextManager[None]:
        """Bracket the sends and receives of one task, of which none is waited for inside."""


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

    def batch(self) -> AbstractContextManager[None]:
        """Bracket nothing: each send is there when its receive is called."""
        return nullcontext()


class _Work:
    """Requests of torch.distributed, waited for at most once; one in a batch gets them later."""

    def __init__(self, buffer: torch.Tensor, *requests: dist.Work) -> None:
        self.requests = requests
        self._buffer: torch.Tensor | None = buffer

    def wait(self) -> None:
        for request in self.requests:
            request.wait()
        self.requests, self._buffer = (), None


class GroupTransport:
    """One rank per process, over an initialised torch.distributed group (gloo or nccl).

    Args:
        group: The process group; None is the default one.
        on_message: Called with a line for each message, for the log of a rank that hangs.
        batched: Issue the messages of a task as one batch and without tags, which NCCL needs: it
            has no tags, and a send and a receive that are not in one batch can wait for each other.
            Messages of a pair then match by their order, which is the plan's at both ends.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        on_message: Callable[[str], None] | None = None,
        *,
        batched: bool = False,
    ) -> None:
        self.ranks: tuple[int, ...] = (dist.get_rank(group),)
        self.traffic = Traffic()
        self._group = group
        self._log = on_message
        self._batched = batched
        self._queue: list[tuple[dist.P2POp, _Work]] = []

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Start an isend."""
        self.traffic.sent(src, buffer)
        if self._log is not None:
            self._log(f"send {tag} to {dst}, {buffer.numel() * buffer.element_size()} bytes")
        if self._batched:
            return self._later(dist.isend, buffer, dst)
        request = dist.isend(buffer, group=self._group, group_dst=dst, tag=tag)
        assert request is not None  # this rank is a member of the group
        return _Work(buffer, request)

    def receive(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Start an irecv."""
        self.traffic.received(dst, buffer)
        if self._log is not None:
            self._log(f"receive {tag} from {src}, {buffer.numel() * buffer.element_size()} bytes")
        if self._batched:
            return self._later(dist.irecv, buffer, src)
        request = dist.irecv(buffer, group=self._group, group_src=src, tag=tag)
        assert request is not None  # this rank is a member of the group
        return _Work(buffer, request)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Hold back the messages of a task, then issue them together; without `batched`, nothing.

        Raises:
            RuntimeError: torch.distributed refuses or fails.
        """
        yield
        queue, self._queue = self._queue, []
        if not queue:
            return
        requests = dist.batch_isend_irecv([operation for operation, _ in queue])
        # NCCL gives one request for all, gloo one for each.
        each = len(requests) == len(queue)
        for at, (_, work) in enumerate(queue):
            work.requests = (requests[at],) if each else tuple(requests)

    def _later(
        self, operation: Callable[..., dist.Work | None], buffer: torch.Tensor, peer: int
    ) -> Handle:
        work = _Work(buffer)
        queued = dist.P2POp(operation, buffer, group=self._group, group_peer=peer)
        self._queue.append((queued, work))
        return work
