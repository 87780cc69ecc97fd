"""Ranks that torchrun (or another launcher) has started: rank 0 drives, the others serve.

A launcher starts WORLD_SIZE processes of one and the same command. Here rank 0 goes on as if it
were alone, and the others wait for jobs; `Launched.run` gives a job to the first cp ranks, its own
among them, and collects the answers. The group of a job has just these cp ranks, over gloo, or over
NCCL with a CUDA card per process (that path has not been run on GPUs).

Jobs and answers go through the launcher's store, so that a rank that fails, or does not come back,
can be told from one that works. What a `Team` does by killing its processes is not possible here: a
hung transfer ends by the group's timeout, and a rank that hangs elsewhere is given up with all
cells that would need it. Memory is not capped; the scheduler's limits hold.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from harness.errors import MeasurementError
from harness.ranks.box import Box
from harness.ranks.job import Failure, Member, RankAnswer, WorkerError, failed, perform, value_of
from harness.ranks.meeting import Met
from harness.ranks.wire import pack, pack_call, unpack

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

P = ParamSpec("P")
T = TypeVar("T")
Jobs = Mapping[str, Callable[..., object]]
"""Jobs that the ranks of a launch accept, by name: they do nothing else."""

_GRACE_S = 15.0
_LEAVE_S = 30.0
_LEFT = b"left"


@dataclass(frozen=True, slots=True)
class RankOrder:
    """A job for the first cp ranks.

    Attributes:
        job: Its name; empty sends all ranks home.
        call: Its arguments, as `wire` writes them.
        cp: How many ranks.
        group: Number of the group that they form; a new number is a new group.
        backend: gloo or nccl.
        timeout_s: How long a transfer may take.
        threads: Threads of each rank.
    """

    job: str
    call: bytes = b""
    cp: int = 0
    group: int = 0
    backend: str = ""
    timeout_s: float = 0.0
    threads: int = 1


class Rank:
    """One process of a launch: it knows the store and is in one group at a time.

    Args:
        met: Its place in the launch.
        jobs: The jobs that it accepts.
    """

    def __init__(self, met: Met, jobs: Jobs) -> None:
        self.box = Box(met.store, met.secret)
        self.met = met
        self.rank = met.rank
        self.jobs = jobs
        self._store: Store = met.store
        self._group: int | None = None

    def perform(self, order: RankOrder) -> RankAnswer:
        """Do this rank's part of an order."""
        try:
            self._join(order)
        except Exception as error:  # the boundary of the process: the driver gets the text
            return failed(error)
        job = self.jobs.get(order.job)
        if job is None:
            return failed(ValueError(f"job ({order.job}) must be one of {', '.join(self.jobs)}"))
        return perform(job, Member(self.rank, order.cp), order.call)

    def serve(self) -> int:
        """Perform orders until the driver dismisses the ranks, or is gone.

        Returns:
            The exit status of this process.
        """
        number = 0
        try:
            while (order := self._next(number)).job:
                if self.rank < order.cp:
                    answer = self.perform(order)
                    self.box.put(f"answer/{number}/{self.rank}", pack(RankAnswer, answer))
                elif self._group != order.group:
                    self.leave()  # it is a call of all who are in the group
                number += 1
            # All ranks leave together: on a node, the last one to leave is waited for by all.
            self.box.put(f"left/{self.rank}", _LEFT)
            self.leave()
        except RuntimeError as error:  # the store, and with it the driver, is gone
            sys.stderr.write(f"rank {self.rank}: rank 0 is gone: {str(error).splitlines()[0]}\n")
            return 1
        return 0

    def _next(self, number: int) -> RankOrder:
        data = self.box.waited(f"order/{number}", keep=True)
        assert data is not None  # it waits without end
        order: RankOrder = unpack(RankOrder, data)
        return order

    def leave(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._group = None

    def _join(self, order: RankOrder) -> None:
        """Be in the order's group."""
        import torch
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore

        if self._group == order.group:
            return
        self.leave()
        torch.set_num_threads(order.threads)
        device = None
        if order.backend == "nccl":
            device = torch.device("cuda", own_card(self.met))
            torch.cuda.set_device(device)
        dist.init_process_group(
            order.backend,
            store=PrefixStore(f"group-{order.group}", self._store),
            rank=self.rank,
            world_size=order.cp,
            timeout=timedelta(seconds=order.timeout_s),
            device_id=device,
        )
        self._group = order.group


class Launch:
    """The driver's side of all ranks of a launch.

    Args:
        me: This process, rank 0.
        backend: gloo or nccl.
        grace_s: How long after a job's timeout other ranks may take to say that theirs has passed.
    """

    def __init__(self, me: Rank, backend: str = "gloo", grace_s: float = _GRACE_S) -> None:
        self.world = me.met.world
        self.backend = backend
        self._me = me
        self._grace_s = grace_s
        self._orders = 0
        self._groups: dict[tuple[int, float, int], int] = {}
        self._newest = 0
        self._lost: frozenset[int] = frozenset()

    def crew(self, cp: int, threads: int = 1) -> "Launched":
        """The first cp ranks, as something that runs jobs.

        Raises:
            MeasurementError: There are fewer.
        """
        if cp > self.world:
            raise MeasurementError(f"cp ({cp}) must not exceed the launch's {self.world} processes")
        return Launched(self, cp, threads)

    def lost(self, cp: int) -> list[int]:
        """Which of the first cp ranks did not come back from a job."""
        return sorted(rank for rank in self._lost if rank < cp)

    def order(
        self,
        job: Callable[..., T],
        call: tuple[tuple[object, ...], dict[str, object]],
        want: RankOrder,
    ) -> list[T]:
        """Give the first ranks a job and collect what it returned, by rank.

        Args:
            job: One of the launch's.
            call: Its arguments, by place and by name.
            want: Who does it, and how; what it is comes from the others.

        Raises:
            MeasurementError: The launch does not know the job.
            WorkerError: A rank failed, or did not answer.
        """
        cp, timeout_s = want.cp, want.timeout_s
        if gone := self.lost(cp):
            who = ", ".join(map(str, gone))
            raise WorkerError(
                Failure.ERROR, gone[0], f"rank {who} did not come back from an earlier cell"
            )
        # A new group for another degree, and after any failure; an old one cannot be used again.
        key = (cp, timeout_s, want.threads)
        if self._groups.keys() != {key}:
            self._newest += 1
            self._groups = {key: self._newest}
        order = replace(
            want,
            job=self._name(job),
            call=pack_call(job, *call),
            group=self._newest,
            backend=self.backend,
        )
        number, self._orders = self._orders, self._orders + 1
        self._me.box.put(f"order/{number}", pack(RankOrder, order))
        deadline = time.monotonic() + timeout_s + self._grace_s
        answers = {0: self._me.perform(order)}
        for rank in range(1, cp):
            data = self._me.box.waited(f"answer/{number}/{rank}", deadline)
            if data is not None:
                answers[rank] = _answer(data)
        return [value_of(job, each) for each in self._judged(answers, cp, timeout_s)]

    def _name(self, job: Callable[..., object]) -> str:
        for name, own in self._me.jobs.items():
            if own is job:
                return name
        known = ", ".join(self._me.jobs)
        raise MeasurementError(f"job ({job.__qualname__}) must be one of the launch's: {known}")

    def _judged(
        self, answers: dict[int, RankAnswer], cp: int, timeout_s: float
    ) -> list[RankAnswer]:
        silent = [rank for rank in range(cp) if rank not in answers]
        failed = {rank: answer for rank, answer in answers.items() if answer.kind is not None}
        if silent or failed:
            self._groups = {}
        if silent:
            self._lost |= frozenset(silent)
            reason = f"no answer from rank {', '.join(map(str, silent))} within {timeout_s:g} s"
            detail = "\n".join(answer.detail for answer in failed.values())
            raise WorkerError(Failure.TIMEOUT, silent[0], reason, detail)
        if failed:
            rank = min(failed, key=lambda rank: (failed[rank].at_s, rank))
            first = failed[rank]
            assert first.kind is not None
            raise WorkerError(first.kind, rank, first.reason, first.detail)
        return [answers[rank] for rank in range(cp)]

    def dismiss(self, *, wait: bool = True) -> None:
        """Send the other ranks home, and leave with them.

        Args:
            wait: For a while, until they have heard it: the store may be this process's.
        """
        self._me.box.put(f"order/{self._orders}", pack(RankOrder, RankOrder("")))
        deadline = time.monotonic() + (_LEAVE_S if wait else 0.0)
        for rank in range(1, self.world):
            if rank not in self._lost:
                self._me.box.waited(f"left/{rank}", deadline)
        self._me.leave()


class Launched:
    """The first cp ranks of a launch; it runs jobs as a `Team` does.

    Attributes:
        cp: How many.
    """

    def __init__(self, launch: Launch, cp: int, threads: int) -> None:
        self.cp = cp
        self._launch = launch
        self._threads = threads
        self._open = True

    @property
    def alive(self) -> bool:
        """Whether it can take another job."""
        return self._open and not self._launch.lost(self.cp)

    def run(
        self,
        job: Callable[Concatenate[Member, P], T],
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Run a job on every rank.

        Args:
            job: One of the launch's. Called with the `Member`, then the arguments.
            timeout_s: How long a transfer in it may take, and the job on other ranks, seconds.
            *args: Of the types that it declares, as `wire` has them.
            **kwargs: As above.

        Returns:
            What it returned, by rank.

        Raises:
            WorkerError: A rank raised or hung, or did in an earlier job and never came back.
        """
        if not self._open:
            raise MeasurementError("this crew is closed; ask the launch for another")
        want = RankOrder("", cp=self.cp, timeout_s=timeout_s, threads=self._threads)
        return self._launch.order(job, (args, kwargs), want)

    def close(self) -> None:
        """Take no more jobs; the ranks stay."""
        self._open = False


def _answer(data: bytes) -> RankAnswer:
    try:
        answer: RankAnswer = unpack(RankAnswer, data)
    except ValueError as error:
        return failed(error)
    return answer


def backend_of(met: Met, wanted: str | None = None) -> str:
    """Choose the backend of the ranks: NCCL with a card for each process of this node, else gloo.

    Args:
        met: The launch.
        wanted: The user's choice; None leaves it to the cards.

    Raises:
        MeasurementError: There are cards, but not one for each process; or NCCL is asked for and
            cannot be.
    """
    import torch
    import torch.distributed as dist

    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "gloo" or (wanted is None and not cards):
        return "gloo"
    processes = met.local_world or met.world
    # A scheduler may show each process its own card alone.
    if dist.is_nccl_available() and (cards >= processes or cards == 1):
        return "nccl"
    raise MeasurementError(
        f"NCCL needs a CUDA card for each of the {processes} processes of this node, which sees "
        f"{cards}; show each process its own card, launch fewer, or give --transport gloo"
    )


def own_card(met: Met) -> int:
    """The CUDA card of this process.

    Raises:
        MeasurementError: No launcher says which of several it is.
    """
    import torch

    cards = torch.cuda.device_count()
    if cards == 1:
        return 0
    if met.local_rank is None or met.local_rank >= cards:
        raise MeasurementError(
            f"local rank ({met.local_rank}) must name one of the {cards} cards; set LOCAL_RANK"
        )
    return met.local_rank
