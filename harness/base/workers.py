"""Worker processes: they end with their parent, and one that dies costs only its own item.

Parent and worker talk through a pair of sockets without a name, which the worker inherits: no other
process has an end of it. So items and results may travel there as `multiprocessing` pickles them.
Nothing else is made that would have to be removed, no named semaphore and no folder: a parent that
is killed leaves nothing behind.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, NoReturn, TypeVar

from harness.base import pipe as pipes
from harness.base.pipe import Pipe
from harness.base.text import trace
from harness.errors import MeasurementError

T = TypeVar("T")
R = TypeVar("R")
_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""
_SMALL = 2**14
"""Bytes that a pipe holds in any case: an item of so many may wait in it for its turn."""
_SEND_S = 600.0
_ENDS = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: all ends as with Ctrl-C.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def die_with_parent() -> None:
    """Let this worker of `multiprocessing` be killed when its parent is gone; leave Ctrl-C to it.

    Linux kills it at once, even inside a hung kernel call. Elsewhere a thread watches the parent,
    which works while the interpreter runs. The parent must start workers from a thread that
    outlives them: to Linux the end of that thread is the end of the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent_process()
    if parent is None:
        return
    if os.getppid() != parent.pid:  # it went before it could be watched
        os._exit(1)
    threading.Thread(target=_watch, args=(parent.sentinel,), daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send what any code here prints on stdout to stderr meanwhile: stdout is for results."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C code has printed and not yet written
        os.dup2(kept, 1)
        os.close(kept)


def spread(
    work: Callable[[T], R],
    items: Iterable[T],
    *,
    jobs: int,
    lost: Callable[[T], R],
    start: Callable[[], None] | None = None,
) -> Iterator[R]:
    """Work on items side by side; hand out few at a time, so that `items` may be endless.

    Args:
        work: Module-level function of one item.
        items: Picklable.
        jobs: How many processes.
        lost: Makes the result of an item whose worker died.
        start: Module-level function that each worker calls first.

    Yields:
        Results as they are done, not in the order of the items.
    """
    with ended_by_signals():
        suspects = yield from _spread(work, _Todo(items), jobs, start)
        # Others may have taken the memory that a suspect lacked: each has another try, alone.
        for item in suspects:
            if (yield from _spread(work, _Todo([item]), 1, start)):
                yield lost(item)


class _Todo(Generic[T]):
    """Items that nobody has yet; those that were given back come first."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._back: deque[T] = deque()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._back.popleft() if self._back else next(self._items)

    def give_back(self, items: Sequence[T]) -> None:
        """Put items in front of the others."""
        self._back.extendleft(reversed(items))


@dataclass(slots=True)
class _Worker(Generic[T]):
    """A process, the parent's end of its pipe, and what it has been given and not answered."""

    process: BaseProcess
    pipe: Pipe
    given: list[T] = field(default_factory=list)
    alive: bool = True


def _spread(
    work: Callable[[T], R], todo: _Todo[T], jobs: int, start: Callable[[], None] | None
) -> Generator[R, None, list[T]]:
    """Work until all is done; return the items whose workers died of them."""
    workers: list[_Worker[T]] = []
    suspects: list[T] = []
    try:
        while True:
            _hand_out(todo, workers, jobs, work, start)
            busy = {worker.pipe.fileno(): worker for worker in workers if worker.given}
            if not busy:
                return suspects
            for number in wait(list(busy)):
                worker = busy[number]  # type: ignore[index]  # only numbers went in
                for message in _answers(worker):
                    _hand_out(todo, workers, jobs, work, start)
                    yield _result(message)
                if not worker.alive:
                    workers.remove(worker)
                    _close([worker])
                    suspects += worker.given[:1]
                    todo.give_back(worker.given[1:])
    finally:
        _close(workers)


def _answers(worker: _Worker[T]) -> Iterator[bytes]:
    """Yield the unread answers of a worker; mark the worker if it has died."""
    while True:
        try:
            message = worker.pipe.receive()
        except EOFError:
            worker.alive = False
            return
        if message is None:
            return
        del worker.given[0]
        yield message


def _hand_out(
    todo: _Todo[T],
    workers: list[_Worker[T]],
    jobs: int,
    work: Callable[[T], R],
    start: Callable[[], None] | None,
) -> None:
    """Give items to workers that have none, and one more to each if it is small."""
    while True:
        idle = next((worker for worker in workers if not worker.given), None)
        free = idle or next((worker for worker in workers if len(worker.given) == 1), None)
        if free is None and len(workers) >= jobs:
            return
        item = next(todo, _NOTHING)
        if isinstance(item, _Nothing):
            return
        message = bytes(ForkingPickler.dumps(item))
        if idle is None and len(workers) < jobs:
            free = _started(work, start)
            workers.append(free)
        elif idle is None and len(message) > _SMALL:
            todo.give_back([item])
            return
        assert free is not None
        free.given.append(item)
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is seen when it is read
            free.pipe.send(message, _SEND_S)


class _Nothing:
    """Marker for the end of the items."""


_NOTHING = _Nothing()


def _started(work: Callable[[T], R], start: Callable[[], None] | None) -> _Worker[T]:
    spawn = get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(there, work, start), daemon=True)
    process.start()
    there.close()
    return _Worker(process, Pipe(here))


def _close(workers: Iterable[_Worker[T]]) -> None:
    """End workers at once: nobody waits for what is under way."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.pipe.close()


def _result(message: bytes) -> Any:  # noqa: ANN401  # whatever the work returns
    ok, value = ForkingPickler.loads(message)
    if not ok:
        raise value
    return value


def _serve(pipe: Connection, work: Callable[[T], R], start: Callable[[], None] | None) -> None:
    """Be a worker: answer items until the parent is gone."""
    die_with_parent()
    os.dup2(2, 1)  # stdout is the parent's, for results
    sys.stdout = sys.stderr
    gc.disable()  # plans are many small values without cycles; they are collected between items
    if start is not None:
        start()
    while True:
        try:
            item = ForkingPickler.loads(pipes.receive(pipe))
        except (EOFError, OSError):
            return
        try:
            answer = ForkingPickler.dumps((True, work(item)))
        except Exception as error:  # the boundary of the process: it is raised in the parent
            answer = ForkingPickler.dumps((False, _portable(error)))
        pipes.send(pipe, bytes(answer))
        gc.collect()


def _portable(error: Exception) -> Exception:
    """An exception that arrives: itself, or where it cannot be pickled one that says the same."""
    try:
        error.add_note(trace(traceback.format_exc()))
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception as other:  # some exceptions cannot be copied or printed
        return MeasurementError(f"{type(error).__name__} in a worker ({type(other).__name__})")
    return error


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Terminated`, unless the program has its own way with them."""
    here = threading.current_thread() is threading.main_thread()  # others may set no handler
    heard = [n for n in _ENDS if here and signal.getsignal(n) is signal.SIG_DFL]
    for number in heard:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, _: object) -> NoReturn:
    """Raise once: `timeout` sends the signal twice, and what closes must not be broken off."""
    signal.signal(number, signal.SIG_IGN)
    raise Terminated(number)
