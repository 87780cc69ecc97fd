"""Lanes of one rank on a device: CUDA streams, or a host that does everything when it is told.

Never run on a GPU yet.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeAlias

import torch

from harness.plan.tasks import Memory
from harness.play.bound import Arenas
from harness.program.operations import COMMUNICATORS, Lane


class Request(Protocol):
    """Messages under way, as torch.distributed has them."""

    def wait(self) -> object:
        """On CUDA hold the current stream until they are done, elsewhere the host."""


Requests: TypeAlias = list[Request]
"""Those of a group; empty once they were waited for."""

Mark: TypeAlias = "torch.cuda.Event | list[Requests]"
"""A moment on a lane that others can wait for: an event, or requests that were under way then."""


class Streams(Protocol):
    """The lanes of one rank."""

    device: torch.device

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Tell what is inside to a lane."""

    def issue(self, lane: Lane, start: Callable[[], Sequence[Request]]) -> None:
        """Tell a group to its lane."""

    def mark(self) -> Mark:
        """Make a mark, once for all runs."""

    def record(self, mark: Mark, lane: Lane) -> None:
        """Set a mark to what a lane was told so far."""

    def hold(self, mark: Mark, lane: Lane) -> None:
        """Let a lane go on only after a mark, which may be another rank's."""

    def fork(self) -> None:
        """Let every lane go on after what the caller's stream was told so far."""

    def join(self) -> None:
        """Let the caller's stream go on after all lanes."""


def arenas_on(device: torch.device, sizes: Mapping[Memory, int]) -> Arenas:
    """Allocate a rank's arenas: one block of the device, and one of pinned host memory."""
    pinned = device.type == "cuda"
    host = device if device.type == "meta" else torch.device("cpu")
    return {
        memory: torch.empty(size, dtype=torch.uint8, device=device)
        if memory is Memory.DEVICE
        else torch.empty(size, dtype=torch.uint8, device=host, pin_memory=pinned)
        for memory, size in sizes.items()
    }


class HostStreams:
    """Launches are done when they are told; groups are under way until somebody waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._under_way: dict[Lane, Requests] = {}

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Do what is inside."""
        del lane
        return nullcontext()

    def issue(self, lane: Lane, start: Callable[[], Sequence[Request]]) -> None:
        """Start a group after the one before it on its lane."""
        _settle(self._under_way.get(lane, []))
        self._under_way[lane] = list(start())

    def mark(self) -> Mark:
        """Make a mark of nothing."""
        return []

    def record(self, mark: Mark, lane: Lane) -> None:
        """Note what is under way."""
        assert isinstance(mark, list)  # it was made here
        mark[:] = [self._under_way.get(lane, [])]

    def hold(self, mark: Mark, lane: Lane) -> None:
        """Wait for what was under way then."""
        del lane
        assert isinstance(mark, list)  # as above
        for requests in mark:
            _settle(requests)

    def fork(self) -> None:
        """Nothing is under way."""

    def join(self) -> None:
        """Wait for all."""
        for requests in self._under_way.values():
            _settle(requests)


def _settle(requests: Requests) -> None:
    while requests:
        requests.pop(0).wait()


class CudaStreams:
    """One CUDA stream for each lane; those of communicators have priority.

    A transfer becomes ready when a kernel ends, together with the next kernel, which would take all
    multiprocessors otherwise.
    """

    def __init__(self, device: torch.device, lanes: Iterable[Lane]) -> None:
        self.device = device
        self._streams = {
            lane: torch.cuda.Stream(  # type: ignore[no-untyped-call]  # torch: no annotations
                device, priority=-1 if lane in COMMUNICATORS else 0
            )
            for lane in lanes
        }
        self._edge = torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Tell what is inside to a lane's stream."""
        return torch.cuda.stream(self._streams[lane])

    def issue(self, lane: Lane, start: Callable[[], Sequence[Request]]) -> None:
        """Start a group on the current stream, its lane's, and let that wait for its end."""
        del lane
        for request in start():
            request.wait()

    def mark(self) -> Mark:
        """Make an event."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]  # as above

    def record(self, mark: Mark, lane: Lane) -> None:
        """Record an event on a lane's stream."""
        assert not isinstance(mark, list)  # it was made here
        mark.record(self._streams[lane])

    def hold(self, mark: Mark, lane: Lane) -> None:
        """Let a lane's stream wait for an event."""
        assert not isinstance(mark, list)  # as above
        self._streams[lane].wait_event(mark)

    def fork(self) -> None:
        """Let every stream wait for the current one; a capture of it takes them all along."""
        self._edge.record(torch.cuda.current_stream(self.device))
        for stream in self._streams.values():
            stream.wait_event(self._edge)

    def join(self) -> None:
        """Let the current stream wait for all."""
        current = torch.cuda.current_stream(self.device)
        for stream in self._streams.values():
            current.wait_stream(stream)


def streams_on(device: torch.device, lanes: Iterable[Lane]) -> Streams:
    """Return the streams for a device."""
    return CudaStreams(device, lanes) if device.type == "cuda" else HostStreams(device)
