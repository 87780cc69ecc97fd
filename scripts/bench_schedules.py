"""Stream schedules against breadth-first order, on the graphs of `ultraattn` plans: a table.

.venv/bin/python scripts/bench_schedules.py > results/schedules.md

`breadth-first` is the public code's other scheduler, with keys that are not renewed; `critical
path` a list; `best` the whole pipeline with its bound. The last row is one large graph.
"""

import argparse
import time
from datetime import date
from math import exp, log
from typing import NamedTuple

from harness.base.workers import spread
from harness.cluster.machine import Cluster
from harness.cluster.presets import cluster
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.prepare.planner_context import context_on
from harness.records.defaults import usual
from harness.schedule.stream_schedule import Method, schedule_streams
from harness.terminal.arguments import count, length
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

Times = dict[Method, float]
"""Makespans, seconds."""


class Job(NamedTuple):
    """A graph to schedule; `seconds` are for the search."""

    pattern: str
    cp: int
    direction: Direction
    seqlen: int
    heads: int
    seconds: float
    cluster: str


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cp", type=count, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seqlen", type=length, default=131072)
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the search, per graph")
    parser.add_argument("--cluster", default="h100-8x8")
    parser.add_argument("--jobs", type=count, default=2)
    args = parser.parse_args()
    print(f"# Stream schedules, {args.cluster}\n")
    print(
        f"{date.today().isoformat()}; S {args.seqlen}, {args.heads} heads of 128, bfloat16; "
        f"milliseconds;\ngraphs after kernel tiling; `best` may search {args.seconds:g} s, "
        "`seconds` are its processor time.\n"
    )
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    jobs = [
        Job(pattern, cp, direction, args.seqlen, args.heads, args.seconds, args.cluster)
        for cp in args.cp
        for pattern in PATTERNS
        for direction in Direction
    ]
    found = dict(spread(row_of, jobs, jobs=args.jobs, lost=_lost))
    for job in jobs:
        print(found[job][0])
    start = time.perf_counter()
    large, number = _large(args.seqlen, args.heads, cluster(args.cluster))
    print(large)
    print(f"\nThe last, {number} tasks, three times: {time.perf_counter() - start:.1f} s in all.\n")
    for method in METHODS[:-1]:
        ratios = [times[method] / times[Method.BEST] for _, times in found.values()]
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"- {method.value} over best: {mean:.3f}x geometric mean, at most {max(ratios):.3f}x")
    proved = sum(row.split(" | ")[8] == "0.00%" for row, _ in found.values())
    print(f"- gap 0.00 % in {proved} of {len(found)}")


def row_of(job: Job) -> tuple[Job, tuple[str, Times]]:
    """Plan a job without a schedule, and schedule it by all methods."""
    machine = cluster(job.cluster)
    problem = usual(job.pattern, job.cp, job.seqlen, job.heads)
    chosen = strategy("ultraattn:levels=remap+node+device+kernel")
    plan = chosen.plan(problem, job.direction, context_on(machine))
    return job, _row([job.pattern, str(job.cp), job.direction[:3]], plan, machine, job.seconds)


def _lost(job: Job) -> tuple[Job, tuple[str, Times]]:
    raise RuntimeError(f"the process that scheduled {job} died")


def _large(seqlen: int, heads: int, machine: Cluster) -> tuple[str, int]:
    problem = usual("full", 64, seqlen, heads)
    plan = strategy("owner").plan(problem, Direction.BACKWARD, context_on(machine))
    return _row(["full, owner", "64", "bac"], plan, machine, 20.0)[0], len(plan.tasks)


def _row(names: list[str], plan: Plan, machine: Cluster, seconds: float) -> tuple[str, Times]:
    """Return a line of the table, and its times."""
    found = {
        method: schedule_streams(plan, machine, method=method, time_limit_s=seconds)
        for method in METHODS
    }
    best = found[Method.BEST]
    times = {method: each.makespan_s for method, each in found.items()}
    cells = [*names, str(len(plan.tasks)), *(f"{each * 1e3:.3f}" for each in times.values())]
    cells += [f"{best.bound_s * 1e3:.3f}", f"{best.gap:.2%}", best.source, f"{best.seconds:.1f}"]
    return "| " + " | ".join(cells) + " |", times


if __name__ == "__main__":
    main()
