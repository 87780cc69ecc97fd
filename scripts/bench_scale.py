#!/usr/bin/env python
"""Predict ring forward at growing degrees: does the time per task grow with the number of tasks?

.venv/bin/python scripts/bench_scale.py [--cp 64,128,256,512,1024] [--pattern causal]

Plans, proves and predicts S = 16K tokens a rank, each degree in a process of its own. Processor
seconds, microseconds per task, and the peak of resident memory.
"""

import argparse
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise

from harness.cluster.calibration import calibration
from harness.plan.problem import Direction
from harness.plan.residency import without_collection
from harness.planning.strategy import Context
from harness.records.defaults import usual
from harness.simulate.calibrated import pricer, skeleton_on
from harness.terminal.arguments import count, listed
from harness.verify.proof import verify
from strategies import strategy

_PER_RANK = 16384
_MIB = 2**20


def main() -> None:
    """Print one line per degree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cp", type=listed(count), default=(64, 128, 256, 512, 1024))
    parser.add_argument("--pattern", default="causal")
    parser.add_argument("--strategy", default="ring")
    args = parser.parse_args()
    print(
        "| cp | tokens | tasks | plan s | prove s | skeleton s | events s | all s | us/task | MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for cp in args.cp:
        with ProcessPoolExecutor(1) as one:
            print(one.submit(measured, args.strategy, args.pattern, cp).result(), flush=True)


def measured(name: str, pattern: str, cp: int) -> str:
    """One line of the table."""
    fitted = calibration("h100-hamming")
    problem = usual(pattern, cp, cp * _PER_RANK, 32, 8)
    marks = [time.process_time()]
    with without_collection():
        plan = strategy(name).plan(problem, Direction.FORWARD, Context())
        marks.append(time.process_time())
        program = verify(plan)
        marks.append(time.process_time())
        shape = skeleton_on(program, fitted, eager=False, fold=False)
        marks.append(time.process_time())
        pricer(problem, Direction.FORWARD, fitted, eager=False).seconds_of(shape)
        marks.append(time.process_time())
    steps = [after - before for before, after in pairwise(marks)]
    whole = marks[-1] - marks[0]
    tasks = len(plan.tasks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = " | ".join(f"{s:.2f}" for s in (*steps, whole))
    return (
        f"| {cp} | {cp * _PER_RANK // _MIB}M | {tasks} | {times} | "
        f"{whole / tasks * 1e6:.0f} | {peak:.0f} |"
    )


if __name__ == "__main__":
    main()
