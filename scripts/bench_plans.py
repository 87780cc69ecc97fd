"""Seconds to build and to verify plans at cp = 64: both directions of every shared strategy.

    .venv/bin/python scripts/bench_plans.py

Processor seconds of this process, so that other work on the machine counts less.
"""

import time

from harness.plan.problem import Direction, Problem
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

NAMES = ("ring", "zigzag", "stripe", "allgather", "ulysses", "usp", "double_ring")
PROBLEM = Problem(pattern=make_pattern("causal", 1024), heads_q=64, heads_kv=8, head_dim=128, cp=64)


def main() -> None:
    """Print one line per plan and the total."""
    total_s = 0.0
    print(f"{'strategy':12} {'direction':9} {'tasks':>6} {'build_s':>8} {'verify_s':>8}")
    for name in NAMES:
        for direction in Direction:
            start_s = time.process_time()
            plan = strategy(name).plan(PROBLEM, direction)
            built_s = time.process_time()
            verify(plan)
            done_s = time.process_time()
            total_s += done_s - start_s
            print(
                f"{name:12} {direction:9} {len(plan.tasks):6} "
                f"{built_s - start_s:8.2f} {done_s - built_s:8.2f}"
            )
    print(f"total {total_s:.2f} s")


if __name__ == "__main__":
    main()
