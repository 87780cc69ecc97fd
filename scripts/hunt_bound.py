"""Hunt for a plan that beats the bound that no plan may beat (docs/bounds.md).

    .venv/bin/python scripts/hunt_bound.py --problems 300 --seed 1

Plans random problems with every strategy, simulates the plans on clusters whose links are slowed at
random, and compares each time with the bound. Prints how near plans come; exits with 1 and names
the plans that beat it, where there are any.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hunt is part of the tests

from strategies import STRATEGIES
from tests.hunt.beaten import races


def main() -> int:
    """Hunt and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=300, help="random problems (300)")
    parser.add_argument("--seed", type=int, default=1, help="of the problems (1)")
    parser.add_argument(
        "--most", type=int, default=len(STRATEGIES), help="strategies of each (all)"
    )
    args = parser.parse_args()
    start_s = time.process_time()
    found = list(races(args.problems, args.seed, args.most))
    print(f"{args.problems} problems, seed {args.seed}, {time.process_time() - start_s:.0f} CPU s")
    for what, number in Counter(race.own_dealing.what for race in found).most_common():
        nearest = min(
            race.time_s / race.own_dealing.bound_s
            for race in found
            if race.own_dealing.what == what
        )
        print(f"{number:7} plans, bound by {what}; the nearest takes {nearest:.3f} of it")
    won = [race for race in found if race.won]
    for race in won:
        print(f"BEATEN {race.time_s:g} s, {race.own_dealing}: {race.text}")
    print(f"{len(won)} of {len(found)} plans beat the bound")
    return 1 if won else 0


if __name__ == "__main__":
    sys.exit(main())
