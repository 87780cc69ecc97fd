"""Show each published figure beside the one computed here, with the error and a verdict."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.base.json_fields import json_text
from harness.base.workers import cores
from harness.commands.speedups import measured_beside, show
from harness.reproduce.figures import PAPERS, Figure, figures, tables
from harness.reproduce.speedups import FigureFilter
from harness.terminal.arguments import Help, Verbs, count, degree, example, listed, positive_number
from harness.terminal.progress import Output

_SPEEDUPS = "ultraattn"
_LARGE = 100
"""From here on a figure is shown with fewer digits."""


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "reproduce",
        help=summary,
        description=__doc__,
        epilog=example(
            [
                "reproduce upipe",
                "reproduce upipe --table memory --json",
                "reproduce ultraattn --figure fig7 --cp 8",
                "reproduce ultraattn --figure fig8 --cluster h100-hamming",
            ]
        ),
        formatter_class=Help,
    )
    parser.add_argument(
        "paper", choices=(*PAPERS, _SPEEDUPS), help="the paper whose figures to compute"
    )
    parser.add_argument(
        "--table",
        "--figure",
        default="",
        help="only tables or figures whose name contains this, e.g. memory, fig7",
    )
    group = parser.add_argument_group(
        "ultraattn",
        "speed-ups, predicted twice: with each side's runtime as it was run, and on equal ground",
    )
    group.add_argument(
        "--cp", type=listed(degree), default=(), help="only these context-parallel degrees"
    )
    group.add_argument(
        "--cluster",
        default="",
        help="one calibrated cluster for all figures (default: the cluster of each figure)",
    )
    group.add_argument(
        "--seconds",
        type=positive_number,
        help="planner's search time per tiling, seconds (default: the planner's own)",
    )
    group.add_argument("--jobs", type=count, help=f"plans to make at once ({cores()})")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compute and judge; 1 if a figure is not as published."""
    console = Output(markup=False, highlight=False)
    if args.paper == _SPEEDUPS:
        return _speedups(args, console)
    if args.cp or args.cluster or args.seconds or args.jobs:
        raise ValueError(
            f"--cp, --cluster, --seconds and --jobs only apply to {_SPEEDUPS}; drop them"
        )
    found: list[Figure] = []
    for _, group in groupby(figures(args.paper, args.table), key=lambda figure: figure.table):
        rows = list(group)
        found += rows
        if not args.json:
            _print(console, rows)
    if not found:
        names = "; ".join(table["name"] for table in tables(args.paper))
        raise ValueError(f"--table ({args.table}) matches no table; choose from {names}")
    off = [figure for figure in found if figure.holds is False]
    if args.json:
        fields = [{**asdict(f), "error": f.error, "holds": f.holds} for f in found]
        sys.stdout.write(json_text(fields, indent=2) + "\n")
    else:
        judged = [figure for figure in found if figure.holds is not None]
        console.print(f"{len(judged) - len(off)} of {len(judged)} figures are as published")
    return 1 if off else 0


def _speedups(args: argparse.Namespace, console: Console) -> int:
    chosen = FigureFilter(figure=args.table, cp=args.cp, cluster=args.cluster, seconds=args.seconds)
    found = measured_beside(chosen, jobs=args.jobs or cores())
    if args.json:
        fields = [{**asdict(each), "error": each.error, "holds": each.holds} for each in found]
        sys.stdout.write(json_text(fields, indent=2) + "\n")
    else:
        show(console, found)
    return 0 if all(each.holds for each in found) else 1


def _print(console: Console, rows: Sequence[Figure]) -> None:
    console.print(rows[0].table)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in ("published", "ours", "error"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in rows:
        verdict = {True: "ok", False: "OFF", None: "predicted"}[row.holds]
        published = "" if row.published is None else _number(row.published)
        error = "" if row.error is None else f"{row.error:+.1%}"
        table.add_row(row.what, published, _number(row.ours), error, verdict)
    console.print(table)
    errors = [abs(row.error) for row in rows if row.error is not None]
    at_most = f"at most {rows[0].tolerance:.0%} is ok" if rows[0].tolerance else "only equal is ok"
    if errors:
        at_most = f"median {median(errors):.1%}, worst {max(errors):.1%}; {at_most}"
    console.print(f"{at_most}. Source: {rows[0].source}")
    if rows[0].seen:
        console.print(f"Not independent: {rows[0].seen}")
    console.print()


def _number(value: float) -> str:
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= _LARGE else f"{value:.3g}" if value < 1 else f"{value:.2f}"
