"""Items spread over processes: nothing is lost, and one that kills its worker costs only itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from harness.base.workers import spread
from harness.errors import MeasurementError
from tests.harness import jobs
from tests.harness.ranks.test_team import ROOT, gone


def lost(number: int) -> int:
    return -number


def test_every_item_is_worked_on_once() -> None:
    results = list(spread(jobs.square, range(9), jobs=2, lost=lost))
    assert sorted(results) == [n * n for n in range(9)]


def test_answers_that_come_together_are_all_heard_and_large_items_pass() -> None:
    """Small answers pile up while the reader is busy; an item may be larger than a pipe holds."""
    results = spread(
        jobs.size, [b"x" * n for n in (1, 2, 300_000, 3, 4, 5, 400_000)], jobs=1, lost=len
    )
    found = []
    for result in results:
        time.sleep(0.05)
        found.append(result)
    assert sorted(found) == [1, 2, 3, 4, 5, 300_000, 400_000]


def test_what_a_worker_prints_does_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(spread(jobs.chatter, [3], jobs=1, lost=int)) == [3]
    out, err = capfd.readouterr()
    assert out == ""
    assert "print 3" in err
    assert "echo 3" in err


def test_an_exception_that_cannot_be_copied_or_read_is_told_all_the_same() -> None:
    for kind in ("unprintable", "unpicklable"):
        with pytest.raises(MeasurementError, match="OddError in a worker"):
            list(spread(jobs.raise_odd, [kind], jobs=1, lost=len))


def test_a_killed_parent_leaves_no_file_behind(tmp_path: Path) -> None:
    """Nor does a whole group that is killed: no named semaphore, no folder."""
    note = tmp_path / "pid"
    script = (
        "from harness.base.workers import spread\n"
        "from tests.harness import jobs\n"
        "if __name__ == '__main__':\n"
        f"    list(spread(jobs.stay, [{str(note)!r}], jobs=1, lost=len))\n"
    )
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    own = tmp_path / "tmp"
    own.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(own)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (note.exists() and note.read_text()):
        time.sleep(0.05)
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(int(note.read_text()))
    assert list(own.iterdir()) == []
    assert {
        path.name for path in set(shared.iterdir()) - before if path.name.startswith("sem.mp")
    } == set()


def test_an_item_that_kills_its_worker_is_reported_and_the_others_are_not_lost() -> None:
    results = list(spread(jobs.square_or_die, range(9), jobs=2, lost=lost))
    assert sorted(results) == sorted([-5, *(n * n for n in range(9) if n != 5)])


def test_sigterm_is_heard_while_workers_run_and_left_as_it_was() -> None:
    before = signal.getsignal(signal.SIGTERM)
    own = signal.default_int_handler  # stands for the way of a program that calls
    try:
        for handler in (signal.SIG_DFL, own):
            signal.signal(signal.SIGTERM, handler)
            results = spread(jobs.square, range(2), jobs=1, lost=lost)
            next(results)
            assert (signal.getsignal(signal.SIGTERM) is handler) == (handler is own)
            results.close()
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_an_item_raises_is_raised_here() -> None:
    with pytest.raises(ValueError, match="five"):
        list(spread(jobs.square_or_raise, range(9), jobs=2, lost=lost))


def test_items_are_drawn_only_as_they_are_worked_on() -> None:
    drawn = 0

    def endless() -> Iterator[int]:
        nonlocal drawn
        for number in count():
            drawn += 1
            yield number

    results = spread(jobs.square, endless(), jobs=2, lost=lost)
    next(results)
    results.close()
    assert drawn < 8


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = (
        "from harness.base.workers import spread\n"
        "from tests.harness import jobs\n"
        "if __name__ == '__main__':\n"
        f"    list(spread(jobs.stay, [{str(note)!r}], jobs=1, lost=len))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (note.exists() and note.read_text()):
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert gone(int(note.read_text()))
