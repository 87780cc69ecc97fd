"""A limit on time ends what is inside, wherever it is, and nothing else."""

import signal
import time
from contextlib import suppress

import pytest

from harness.base.time_limit import OverTime, time_limit
from harness.base.workers import spread
from tests.harness import jobs


def work(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(Exception):  # as a boundary of errors does
            sum(range(100))


def test_work_that_takes_longer_is_ended_and_other_work_is_not() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OverTime), time_limit(0.05):
        work(30)
    with time_limit(20):
        work(0)
    with time_limit(None):
        work(0)

    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_limit_inside_another_leaves_it_as_it_was() -> None:
    def both() -> None:
        with suppress(OverTime), time_limit(0.05):
            work(30)
        work(30)

    begin = time.monotonic()
    with pytest.raises(OverTime), time_limit(0.3):
        both()

    assert time.monotonic() - begin < 20


def test_workers_end_what_takes_too_long() -> None:
    assert sorted(spread(jobs.endless_if_odd, range(1, 5), jobs=2, lost=int)) == [-3, -1, 2, 4]
