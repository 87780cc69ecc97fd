"""UltraAttn's plans beside row owners, ring, zigzag and stripe, simulated: a table.

.venv/bin/python scripts/ultraattn_simulated.py > results/ultraattn-simulated.md

With `--rows FILE` each row is kept as a line of JSON when it is done, and what the file has is not
run again: a long table can be made in parts. `own` is `ultraattn`, `with others` is
`ultraattn:candidates=true`. Exit status 1 if `own` takes longer than row owners anywhere, or `with
others` over 1 % longer than one of the three rings.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from itertools import product
from math import exp, log
from pathlib import Path
from typing import TypedDict

from harness.base.json_fields import json_text
from harness.base.workers import spread
from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Direction
from harness.prepare.planner_context import context_on
from harness.records.defaults import usual
from harness.terminal.arguments import count, length
from strategies import strategy

CLUSTER = "h100-8x8"
PATTERNS = ("full", "causal", "strided", "global_local", "star", "streaming")
RINGS = ("ring", "zigzag", "stripe")
OWN, OTHERS = "ultraattn", "ultraattn:candidates=true"
FIRST = ["pattern", "cp", "S", "heads", "direction"]
HEADER = [*FIRST, "own ms", "owner", *RINGS, "with others ms", "taken", "rings"]
CLOSE = 1.01
Job = tuple[str, int, int, int]


class Row(TypedDict):
    """Result of a job: seconds by direction and strategy, and whose plans were taken."""

    job: Job
    seconds: dict[str, dict[str, float]]
    taken: dict[str, str]


def main() -> int:
    """Print the table; 1 if a plan takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cp", type=count, nargs="+", default=[8, 16, 64])
    parser.add_argument("--seqlen", type=length, nargs="+", default=[2**k for k in range(16, 20)])
    parser.add_argument("--heads", type=count, nargs="+", default=[1, 32])
    parser.add_argument("--pattern", nargs="+", default=list(PATTERNS))
    parser.add_argument("--jobs", type=count, default=2)
    parser.add_argument("--rows", type=Path, help="file of rows that are done")
    args = parser.parse_args()
    jobs: list[Job] = list(product(args.pattern, args.cp, args.seqlen, args.heads))
    done: dict[Job, Row] = {}
    if args.rows and args.rows.exists():
        for line in args.rows.read_text(encoding="utf-8").splitlines():
            row: Row = json.loads(line)
            done[_job(row)] = row
    todo = [job for job in jobs if job not in done]
    for row in spread(row_of, todo, jobs=args.jobs, lost=_lost):
        done[_job(row)] = row
        if args.rows:
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(json_text(row) + "\n")
    return _print([done[job] for job in jobs])


def _job(row: Row) -> Job:
    pattern, cp, seqlen, heads = row["job"]
    return pattern, cp, seqlen, heads


def row_of(job: Job) -> Row:
    """Plan and simulate a job with all strategies, in both directions."""
    pattern, cp, seqlen, heads = job
    context = context_on(cluster(CLUSTER))
    assert context.evaluate is not None
    problem = usual(pattern, cp, seqlen, heads)
    found: Row = {"job": job, "seconds": {}, "taken": {}}
    for direction in Direction:
        times = found["seconds"][direction.value] = {}
        for name in (OWN, OTHERS, "owner", *RINGS):
            try:
                times[name] = context.evaluate(strategy(name).plan(problem, direction, context))
            except UnsupportedError:
                continue
        chosen = strategy(OTHERS)
        assert chosen.strategy.report is not None
        said = chosen.strategy.report(problem, direction, chosen.options, context)
        found["taken"][direction.value] = said["fallback"] or "own"
    return found


def _lost(job: Job) -> Row:
    raise RuntimeError(f"the process that planned {job} died")


def _print(rows: Sequence[Row]) -> int:
    print(f"# UltraAttn's plans, simulated on {CLUSTER}\n")
    print(
        f"{date.today().isoformat()}; datasheet speeds, not calibrated; head_dim 128, bfloat16; "
        "`ultraattn` with its default budget.\nNumbers under a strategy say how many times as long "
        "as `own` it takes; `rings`, how many times as long\nas `with others` the fastest of the "
        "three takes; `taken`, whose plan `candidates=true` took.\n"
    )
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    slow_own, slow_others = [], []
    ratios: dict[str, list[float]] = {name: [] for name in ("owner", *RINGS)}
    for row in rows:
        pattern, cp, seqlen, heads = _job(row)
        for direction, times in row["seconds"].items():
            own, others = times[OWN], times[OTHERS]
            rings = min(times[name] for name in RINGS if name in times)
            cells = [pattern, str(cp), f"{seqlen // 1024}K", str(heads), direction]
            for name in ratios.keys() & times.keys():
                ratios[name].append(times[name] / own)
            slow_own += [cells] if own > times["owner"] else []
            slow_others += [cells] if others > CLOSE * rings else []
            cells = [*cells, f"{own * 1e3:.3f}"]
            cells += [f"{times[n] / own:.3f}" if n in times else "–" for n in ("owner", *RINGS)]
            cells += [f"{others * 1e3:.3f}", row["taken"][direction], f"{rings / others:.3f}"]
            print("| " + " | ".join(cells) + " |")
    print(f"\nOf {2 * len(rows)} plans:\n")
    for name, each in ratios.items():
        mean = exp(sum(map(log, each)) / len(each))
        print(f"- {name} over own: {mean:.3f}x geometric mean, {min(each):.3f} to {max(each):.3f}")
    for what, slow in (
        ("own slower than row owners", slow_own),
        ("with others over 1 % slower than the fastest ring", slow_others),
    ):
        print(f"- {what}: {'; '.join(map(' '.join, slow)) or 'none'}")
    return int(bool(slow_own or slow_others))


if __name__ == "__main__":
    sys.exit(main())
