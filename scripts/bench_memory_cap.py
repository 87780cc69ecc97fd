"""What a cap of memory costs `ultraattn`: plans at half of all-gather's peak, as a Markdown table.

    .venv/bin/python scripts/bench_memory_cap.py --cp 64 --seqlen 131072 --heads 32 --seconds 0.05

Peaks are proved by the ledger; times are simulated on h100-hamming, bfloat16, head dim 128. The cap
of a direction is half of what all-gather holds in it.
"""

import argparse
import sys

from harness.cluster.presets import DEFAULT_CLUSTER, cluster
from harness.memory.ledger import ledger
from harness.plan.problem import Direction, Dtype, Problem
from harness.prepare.planner_context import context_on
from harness.proved.plans import proved
from harness.simulate.simulator import simulate
from patterns import make_pattern
from strategies import strategy

PATTERNS = ("full", "causal", "strided", "global_local", "star", "streaming")
HEAD = """\
| pattern | pass | all-gather | cap | held | without cap | ms | without cap | all-gather |
|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    """Plan, prove and print each row; 1 if a plan breaks its cap."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cp", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.05, help="budget of a search (0.05)")
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    args = parser.parse_args()
    sys.stdout.write(HEAD + "\n")
    for pattern in args.patterns:
        problem = Problem(
            pattern=make_pattern(pattern, args.seqlen),
            heads_q=args.heads,
            heads_kv=args.heads,
            head_dim=128,
            dtype=Dtype.BFLOAT16,
            cp=args.cp,
        )
        for direction in Direction:
            sys.stdout.write(_row(problem, direction, args.seconds) + "\n")
            sys.stdout.flush()
    return 0


def _row(problem: Problem, direction: Direction, seconds: float) -> str:
    gathered, gathered_s = _plan("allgather", problem, direction)
    cap = f"{gathered / 2:.4f}"
    own = f"ultraattn:seconds={seconds}"
    free, free_s = _plan(own, problem, direction)
    held, held_s = _plan(f"{own},memory={cap}", problem, direction)
    assert held <= float(cap)
    gib = f"{gathered:.2f} GiB | {float(cap):.2f} GiB | {held:.2f} GiB | {free:.2f} GiB"
    times = f"{held_s * 1e3:.2f} | {free_s * 1e3:.2f} | {gathered_s * 1e3:.2f}"
    return f"| {problem.pattern.text} | {direction.value} | {gib} | {times} |"


def _plan(text: str, problem: Problem, direction: Direction) -> tuple[float, float]:
    """GiB of the fullest rank, and seconds."""
    machine = cluster(DEFAULT_CLUSTER)
    program = proved(strategy(text), problem, direction, context_on(machine))
    return max(ledger(program).peak_bytes) / 2**30, simulate(program, machine).makespan_s


if __name__ == "__main__":
    sys.exit(main())
