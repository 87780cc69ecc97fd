"""A team of rank processes that runs one job after another.

Starting ranks costs seconds, so a team lives through many jobs and is replaced only after a
failure. The parent talks to each worker through a pipe and watches its time, its exit and its
resident memory; what goes wrong comes back as a `WorkerError` with the worker's own words.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import psutil

from harness.base import pipe as pipes
from harness.base.pipe import MOST_BYTES, Pipe
from harness.base.text import MOST_TRACE
from harness.base.workers import die_with_parent
from harness.errors import MeasurementError
from harness.ranks.job import Failure, Member, RankAnswer, WorkerError, failed, perform, value_of
from harness.ranks.wire import pack, pack_call, unpack

__all__ = ("Failure", "Member", "Team", "WorkerError")

P = ParamSpec("P")
T = TypeVar("T")
_POLL_S = 0.05
_START_S = 120.0
LOOPBACK = "lo"
"""Linux's name of the interface that no other machine reaches."""
_GRACE_S = 10.0
"""How long a worker that has closed its pipe or its connections may take to be gone."""
_BROKEN = ("Connection closed by peer", "Connection reset", "Broken pipe")
"""Parts of gloo's messages about a rank that is gone."""


@dataclass(frozen=True, slots=True)
class _Order:
    """An order to a worker: the job's module, its name there, and its arguments."""

    module: str
    name: str
    call: bytes


class Team:
    """cp worker processes joined in a gloo group.

    Args:
        cp: How many.
        threads: Threads of each.
        memory_bytes: Cap on the resident memory of each worker; None is no cap.
        start_s: How long they may take to start.
    """

    def __init__(
        self,
        cp: int,
        *,
        threads: int = 1,
        memory_bytes: int | None = None,
        start_s: float = _START_S,
    ) -> None:
        self.cp = cp
        self.memory_bytes = memory_bytes
        self._store: int | None = os.memfd_create("ranks")  # a file that nobody has to remove
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._stacks: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        store = f"/proc/{os.getpid()}/fd/{self._store}"
        try:
            for rank in range(cp):
                here, there = spawn.Pipe()
                stack, stack_there = spawn.Pipe(duplex=False)
                process = spawn.Process(
                    target=_serve,
                    args=(rank, cp, store, there, stack_there, threads),
                    daemon=True,
                    name=f"rank-{rank}",
                )
                process.start()
                there.close()
                stack_there.close()
                os.set_blocking(stack.fileno(), False)
                self._pipes.append(Pipe(here, min(memory_bytes or MOST_BYTES, MOST_BYTES)))
                self._stacks.append(stack)
                self._processes.append(process)
            self._gather(start_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the team."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the workers."""
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it can take another job."""
        return bool(self._processes)

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
            timeout_s: How long it may take, seconds.
            *args: Of the types that it declares, as `wire` has them.
            **kwargs: As above.

        Returns:
            What it returned, by rank.

        Raises:
            WorkerError: A worker raised, died, hung or grew past the cap. The team is closed.
        """
        if not self.alive:
            raise MeasurementError("the team is closed; start another")
        order = pack(_Order, _Order(*_found(job), pack_call(job, args, kwargs)))
        try:
            end = time.monotonic() + timeout_s
            for pipe in self._pipes:
                pipe.send(order, end - time.monotonic())
            answers = self._gather(end - time.monotonic(), timeout_s)
            return [_read(job, rank, answer) for rank, answer in enumerate(answers)]
        except TimeoutError:
            failure = self._late(timeout_s, range(self.cp))
        except (BrokenPipeError, ConnectionResetError):
            failure = self._dead() or self._closed()
        except BaseException:
            self.close()
            raise
        self.close()
        raise failure

    def close(self) -> None:
        """Stop the workers, at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe, stack in zip(self._pipes, self._stacks, strict=True):
            pipe.close()
            stack.close()
        if self._store is not None:
            os.close(self._store)
        self._processes, self._pipes, self._stacks, self._store = [], [], [], None

    def _gather(self, left_s: float, timeout_s: float | None = None) -> list[RankAnswer]:
        """Wait for an answer of each worker; `timeout_s` is what an error says of the time."""
        answers: dict[int, RankAnswer] = {}
        deadline = time.monotonic() + left_s
        while len(answers) < self.cp:
            waiting = {
                pipe.fileno(): rank for rank, pipe in enumerate(self._pipes) if rank not in answers
            }
            for ready in wait(list(waiting), timeout=_POLL_S):
                rank = waiting[ready]  # type: ignore[index]  # only numbers went in
                answer = self._heard(rank)
                if answer is None:
                    continue
                if answer.kind is not None:
                    # A rank may fail because another died under it: that one is the cause.
                    dying = any(text in answer.detail for text in _BROKEN)
                    dead = self._dead(answer.detail, grace_s=_GRACE_S if dying else 0.0)
                    raise dead or WorkerError(answer.kind, rank, answer.reason, answer.detail)
                answers[rank] = answer
            self._check_memory()
            if time.monotonic() > deadline:
                silent = [rank for rank in range(self.cp) if rank not in answers]
                raise self._late(timeout_s or left_s, silent)
        return [answers[rank] for rank in range(self.cp)]

    def _heard(self, rank: int) -> RankAnswer | None:
        """Return a worker's answer once all of it has arrived."""
        try:
            message = self._pipes[rank].receive()
            answer: RankAnswer | None = None if message is None else unpack(RankAnswer, message)
        except EOFError:
            raise (self._dead() or self._closed()) from None
        except ValueError as error:
            raise WorkerError(Failure.ERROR, rank, f"its answer is broken: {error}") from None
        return answer

    def _check_memory(self) -> None:
        if self.memory_bytes is None:
            return
        for rank, process in enumerate(self._processes):
            try:
                size = psutil.Process(process.pid).memory_info().rss
            except psutil.NoSuchProcess:
                continue
            if size > self.memory_bytes:
                raise WorkerError(
                    Failure.OOM,
                    rank,
                    f"resident memory of {size / 2**30:.3g} GiB passed the cap of "
                    f"{self.memory_bytes / 2**30:.3g} GiB",
                )

    def _dead(self, told: str = "", grace_s: float = _GRACE_S) -> WorkerError | None:
        """Find a worker that is gone: its last words, else what a survivor told."""
        gone = wait([process.sentinel for process in self._processes], timeout=grace_s)
        for rank, process in enumerate(self._processes):
            if process.sentinel not in gone:
                continue
            process.join()  # the sentinel closes a moment before the exit status is there
            code = process.exitcode or 0
            detail = self._stack(rank) or told
            if code == -signal.SIGKILL:
                reason = "was killed (signal 9), by the system when memory is short, or by a person"
            elif code < 0:
                reason = f"was killed by signal {-code} ({signal.Signals(-code).name})"
            else:
                reason = f"exited with status {code}"
            return WorkerError(Failure.ERROR, rank, reason, detail)
        return None

    def _closed(self) -> WorkerError:
        return WorkerError(Failure.ERROR, None, "a worker closed its pipe")

    def _stack(self, rank: int) -> str:
        """Return the output of a worker's fault handler, if there is any."""
        try:
            return os.read(self._stacks[rank].fileno(), MOST_TRACE).decode(errors="replace")
        except OSError:
            return ""

    def _late(self, timeout_s: float, silent: Sequence[int]) -> WorkerError:
        """Ask the silent ranks where they are, then give up on them."""
        for rank in silent:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        stacks = [f"rank {rank}:\n{self._stack(rank)}" for rank in silent]
        reason = f"no answer from rank {', '.join(map(str, silent))} within {timeout_s:g} s"
        return WorkerError(Failure.TIMEOUT, silent[0], reason, "\n".join(stacks))


def _found(job: Callable[..., object]) -> tuple[str, str]:
    """The module and the name under which a worker finds a job.

    Raises:
        MeasurementError: It has none.
    """
    module, name = job.__module__, job.__qualname__
    if "<" in name:
        raise MeasurementError(f"job ({name}) must be a function of a module, by its name")
    return module, name


def _read(job: Callable[..., T], rank: int, answer: RankAnswer) -> T:
    try:
        value: T = value_of(job, answer)
    except ValueError as error:
        raise WorkerError(Failure.ERROR, rank, f"its answer is broken: {error}") from None
    return value


def _serve(
    rank: int, cp: int, store: str, pipe: Connection, stack: Connection, threads: int
) -> None:
    """Be a worker: join the group, then answer jobs until the parent is gone."""
    die_with_parent()
    os.dup2(2, 1)  # stdout is the parent's, for results
    sys.stdout = sys.stderr
    faulthandler.enable(file=stack.fileno())
    faulthandler.register(signal.SIGUSR1, file=stack.fileno())
    try:
        _join(rank, cp, store, threads)
        pipes.send(pipe, pack(RankAnswer, RankAnswer()))
    except Exception as error:  # the process boundary: the parent gets the text
        pipes.send(pipe, pack(RankAnswer, failed(error)))
        return
    while True:
        try:
            order = unpack(_Order, pipes.receive(pipe))
        except (EOFError, OSError):
            return
        try:
            job: Any = importlib.import_module(order.module)
            for name in order.name.split("."):
                job = getattr(job, name)
        except Exception as error:  # as above
            answer = failed(error)
        else:
            answer = perform(job, Member(rank, cp), order.call)
        pipes.send(pipe, pack(RankAnswer, answer))


def _join(rank: int, cp: int, path: str, threads: int) -> None:
    import torch  # the parent only needs torch if it uses it itself
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # the public name is not in the type stubs

    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)  # all ranks are on this machine
    store = FileStore(path, cp)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=cp, timeout=timedelta(days=1)
    )
