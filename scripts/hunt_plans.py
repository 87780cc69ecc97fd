"""Hunt for wrong plans that are proved: change right plans and judge what comes of them.

    .venv/bin/python scripts/hunt_plans.py --count 20000 --seed 1

Plans of all strategies, both directions, attention and layers, cp 1 to 4, are changed one to three
times each. Every changed plan must be refused by a rule, or run on all ranks in float64 and be
right within 1e-12, and the second proof (on sets of contributions) must agree. Prints how many
ended how; exits with 1 and writes the plans at fault, where there are any.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hunt is part of the tests

from tests.hunt.campaign import Outcome, hunt


def main() -> int:
    """Hunt and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20000, help="changed plans (20000)")
    parser.add_argument("--seed", type=int, default=1, help="of the changes (1)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("faults"),
        help="folder of plans at fault (faults)",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    start_s = time.process_time()
    tally = hunt(args.count, args.seed)
    print(f"{args.count} changed plans, seed {args.seed}, {time.process_time() - start_s:.0f} s")
    for outcome, number in tally.outcomes.most_common():
        print(f"{number:7} {outcome}")
    for title, counts in (
        ("rules that refused", tally.rules),
        ("rules that refused what the second proof finds right", tally.strict),
    ):
        print(f"\n{title}")
        for rule, number in counts.most_common():
            print(f"{number:7} {rule}")
    for number, (reason, text) in enumerate(tally.faults):
        args.output.mkdir(parents=True, exist_ok=True)
        path = args.output / f"{number}.json"
        path.write_text(text)
        print(f"{path}: {reason}")
    return 1 if tally.outcomes[Outcome.FAULT] else 0


if __name__ == "__main__":
    sys.exit(main())
