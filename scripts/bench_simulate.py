#!/usr/bin/env python
"""Time the simulator on plans of 64 ranks: seconds and microseconds per task, best of three.

.venv/bin/python scripts/bench_simulate.py [--cp 64] [--seqlen 512k]
"""

import argparse
import time

from harness.cluster.presets import cluster
from harness.plan.problem import Direction
from harness.planning.strategy import Context
from harness.records.defaults import usual
from harness.simulate.bounds import bounds
from harness.simulate.simulator import simulate
from harness.terminal.arguments import count, length
from harness.verify.proof import verify
from strategies import STRATEGIES, strategy

_REPEATS = 3


def main() -> None:
    """Print one line per strategy and direction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", default="causal")
    parser.add_argument("--cp", type=count, default=64)
    parser.add_argument("--seqlen", type=length, default=length("512k"))
    args = parser.parse_args()
    problem = usual(args.pattern, args.cp, args.seqlen, 64)
    machine = cluster()
    print(
        f"{'strategy':<14}{'direction':<10}{'tasks':>7}{'verify s':>10}{'simulate s':>12}", end=""
    )
    print(f"{'us/task':>9}{'makespan ms':>13}{'bound ms':>10}")
    for name in STRATEGIES:
        for direction in Direction:
            plan = strategy(name).plan(problem, direction, Context())
            begin = time.perf_counter()
            program = verify(plan)
            verify_s = time.perf_counter() - begin
            best_s = float("inf")
            for _ in range(_REPEATS):
                begin = time.perf_counter()
                trace = simulate(program, machine)
                best_s = min(best_s, time.perf_counter() - begin)
            tasks, bound_s = len(plan.tasks), bounds(program, machine).bound_s
            print(
                f"{name:<14}{direction.value:<10}{tasks:>7}{verify_s:>10.3f}{best_s:>12.3f}"
                f"{best_s / tasks * 1e6:>9.1f}{trace.makespan_s * 1e3:>13.3f}{bound_s * 1e3:>10.3f}"
            )


if __name__ == "__main__":
    main()
