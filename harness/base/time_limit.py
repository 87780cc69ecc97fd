"""A limit on the time of a piece of work in this process."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class OverTime(BaseException):  # no error: what bounds errors must let it through
    """The time is over; raised inside `time_limit`, wherever the work is."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `OverTime` inside when it takes longer: between two steps of Python, not amid a call.

    Nothing is limited where seconds are None, nor in a thread other than the main one, which
    gets no signals. A limit around this one, if there is any, goes on.

    Raises:
        OverTime: The time is over.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _over)
    begin = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            again = max(left - (time.monotonic() - begin), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, again)


def _over(*_: object) -> NoReturn:
    raise OverTime
