"""Seconds to build and to verify plans at one degree: both directions of every shared strategy.

    .venv/bin/python scripts/bench_plans.py [--cp 64]

Processor seconds of this process, so that other work on the machine counts less.
"""

import argparse
import time

from harness.plan.problem import Direction
from harness.records.defaults import usual
from harness.terminal.arguments import count, length, listed
from harness.verify.proof import verify
from strategies import strategy

NAMES = ("ring", "zigzag", "stripe", "allgather", "ulysses", "usp", "double_ring")


def main() -> None:
    """Print one line per plan and the total."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", type=listed(str), default=NAMES, help="names")
    parser.add_argument("--pattern", default="causal", help="who attends whom")
    parser.add_argument("--cp", type=count, default=64, help="degree")
    parser.add_argument("--seqlen", type=length, default=1024, help="tokens, all ranks")
    args = parser.parse_args()
    problem = usual(args.pattern, args.cp, args.seqlen, 64, 8)
    total_s = 0.0
    print(f"{'strategy':12} {'direction':9} {'tasks':>6} {'build_s':>8} {'verify_s':>8}")
    for name in args.strategies:
        for direction in Direction:
            start_s = time.process_time()
            plan = strategy(name).plan(problem, direction)
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
