"""Ranks as threads whose sends end only when the receiver has posted its buffer.

Rendezvous protocols do so for long messages: a plan whose order relies on buffers would stop here.
Bytes are copied as late as is allowed, when either side first waits, so that a buffer which is
written too early, or read too early, shows.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

import strategies
from harness.execute import shards
from harness.execute.interpreter import Run, execute
from harness.execute.transport import Handle, Traffic
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.tasks import Resident, Tensor
from harness.planning.strategy import Context
from harness.verify.proof import verify

STUCK_S = 20.0
"""A rank that waits so long for another is stuck."""


class StuckError(Exception):
    """A rank waits for a message that never comes, or that nobody takes."""


@dataclass(slots=True)
class _Message:
    sent: torch.Tensor | None = None
    taken: torch.Tensor | None = None
    copied: bool = False


@dataclass(slots=True)
class Meeting:
    """Where senders and receivers meet; the first rank that fails wakes all others."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[int, _Message] = field(default_factory=dict)
    failed: bool = False

    def meet(self, tag: int) -> None:
        """Wait until both sides are here, then copy, once.

        Raises:
            StuckError: The other side does not come.
        """
        ends_s = time.monotonic() + STUCK_S
        with self.changed:
            message = self.messages[tag]
            while message.sent is None or message.taken is None:
                if self.failed or not self.changed.wait(max(ends_s - time.monotonic(), 0)):
                    raise StuckError(f"message {tag} waits for its other side")
            if not message.copied:
                message.taken.copy_(message.sent)
                message.copied = True


@dataclass(frozen=True, slots=True)
class _Waiting:
    meeting: Meeting
    tag: int

    def wait(self) -> None:
        self.meeting.meet(self.tag)


class SynchronousTransport:
    """One rank of a team of threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.ranks = (rank,)
        self.traffic = Traffic()
        self._meeting = meeting

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Offer a buffer."""
        del dst
        self.traffic.sent(src, buffer)
        return self._posted(tag, sent=buffer)

    def receive(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Ask for a message."""
        del src
        self.traffic.received(dst, buffer)
        return self._posted(tag, taken=buffer)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Bracket nothing: posts never wait."""
        yield

    def _posted(
        self, tag: int, *, sent: torch.Tensor | None = None, taken: torch.Tensor | None = None
    ) -> Handle:
        with self._meeting.changed:
            message = self._meeting.messages.setdefault(tag, _Message())
            if sent is not None:
                message.sent = sent
            if taken is not None:
                message.taken = taken
            self._meeting.changed.notify_all()
        return _Waiting(self._meeting, tag)


def run_in_threads(program: Program, inputs: Mapping[Resident, torch.Tensor]) -> Run:
    """Run a proved plan, a thread for each rank.

    Raises:
        StuckError: Some ranks wait for each other.
    """
    cp, meeting, whole = program.plan.problem.cp, Meeting(), Run({})

    def rank_of(rank: int) -> Run:
        own = {resident: x for resident, x in inputs.items() if resident.place.rank == rank}
        try:
            return execute(program, own, SynchronousTransport(rank, meeting))
        except BaseException:
            with meeting.changed:
                meeting.failed = True
                meeting.changed.notify_all()
            raise

    with ThreadPoolExecutor(cp) as threads:
        for run in threads.map(rank_of, range(cp)):
            whole.results.update(run.results)
    return whole


def in_threads(
    problem: Problem, strategy: str, context: Context, given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Plan, prove and run forward and backward; the global results by the oracle's names."""
    chosen, ranks = strategies.strategy(strategy), range(problem.cp)
    forward = verify(chosen.plan(problem, Direction.FORWARD, context))
    tensors = {Tensor.Q: given["q"], Tensor.K: given["k"], Tensor.V: given["v"]}
    first = run_in_threads(forward, shards.initial_inputs(forward.plan, tensors, ranks)).results
    backward = verify(chosen.plan(problem, Direction.BACKWARD, context))
    inputs = {
        each: first[each]
        if each in first
        else shards.take(backward.plan, given["dout"], each.piece)
        for each in backward.plan.initial
    }
    second = run_in_threads(backward, inputs).results
    own = {each: first[each] for each in forward.plan.outputs}
    found = {
        "out": shards.collect(forward.plan, own, Tensor.OUT),
        "lse": shards.collect(forward.plan, first, Tensor.LSE),
    }
    for tensor in (Tensor.DQ, Tensor.DK, Tensor.DV):
        found[tensor.value] = shards.collect(backward.plan, second, tensor)
    return found
