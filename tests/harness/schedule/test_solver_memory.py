"""A solver that writes beyond its memory takes the process along: each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

from harness.schedule.list_schedules import StreamInstance
from harness.schedule.stream_programs import TimeWindow, cumulative

WINDOW = Path(__file__).parents[2] / "fixtures" / "schedules" / "crashed_with_cuts.json"


def solve() -> None:
    """Solve what SCIP 10.0.2 aborted on while it separated cuts: a plan of 118 tasks on 8 ranks."""
    given = json.loads(WINDOW.read_text())
    tuples = (tuple(map(tuple, given[name])) for name in ("streams", "after"))
    instance = StreamInstance(tuple(given["durations"]), *tuples, tuple(given["moves"]))
    window = TimeWindow(instance, given["heads"], given["tails"], given["floor"])
    starts = tuple(given["starts"])
    answer, better = cumulative(
        window, starts, bound=given["bound"], time_limit_s=5, seed=0, log=False
    )
    assert better is not None
    assert answer.value == 1132815  # Source: SCIP's own proof, 0.45 s


def test_a_program_that_solver_cuts_crash_on_is_solved() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    solve()
