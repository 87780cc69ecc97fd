"""Ablation of UltraAttn's planner by level, simulated: a table per cluster size.

.venv/bin/python scripts/ultraattn_ablation.py > results/ultraattn-ablation.md

Levels are added one by one, from row owners without a schedule to all of them; `paper` is
`ultraattn-paper`, `candidates` all levels with other strategies' plans allowed. With `--rows FILE`
each job is kept as a line of JSON when it is done, and what the file has is not run again.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import date
from itertools import pairwise
from math import exp, log
from pathlib import Path

from harness.base.json_fields import json_text
from harness.base.workers import spread
from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Direction
from harness.prepare.planner_context import context_on
from harness.records.defaults import usual
from harness.terminal.arguments import count, length
from strategies import strategy

PATTERNS = ("full", "causal", "strided", "global_local", "star", "streaming")
ADDED = {
    "rows": "levels=none",
    "+remap": "levels=remap",
    "+node": "levels=remap+node",
    "+device": "levels=remap+node+device",
    "+kernel": "levels=remap+node+device+kernel",
    "+schedule": "levels=all",
    "candidates": "candidates=true",
}
OTHERS = ("owner", "ring", "zigzag", "stripe", "ulysses", "usp")
Job = tuple[str, int, int, int, str]
Rows = dict[str, dict[str, float | None]]
"""Seconds per direction and variant; None where it refuses."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cp", type=count, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seqlen", type=length, nargs="+", default=[131072])
    parser.add_argument("--heads", type=count, nargs="+", default=[32])
    parser.add_argument("--pattern", nargs="+", default=list(PATTERNS))
    parser.add_argument("--cluster", default="h100-8x8")
    parser.add_argument("--jobs", type=count, default=2)
    parser.add_argument("--rows", type=Path, help="file of rows that are done")
    args = parser.parse_args()
    start = time.perf_counter()
    jobs = [
        (pattern, cp, seqlen, heads, args.cluster)
        for cp in args.cp
        for seqlen in args.seqlen
        for heads in args.heads
        for pattern in args.pattern
    ]
    found: dict[Job, Rows] = {}
    if args.rows and args.rows.exists():
        lines = args.rows.read_text(encoding="utf-8").splitlines()
        found = {tuple(job): rows for job, rows in map(json.loads, lines)}
    todo = [job for job in jobs if job not in found]
    for job, rows in spread(times_of, todo, jobs=args.jobs, lost=_lost):
        found[job] = rows
        if args.rows:
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(json_text([job, rows]) + "\n")
    print(f"# What each level adds, simulated on {args.cluster}\n")
    print(
        f"{date.today().isoformat()}; head_dim 128, bfloat16, milliseconds; datasheet speeds "
        "unless the cluster is calibrated.\n"
    )
    header = ["pattern", "cp", "S", "heads", "", *ADDED, "paper", *OTHERS]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for job in jobs:
        for direction, row in found[job].items():
            cells = [job[0], str(job[1]), f"{job[2] // 1024}K", str(job[3]), direction[:3]]
            print("| " + " | ".join([*cells, *map(_shown, row.values())]) + " |")
    print(f"\n{_summary([found[job] for job in jobs])}\n")
    print(f"Planned and simulated in {time.perf_counter() - start:.0f} s.", file=sys.stderr)


def times_of(job: Job) -> tuple[Job, Rows]:
    """Seconds of every variant in both directions; None where it refuses."""
    pattern, cp, seqlen, heads, machine_name = job
    machine = cluster(machine_name)
    context = context_on(machine)
    assert context.evaluate is not None
    problem = usual(pattern, cp, seqlen, heads)
    texts = {
        **{name: f"ultraattn:{options}" for name, options in ADDED.items()},
        "paper": "ultraattn-paper",
        **{name: name for name in OTHERS},
    }
    found: Rows = {}
    for direction in Direction:
        row = found[direction.value] = {}
        for name, text in texts.items():
            try:
                plan = strategy(text).plan(problem, direction, context)
                row[name] = context.evaluate(plan)
            except UnsupportedError:
                row[name] = None
    return job, found


def _lost(job: Job) -> tuple[Job, Rows]:
    return job, {}


def _shown(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3f}"


def _summary(found: Iterable[Rows]) -> str:
    """Geometric means of each step and against each other strategy."""
    rows = [row for both in found for row in both.values()]
    steps = list(pairwise(list(ADDED)[:-1]))
    lines = [f"- {after}: {_ratio(rows, before, after)}" for before, after in steps]
    lines += [
        f"- {other} over all levels: {_ratio(rows, other, '+schedule')}"
        for other in ("paper", *OTHERS)
    ]
    return "\n".join(lines)


def _ratio(rows: Sequence[dict[str, float | None]], slow: str, fast: str) -> str:
    ratios = [
        row_slow / row_fast
        for row in rows
        if (row_slow := row[slow]) is not None and (row_fast := row[fast]) is not None
    ]
    if not ratios:
        return "refused everywhere"
    mean = exp(sum(map(log, ratios)) / len(ratios))
    return f"{mean:.3f}x geometric mean, {min(ratios):.3f} to {max(ratios):.3f}"


if __name__ == "__main__":
    main()
