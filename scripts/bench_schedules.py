"""Stream schedules against breadth-first order, on the graphs of `ultraattn` plans: a table.

PYTHONPATH=. .venv/bin/python scripts/bench_schedules.py > results/schedules.md

`breadth-first` is the public code's other scheduler, with keys that are not renewed; `critical
path` a list; `best` the whole pipeline with its bound. The last row is one large graph.
"""

import argparse
import time
from datetime import date
from math import exp, log

from harness.cluster import DEFAULT, Cluster, cluster
from harness.contexts import context_on
from harness.plan import Plan
from harness.problem import Direction, Dtype, Problem
from harness.stream_schedule import Method, StreamSchedule, schedule_streams
from patterns import make_pattern
from strategies import strategy

PATTERNS = ("full", "causal", "strided", "global_local", "star", "streaming")
METHODS = (Method.BREADTH_FIRST, Method.CRITICAL_PATH, Method.BEST)
HEADER = [
    "pattern",
    "cp",
    "direction",
    "tasks",
    "breadth-first",
    "critical-path",
    "best",
    "bound",
    "gap",
    "from",
    "seconds",
]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cp", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seqlen", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the search, per graph")
    parser.add_argument("--cluster", default=DEFAULT)
    args = parser.parse_args()
    machine = cluster(args.cluster)
    print(f"# Stream schedules, {args.cluster}\n")
    print(
        f"{date.today().isoformat()}; S {args.seqlen}, {args.heads} heads of 128, bfloat16; "
        "milliseconds; graphs after kernel tiling.\n"
    )
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    ratios: dict[Method, list[float]] = {method: [] for method in METHODS[:-1]}
    for cp in args.cp:
        for pattern in PATTERNS:
            problem = _problem(pattern, args.seqlen, args.heads, cp)
            for direction in Direction:
                chosen = strategy("ultraattn:levels=remap+node+device+kernel")
                plan = chosen.plan(problem, direction, context_on(machine))
                found = _row([pattern, str(cp), direction.value[:3]], plan, machine, args.seconds)
                for method, times in ratios.items():
                    times.append(found[method].makespan_s / found[Method.BEST].makespan_s)
    large = _problem("full", 128 * 1024, args.heads, 64)
    owner = strategy("owner").plan(large, Direction.BACKWARD, context_on(machine))
    start = time.perf_counter()
    _row(["full, owner", "64", "bac"], owner, machine, 20.0)
    print(f"\nThe last, {len(owner.tasks)} tasks: {time.perf_counter() - start:.1f} s in all.\n")
    for method, times in ratios.items():
        mean = exp(sum(map(log, times)) / len(times))
        print(f"- {method.value} over best: {mean:.3f}x geometric mean, at most {max(times):.3f}x")


def _problem(pattern: str, seqlen: int, heads: int, cp: int) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=heads,
        heads_kv=heads,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def _row(
    names: list[str], plan: Plan, machine: Cluster, seconds: float
) -> dict[Method, StreamSchedule]:
    found = {
        method: schedule_streams(plan, machine, method=method, time_limit_s=seconds)
        for method in METHODS
    }
    best = found[Method.BEST]
    times = [f"{found[method].makespan_s * 1e3:.3f}" for method in METHODS]
    end = [f"{best.bound_s * 1e3:.3f}", f"{best.gap:.2%}", best.source, f"{best.seconds:.1f}"]
    print("| " + " | ".join([*names, str(len(plan.tasks)), *times, *end]) + " |", flush=True)
    return found


if __name__ == "__main__":
    main()
