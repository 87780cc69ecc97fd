#!/usr/bin/env python3
"""Kill sweeps at random moments and see that nothing is lost, torn, doubled or left behind.

    .venv/bin/python scripts/hunt_kills.py --count 30 --seed 1

A small simulated sweep with two workers is killed (`kill -9` of its parent alone, or of its whole
group) and then resumed. Each time the records that were there must stay as they were, the resumed
sweep must have each cell once, and no process, named semaphore or temporary file may be left.
Prints the counts; exits with 1 and says what was wrong, where anything was.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from harness.terminal.arguments import count

sys.path.insert(0, str(Path(__file__).parents[1]))  # the sweeps are those of the tests

from tests.harness import sweeps

LONGEST_S = 60.0
"""After so long a sweep that has not come to the moment of its end is killed."""
SEMAPHORES = Path("/dev/shm")  # where Linux keeps them


def semaphores() -> set[str]:
    """Named semaphores of this machine."""
    return {path.name for path in SEMAPHORES.glob("sem.*")} if SEMAPHORES.exists() else set()


def killed(folder: Path, draw: Random, cells: int) -> int:
    """Start a sweep and kill it after some of its cells; the number of records that it left."""
    process = sweeps.start("sweep", *sweeps.SIMULATED, "-o", str(folder), "--jobs", "2")
    wanted, ends_s = draw.randint(0, cells), time.monotonic() + LONGEST_S
    while process.poll() is None and sweeps.lines(folder) < wanted and time.monotonic() < ends_s:
        time.sleep(0.01)
    time.sleep(draw.uniform(0.0, 0.2))
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    if draw.random() < 0.5:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    sweeps.kill(process)
    _, alive = psutil.wait_procs(children, timeout=10)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    if left:
        raise AssertionError(f"{len(left)} processes outlive it")
    return len(sweeps.kept(folder))


def judged(folder: Path, draw: Random, expected: list[str]) -> int:
    """Kill and resume one sweep; the number of records that the kill left.

    Raises:
        AssertionError: Something is lost, torn, doubled or left behind.
    """
    shared = semaphores()
    number = killed(folder, draw, len(expected))
    before = sweeps.kept(folder)
    done = sweeps.run("sweep", *sweeps.SIMULATED, "-o", str(folder), "--jobs", "2", "--resume")
    if done.returncode:
        raise AssertionError(f"the resumed sweep ends with {done.returncode}: {done.stderr}")
    after = sweeps.kept(folder)
    if after[: len(before)] != before:
        raise AssertionError("records that were there have changed")
    if sorted(after) != expected:
        raise AssertionError(f"{len(after)} records, {len(set(after))} cells, of {len(expected)}")
    if semaphores() - shared:
        raise AssertionError(f"semaphores are left: {sorted(semaphores() - shared)}")
    return number


def main() -> int:
    """Kill, resume and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=count, default=30, help="sweeps to kill (30)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (1)")
    args = parser.parse_args()
    draw, left, faults = Random(args.seed), [], []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "tmp").mkdir()
        os.environ["TMPDIR"] = str(root / "tmp")
        whole = root / "whole"
        sweeps.run("sweep", *sweeps.SIMULATED, "-o", str(whole))
        expected = sorted(sweeps.kept(whole))
        for number in range(args.count):
            try:
                left.append(judged(root / str(number), draw, expected))
            except AssertionError as error:
                faults.append(f"kill {number}: {error}")
        files = sorted(path.name for path in (root / "tmp").iterdir())
    if files:
        faults.append(f"temporary files are left: {', '.join(files)}")
    print(f"{args.count} kills, seed {args.seed}: {len(faults)} faults")
    print(f"records left by a kill, of {len(expected)}: {sorted(left)}")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
