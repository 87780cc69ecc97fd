"""Hunt for configurations that run and are wrong, beside a reference written from scratch.

    .venv/bin/python scripts/hunt_configurations.py --count 2000 --seed 1
    .venv/bin/python scripts/hunt_configurations.py --count 1000 --synchronous

Strategies with random options, patterns, lengths, heads, batch, degrees and nodes are drawn;
each runs forward and backward in float64 with fresh buffers full of NaN, and must be right within
1e-12 or be refused. With `--synchronous` each rank is a thread, and a send ends only when its
receiver has posted a buffer: a plan that relies on buffered sends is stuck there. Prints how many
ended how; exits with 1 and the configurations at fault, where there are any.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from harness.terminal.arguments import count

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hunt is part of the tests

from tests.hunt.configurations import hunt_configurations


def main() -> int:
    """Hunt and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=count, default=2000, help="configurations (2000)")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (1)")
    parser.add_argument("--synchronous", action="store_true", help="ranks as threads that meet")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start_s = time.perf_counter()
    tally = hunt_configurations(args.count, args.seed, synchronous=args.synchronous)
    took_s = time.perf_counter() - start_s
    print(f"{args.count} configurations, seed {args.seed}, {took_s:.0f} s")
    for verdict, number in tally.verdicts.most_common():
        print(f"{number:7} {verdict}")
    print("\nright, by strategy")
    for name, number in tally.by_strategy.most_common():
        print(f"{number:7} {name}")
    for fault in tally.faults:
        print(f"\n{fault}")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
