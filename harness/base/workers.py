"""Worker processes: they end with their parent, and one that dies costs only its own item."""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import NoReturn, TypeVar

T = TypeVar("T")
R = TypeVar("R")
_PR_SET_PDEATHSIG = 1
"""Source: Linux, include/uapi/linux/prctl.h."""
_QUEUED = 2
"""Items handed out per worker: one under way, one waiting."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came while workers were at work: all ends as with Ctrl-C."""


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
        lost: What stands for the result of an item whose worker died.
        start: Module-level function that each worker calls first.

    Yields:
        Results as they are done, not in the order of the items.
    """
    todo = iter(items)
    while True:
        suspects = yield from _until_broken(work, todo, jobs, start)
        if not suspects:
            return
        # One of them kills its worker, and takes what ran beside it along: try each alone.
        for item in suspects:
            if (yield from _until_broken(work, iter([item]), 1, start)):
                yield lost(item)


def _until_broken(
    work: Callable[[T], R], todo: Iterator[T], jobs: int, start: Callable[[], None] | None
) -> Generator[R, None, list[T]]:
    """Work until all is done or a worker dies; return the items that were under way then."""
    executor = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_begin, initargs=(start,)
    )
    drawn: list[T] = []
    running: dict[Future[R], T] = {}
    _hear_sigterm()
    try:
        while True:
            drawn += islice(todo, _QUEUED * jobs - len(running))
            while drawn:
                running[executor.submit(_tidy, work, drawn[0])] = drawn[0]
                del drawn[0]
            if not running:
                break
            for future in wait_for(running, return_when=FIRST_COMPLETED).done:
                result = future.result()
                del running[future]
                yield result
    except BrokenProcessPool:
        return [*running.values(), *drawn]
    except BaseException:  # nobody waits for what is under way
        for process in dict(executor._processes or {}).values():
            process.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)
        _leave_sigterm()
    return []


def _hear_sigterm() -> None:
    """Let SIGTERM raise `Terminated`, unless the program has its own way: pools must be closed."""
    here = threading.current_thread() is threading.main_thread()  # others may set no handler
    if here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _leave_sigterm() -> None:
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(*_: object) -> NoReturn:
    """Raise once: `timeout` sends the signal twice, and what closes must not be broken off."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def _begin(start: Callable[[], None] | None) -> None:
    die_with_parent()
    gc.disable()  # plans are many small values without cycles; see `_tidy`
    if start is not None:
        start()


def _tidy(work: Callable[[T], R], item: T) -> R:
    """Work on one item and collect cycles after it, not amid it."""
    try:
        return work(item)
    finally:
        gc.collect()
