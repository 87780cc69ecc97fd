"""Teams of rank processes: what goes wrong in one comes back with the reason, and ends it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness.errors import MeasurementError
from harness.ranks.team import Failure, Team, WorkerError
from tests.harness import jobs

ROOT = Path(__file__).parents[3]
SOON_S = 60.0


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with Team(2) as team:
        yield team


def fresh(memory_bytes: int | None = None) -> Team:
    return Team(2, memory_bytes=memory_bytes)


def gone(pid: int) -> bool:
    """Whether a process ends within seconds; one that only waits to be reaped has."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_every_rank_answers_in_the_order_of_ranks(pair: Team) -> None:
    assert pair.run(jobs.ranks, SOON_S, 7) == [70, 71]


def test_a_team_runs_many_jobs_in_the_same_processes(pair: Team) -> None:
    assert pair.run(jobs.pid, SOON_S) == pair.run(jobs.pid, SOON_S)


def test_an_exception_comes_back_with_its_rank_and_traceback() -> None:
    with fresh() as team:
        with pytest.raises(
            WorkerError, match="rank 1: internal error, KeyError: 'the missing shard'"
        ) as caught:
            team.run(jobs.fail, SOON_S, 1)
        assert not team.alive
        with pytest.raises(MeasurementError, match="closed"):
            team.run(jobs.pid, SOON_S)
    assert (caught.value.kind, caught.value.rank) == (Failure.ERROR, 1)
    assert "in fail" in caught.value.detail


def test_an_exit_is_an_error_of_the_rank_that_left() -> None:
    with (
        fresh() as team,
        pytest.raises(WorkerError, match="rank 1: exited with status 3") as caught,
    ):
        team.run(jobs.leave, SOON_S, 1, 3)
    assert caught.value.kind is Failure.ERROR


def test_a_kill_is_an_error_of_the_rank_that_was_killed_not_of_those_that_missed_it() -> None:
    with fresh() as team, pytest.raises(WorkerError, match=r"rank 1: was killed \(signal 9\)"):
        team.run(jobs.die, SOON_S, 1, signal.SIGKILL)


def test_a_crash_tells_the_signal_and_where_the_rank_was() -> None:
    with fresh() as team, pytest.raises(WorkerError, match=r"rank 1: .* 11 .SIGSEGV") as caught:
        team.run(jobs.die, SOON_S, 1, signal.SIGSEGV)
    assert "in die" in caught.value.detail


def test_a_hang_is_a_timeout_and_tells_where_the_rank_was() -> None:
    with fresh() as team:
        pids = team.run(jobs.pid, SOON_S)
        with pytest.raises(WorkerError, match=r"no answer from rank 1 within 0\.5 s") as caught:
            team.run(jobs.hang, 0.5, 1)
        assert all(map(gone, pids))
    assert caught.value.kind is Failure.TIMEOUT
    assert "in hang" in caught.value.detail


def test_growth_without_end_is_out_of_memory() -> None:
    with fresh(memory_bytes=700 * 2**20) as team:
        pids = team.run(jobs.pid, SOON_S)
        with pytest.raises(
            WorkerError, match=r"rank 1: .* passed the cap of 0\.68\d* GiB"
        ) as caught:
            team.run(jobs.grow, SOON_S, 1)
        assert all(map(gone, pids))
    assert caught.value.kind is Failure.OOM


def test_an_answer_that_cannot_be_sent_is_an_error() -> None:
    with fresh() as team, pytest.raises(WorkerError, match="cannot be sent"):
        team.run(jobs.unsendable, SOON_S)


def test_what_ranks_print_does_not_reach_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    with fresh() as team:
        assert team.run(jobs.say, SOON_S, "print") == [0, 1]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("print") == err.count("echo") == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("empty", "internal error, ValueError:"),
        ("blank", "internal error, ValueError:"),
        ("unprintable", "internal error, OddError: its text cannot be made, RuntimeError"),
        ("escape", r"\x1b]0;title\x07 \x9b2J \u202e half \ud800 of it"),
        ("huge", "x" * 100),
    ],
)
def test_whatever_a_rank_says_is_a_short_printable_line(kind: str, reason: str) -> None:
    with fresh() as team, pytest.raises(WorkerError) as caught:
        team.run(jobs.say, SOON_S, kind)
    assert caught.value.reason.startswith(reason)
    assert len(caught.value.reason) < 3_000
    assert len(caught.value.detail) < 30_000
    for text in (caught.value.reason, caught.value.detail.replace("\n", "")):
        assert text.isprintable()
        text.encode()


def test_a_rank_that_is_stopped_amid_its_answer_holds_nobody_past_the_time_limit() -> None:
    with fresh() as team:
        team.run(jobs.pid, SOON_S)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=r"no answer from rank 1 within 3 s"):
            team.run(jobs.stop_amid_answer, 3.0, 1)
        assert time.monotonic() - begin < 20


def test_what_begins_no_message_is_told_at_once() -> None:
    with fresh() as team:
        begin = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1: its answer is broken: message of"):
            team.run(jobs.spoil_pipe, SOON_S, 1)
        assert time.monotonic() - begin < SOON_S / 2


def test_ranks_that_do_not_start_in_time_are_a_timeout() -> None:
    with pytest.raises(WorkerError, match=r"within 0\.01 s") as caught:
        Team(2, start_s=0.01)
    assert caught.value.kind is Failure.TIMEOUT


@pytest.mark.parametrize("job", ["jobs.hang, 600, 1", "jobs.pid, 600"])
def test_ranks_do_not_outlive_a_parent_that_is_killed_and_leave_nothing(
    job: str, tmp_path: Path
) -> None:
    """Whether they are in the middle of a job or wait for one."""
    script = (
        "from harness.ranks.team import Team\n"
        "from tests.harness import jobs\n"
        "import time\n"
        "if __name__ == '__main__':\n"
        "    team = Team(2)\n"
        "    print(*team.run(jobs.pid, 60), flush=True)\n"
        f"    team.run({job})\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pids = list(map(int, parent.stdout.readline().split()))
    parent.kill()
    parent.wait()
    assert len(pids) == 2
    assert all(map(gone, pids))
    assert list(tmp_path.iterdir()) == []
