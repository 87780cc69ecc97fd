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

import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from harness.errors import MeasurementError, told
from harness.ranks.team import Failure, Member, WorkerError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

P = ParamSpec("P")
T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PART = 2**22  # bytes of a value in the store; it refuses more than 8 MiB
_POLL_S, _POLL_MOST_S = 0.002, 0.1
_GRACE_S = 15.0
_LEAVE_S = 30.0
_MEETING_S = 300.0


def launched() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return all(os.environ.get(name) for name in _VARIABLES)


class Box:
    """Values of any size, by key, in the launcher's store.

    Args:
        store: A `torch.distributed` store that all ranks share.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store

    def put(self, key: str, value: object) -> None:
        """Leave a value."""
        data = pickle.dumps(value)
        parts = [data[at : at + _PART] for at in range(0, len(data), _PART)]
        for number, part in enumerate(parts):
            self._store.set(f"{key}/{number}", part)  # type: ignore[arg-type]  # bytes do
        self._store.set(key, str(len(parts)))

    def has(self, key: str) -> bool:
        """Whether a value is there, whole."""
        return bool(self._store.check([key]))

    def take(self, key: str, *, keep: bool = False) -> Any:  # noqa: ANN401  # any job's answer
        """Return a value that is there, and remove it."""
        count = int(self._store.get(key))
        data = b"".join(self._store.get(f"{key}/{number}") for number in range(count))
        if not keep:
            for name in (key, *(f"{key}/{number}" for number in range(count))):
                self._store.delete_key(name)
        return pickle.loads(data)

    def waited(self, key: str, deadline: float | None = None) -> bool:
        """Wait until a value is there; False once `deadline`, of the monotonic clock, has passed.

        The store is polled: its own wait cannot tell a time-out from a store that is gone.
        """
        pause = _POLL_S
        while not self.has(key):
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _POLL_MOST_S)
        return True


@dataclass(frozen=True, slots=True)
class Order:
    """A job for the first cp ranks.

    Attributes:
        job: A module-level function, called with the `Member`, then the arguments.
        args: Positional arguments.
        kwargs: Keyword arguments.
        cp: How many ranks.
        group: Number of the group that they form; a new number is a new group.
        backend: gloo or nccl.
        timeout_s: How long a transfer may take.
        threads: Threads of each rank.
    """

    job: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cp: int
    group: int
    backend: str
    timeout_s: float
    threads: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an order on one rank.

    Attributes:
        value: What the job returned.
        kind: How it failed; None if it did not.
        reason: Its error, a line.
        detail: Its traceback.
        at_s: When, seconds of the system's clock: the first failure is the cause of others.
    """

    value: Any = None
    kind: Failure | None = None
    reason: str = ""
    detail: str = ""
    at_s: float = field(default_factory=time.time)


class Rank:
    """One process of a launch: it knows the store and is in one group at a time.

    Args:
        store: Shared by all ranks of the launch.
        rank: Of this process.
        local_rank: Its number on its node; its CUDA card, where there is one for each.
    """

    def __init__(self, store: "Store", rank: int, local_rank: int = 0) -> None:
        self.box = Box(store)
        self.rank = rank
        self._store = store
        self._local_rank = local_rank
        self._group: int | None = None

    def perform(self, order: Order) -> Answer:
        """Do this rank's part of an order."""
        try:
            self._join(order)
            return Answer(order.job(Member(self.rank, order.cp), *order.args, **order.kwargs))
        except Exception as error:  # the boundary of the process: the driver gets the text
            text = told(error).splitlines()[0]
            return Answer(None, _kind(error), text, traceback.format_exc())

    def serve(self) -> None:
        """Perform orders until the driver dismisses the ranks."""
        number = 0
        while True:
            self.box.waited(f"order/{number}")
            order: Order | None = self.box.take(f"order/{number}", keep=True)
            if order is None:
                self.leave()
                self.box.put(f"left/{self.rank}", True)
                return
            if self.rank < order.cp:
                answer = self.perform(order)
                try:
                    self.box.put(f"answer/{number}/{self.rank}", answer)
                except (pickle.PicklingError, TypeError, AttributeError) as error:
                    lost = Answer(None, Failure.ERROR, f"answer cannot be sent: {error}")
                    self.box.put(f"answer/{number}/{self.rank}", lost)
            number += 1

    def leave(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._group = None

    def _join(self, order: Order) -> None:
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
            device = torch.device("cuda", self._local_rank)
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


def _kind(error: Exception) -> Failure:
    text = str(error).lower()
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return Failure.OOM
    return Failure.TIMEOUT if "timed out" in text or "timeout" in text else Failure.ERROR


class Launch:
    """The driver's side of all ranks of a launch.

    Args:
        me: This process, rank 0.
        world: How many ranks there are.
        backend: gloo or nccl.
        grace_s: How long after a job's timeout other ranks may take to say that theirs has passed.
    """

    def __init__(
        self, me: Rank, world: int, backend: str = "gloo", grace_s: float = _GRACE_S
    ) -> None:
        self.world = world
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

    def order(self, cp: int, threads: int, timeout_s: float, call: tuple[Any, Any, Any]) -> Any:  # noqa: ANN401  # as above
        """Give the first cp ranks a job and collect what it returned, by rank.

        Raises:
            WorkerError: A rank failed, or did not answer.
        """
        if gone := self.lost(cp):
            who = ", ".join(map(str, gone))
            raise WorkerError(
                Failure.ERROR, gone[0], f"rank {who} did not come back from an earlier cell"
            )
        # A new group for another degree, and after any failure; an old one cannot be used again.
        key = (cp, timeout_s, threads)
        if self._groups.keys() != {key}:
            self._newest += 1
            self._groups = {key: self._newest}
        order = Order(*call, cp, self._newest, self.backend, timeout_s, threads)
        number, self._orders = self._orders, self._orders + 1
        self._me.box.put(f"order/{number}", order)
        deadline = time.monotonic() + timeout_s + self._grace_s
        answers = {0: self._me.perform(order)}
        for rank in range(1, cp):
            if self._me.box.waited(f"answer/{number}/{rank}", deadline):
                answers[rank] = self._me.box.take(f"answer/{number}/{rank}")
        return self._judged(answers, cp, timeout_s)

    def _judged(self, answers: dict[int, Answer], cp: int, timeout_s: float) -> list[Any]:
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
        return [answers[rank].value for rank in range(cp)]

    def dismiss(self) -> None:
        """Send the other ranks home and wait a while for them to have heard it."""
        self._me.leave()
        self._me.box.put(f"order/{self._orders}", None)
        deadline = time.monotonic() + _LEAVE_S
        for rank in range(1, self.world):
            if rank not in self._lost:
                self._me.box.waited(f"left/{rank}", deadline)


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
        """Run a module-level function on every rank.

        Args:
            job: Called with the `Member`, then the arguments.
            timeout_s: How long a transfer in it may take, and the job on other ranks, seconds.
            *args: Picklable.
            **kwargs: Picklable.

        Returns:
            What it returned, by rank.

        Raises:
            WorkerError: A rank raised or hung, or did in an earlier job and never came back.
        """
        if not self._open:
            raise MeasurementError("this crew is closed; ask the launch for another")
        results: list[T] = self._launch.order(
            self.cp, self._threads, timeout_s, (job, args, kwargs)
        )
        return results

    def close(self) -> None:
        """Take no more jobs; the ranks stay."""
        self._open = False


def join() -> Rank:
    """Meet the other ranks of the launch.

    Raises:
        RuntimeError: They do not come.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=_MEETING_S)))
    return Rank(store, rank, int(os.environ.get("LOCAL_RANK", "0")))


def drive(me: Rank) -> Launch:
    """As rank 0, take the lead."""
    return Launch(me, int(os.environ["WORLD_SIZE"]), _backend())


def _backend() -> str:
    """NCCL with a card for each process of this node, else gloo."""
    import torch
    import torch.distributed as dist

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "nccl" if dist.is_nccl_available() and cards >= processes else "gloo"
