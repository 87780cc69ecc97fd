"""UltraAttn's planner beside all other strategies, and what each of its levels adds, simulated.

.venv/bin/python scripts/ultraattn_ablation.py --favour > results/ultraattn-rows.md
.venv/bin/python scripts/ultraattn_ablation.py --ablate > results/ultraattn-ablation.md

Every other strategy is taken with each option of `strategies.comparable`; `best other` is the
fastest of all. With `--ablate` levels are added one by one, from row owners without a schedule to
all of them, and `paper` is `ultraattn-paper`. With `--rows FILE` each job is kept as a line of JSON
when it is done, and what the file has is not run again. Exit status 1 if a row of `ultraattn` is
more than 1 % behind.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import date
from functools import partial
from itertools import product
from math import exp, inf, log
from pathlib import Path
from typing import TypedDict

from harness.base.json_fields import json_text
from harness.base.workers import spread
from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Problem
from harness.planning.strategy import Context
from harness.prepare.planner_context import context_on
from harness.records.defaults import usual
from harness.simulate.bounds import problem_bound_s
from harness.terminal.arguments import count, length
from strategies import DIRECT, STRATEGIES, comparable, strategy

PATTERNS = ("full", "causal", "strided", "global_local", "star", "streaming")
LEVELS = ("remap", "node", "device", "kernel", "schedule")
STEPS = {
    "rows": "none",
    **{f"+{level}": "+".join(LEVELS[: at + 1]) for at, level in enumerate(LEVELS)},
    "+one copy": "+".join((*LEVELS, "gather")),
}
"""Columns before `ultraattn`, and their levels; `+heads` is `ultraattn` itself."""
OWN, PAPER = "ultraattn", "paper"
CLOSE = 1.01
Job = tuple[str, int, int, str, str]
"""Pattern, cp, tokens, heads as `32/8`, cluster."""


class Row(TypedDict):
    """One direction of a job: seconds by column, and of the fastest other strategy."""

    seconds: dict[str, float]
    bound_s: float
    other: str
    other_s: float
    plan_s: float


Rows = dict[str, Row]
"""A row per direction."""


def main() -> int:
    """Print the table; 1 if a row is behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cp", type=count, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seqlen", type=length, nargs="+", default=[131072, 524288])
    parser.add_argument("--heads", nargs="+", default=["32/8", "32/32", "64/8"])
    parser.add_argument("--pattern", nargs="+", default=list(PATTERNS))
    parser.add_argument("--cluster", nargs="+", default=["h100-hamming", "h100-8x8"])
    parser.add_argument("--others", nargs="+", default=list(DIRECT), help="strategies beside it")
    parser.add_argument("--ablate", action="store_true", help="a column for each level")
    parser.add_argument("--favour", action="store_true", help="plan each row for its direction")
    parser.add_argument("--jobs", type=count, default=2)
    parser.add_argument("--rows", type=Path, help="file of rows that are done")
    args = parser.parse_args()
    jobs: list[Job] = [
        (pattern, cp, seqlen, heads, machine)
        for machine, cp, seqlen, heads, pattern in product(
            args.cluster, args.cp, args.seqlen, args.heads, args.pattern
        )
    ]
    found: dict[Job, Rows] = {}
    if args.rows and args.rows.exists():
        lines = args.rows.read_text(encoding="utf-8").splitlines()
        found = {tuple(job): rows for job, rows in map(json.loads, lines)}
    todo = [job for job in jobs if job not in found]
    run = partial(rows_of, others=tuple(args.others), ablate=args.ablate, favour=args.favour)
    for job, rows in spread(run, todo, jobs=args.jobs, lost=_lost):
        found[job] = rows
        if args.rows:
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(json_text([job, rows]) + "\n")
    return _print([(job, found[job]) for job in jobs], args.others, favour=args.favour)


def rows_of(job: Job, others: Sequence[str], *, ablate: bool, favour: bool) -> tuple[Job, Rows]:
    """Plan and simulate a job in both directions with all levels, and with every other strategy."""
    pattern, cp, seqlen, heads, machine_name = job
    machine = cluster(machine_name)
    context = context_on(machine)
    problem = usual(pattern, cp, seqlen, *map(int, heads.split("/")))
    texts = {name: f"{OWN}:levels={levels}" for name, levels in STEPS.items() if ablate}
    texts |= {PAPER: "ultraattn-paper"} if ablate else {}
    rivals = comparable(cp, {name: STRATEGIES[name] for name in others if name in STRATEGIES})
    found: Rows = {}
    for direction in Direction:
        begin = time.perf_counter()
        text = f"{OWN}:favour={direction.value}" if favour else OWN
        own_s = _seconds(problem, direction, context, text)
        assert own_s is not None, "it is legal for every problem"
        plan_s = time.perf_counter() - begin
        times = {text: _seconds(problem, direction, context, text) for text in rivals}
        other = min(times, key=lambda text: times[text] or inf)
        steps = {name: _seconds(problem, direction, context, text) for name, text in texts.items()}
        found[direction.value] = Row(
            seconds={**{name: s for name, s in steps.items() if s is not None}, OWN: own_s},
            bound_s=problem_bound_s(problem, direction, machine),
            other=other,
            other_s=times[other] or inf,
            plan_s=plan_s,
        )
    return job, found


def _seconds(problem: Problem, direction: Direction, context: Context, text: str) -> float | None:
    """Simulated seconds of a strategy's plan; None where it refuses the problem."""
    assert context.estimate is not None
    try:
        plan = strategy(text).plan(problem, direction, context)
    except UnsupportedError:
        return None
    return context.estimate(plan)


def _lost(job: Job) -> tuple[Job, Rows]:
    raise RuntimeError(f"the process that planned {job} died")


def _print(results: Sequence[tuple[Job, Rows]], others: Sequence[str], *, favour: bool) -> int:
    rows = [(job, d, row) for job, both in results for d, row in both.items()]
    columns = [c for c in (*STEPS, PAPER) if any(c in row["seconds"] for _, _, row in rows)]
    print("# UltraAttn's plans beside all other strategies, simulated\n")
    print(
        f"{date.today().isoformat()}; head_dim 128, bfloat16, milliseconds. `h100-8x8` has "
        "datasheet speeds, `h100-hamming` is calibrated.\n`bound` says how many times the even "
        "share of all attention flops at the fastest rate the plan takes; `ahead`,\nhow many "
        "times as long as `ultraattn` the fastest other strategy takes. Compared with every "
        f"option of:\n{', '.join(others)}."
    )
    chosen = "one pair of plans for both directions"
    print(f"`ultraattn` has {'favour= the direction of the row' if favour else chosen}.\n")
    header = ["cluster", "pattern", "cp", "S", "heads", "", *columns]
    header += [OWN, "bound", "best other", "ms", "ahead"]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    behind = []
    for (pattern, cp, seqlen, heads, machine), direction, row in rows:
        own_s, ahead = row["seconds"][OWN], row["other_s"] / row["seconds"][OWN]
        where = [machine, pattern, str(cp), f"{seqlen // 1024}K", heads, direction[:3]]
        cells = [_ms(row["seconds"].get(column)) for column in columns]
        cells += [_ms(own_s), f"{own_s / row['bound_s']:.3f}"]
        cells += [f"`{row['other']}`", _ms(row["other_s"]), f"{ahead:.3f}"]
        print("| " + " | ".join([*where, *cells]) + " |")
        behind += [f"{' '.join(where)} ({1 / ahead:.3f})"] if ahead * CLOSE < 1 else []
    print(f"\nOf {len(rows)} rows {len(rows) - len(behind)} are ahead or within 1 %.\n")
    for machine in dict.fromkeys(job[-1] for job, _ in results):
        ratios = [r["other_s"] / r["seconds"][OWN] for job, _, r in rows if job[-1] == machine]
        mean = exp(sum(map(log, ratios)) / len(ratios))
        spans = f"{mean:.3f}x geometric mean, {min(ratios):.3f} to {max(ratios):.3f}"
        print(f"- best other over ultraattn on {machine}: {spans}")
    print(f"- behind by more: {'; '.join(behind) or 'none'}")
    return int(bool(behind))


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3f}"


if __name__ == "__main__":
    sys.exit(main())
