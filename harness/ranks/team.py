"""A team of rank processes that runs one job after another.

Starting ranks costs seconds, so a team lives through many jobs and is replaced only after a
failure. The parent talks to each worker through a pipe and watches its time, its exit and its
resident memory; what goes wrong comes back as a `WorkerError` with the worker's own words.
"""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import psutil

from harness.base.workers import die_with_parent
from harness.errors import MeasurementError, told

P = ParamSpec("P")
T = TypeVar("T")
_POLL_S = 0.05
_START_S = 120.0
_GRACE_S = 10.0
"""How long a worker that has closed its pipe or its connections may take to be gone."""
_BROKEN = ("Connection closed by peer", "Connection reset", "Broken pipe")
"""What gloo says where the other rank is gone."""


class Failure(StrEnum):
    """Why a job has no result."""

    ERROR = "error"
    TIMEOUT = "timeout"
    OOM = "oom"


class WorkerError(MeasurementError):
    """A job failed in a worker.

    Attributes:
        kind: Error, timeout or out of memory.
        rank: The worker, or None when it cannot be told.
        detail: The worker's traceback, or where each rank was when time ran out.
    """

    def __init__(self, kind: Failure, rank: int | None, reason: str, detail: str = "") -> None:
        self.kind = kind
        self.rank = rank
        self.reason = reason
        self.detail = detail
        super().__init__(reason if rank is None else f"rank {rank}: {reason}")


@dataclass(frozen=True, slots=True)
class Member:
    """What a job sees of its team."""

    rank: int
    cp: int


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
        self._folder = tempfile.TemporaryDirectory(prefix="cp-team-")
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        try:
            for rank in range(cp):
                here, there = spawn.Pipe()
                process = spawn.Process(
                    target=_serve,
                    args=(rank, cp, self._folder.name, there, threads),
                    daemon=True,
                    name=f"rank-{rank}",
                )
                process.start()
                there.close()
                self._pipes.append(here)
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
            *args: Picklable.
            **kwargs: Picklable.

        Returns:
            What it returned, by rank.

        Raises:
            WorkerError: A worker raised, died, hung or grew past the cap. The team is closed.
        """
        if not self.alive:
            raise MeasurementError("the team is closed; start another")
        try:
            for pipe in self._pipes:
                pipe.send((job, args, kwargs))
            return self._gather(timeout_s)
        except (BrokenPipeError, ConnectionResetError) as error:
            failure = self._dead() or self._closed()
            self.close()
            raise failure from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the workers, at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def _gather(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < self.cp:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            for ready in wait(waiting, timeout=_POLL_S):
                rank = self._pipes.index(ready)  # type: ignore[arg-type]  # only pipes went in
                try:
                    ok, value = self._pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    raise (self._dead() or self._closed()) from None
                if not ok:
                    kind, reason, detail = value
                    # A rank may fail because another died under it: that one is the cause.
                    dying = any(text in detail for text in _BROKEN)
                    dead = self._dead(detail, grace_s=_GRACE_S if dying else 0.0)
                    raise dead or WorkerError(Failure(kind), rank, reason, detail)
                results[rank] = value
            self._check_memory()
            if time.monotonic() > deadline:
                raise self._late(timeout_s, [r for r in range(self.cp) if r not in results])
        return [results[rank] for rank in range(self.cp)]

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
        """What a worker's fault handler wrote, if it did."""
        path = _stack_path(self._folder.name, rank)
        return path.read_text() if path.exists() else ""

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


def _stack_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack-{rank}.txt"


def _serve(rank: int, cp: int, folder: str, pipe: Connection, threads: int) -> None:
    """Be a worker: join the group, then answer jobs until the parent is gone."""
    die_with_parent()
    with _stack_path(folder, rank).open("w") as stacks:
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            _join(rank, cp, folder, threads)
            pipe.send((True, None))
        except Exception as error:  # the process boundary: the parent gets the text
            pipe.send((False, _told(error)))
            return
        while True:
            try:
                job, args, kwargs = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                answer = ForkingPickler.dumps((True, job(Member(rank, cp), *args, **kwargs)))
            except Exception as error:  # the process boundary: the parent gets the text
                answer = ForkingPickler.dumps((False, _told(error)))
            pipe.send_bytes(answer)


def _told(error: Exception) -> tuple[str, str, str]:
    text = told(error)
    memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
    kind = Failure.OOM if memory else Failure.ERROR
    return kind.value, text.splitlines()[0], traceback.format_exc()


def _join(rank: int, cp: int, folder: str, threads: int) -> None:
    import torch  # the parent only needs torch if it uses it itself
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # the public name is not in the type stubs

    torch.set_num_threads(threads)
    store = FileStore(str(Path(folder) / "store"), cp)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=cp, timeout=timedelta(days=1)
    )
