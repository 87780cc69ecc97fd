"""`plan`: make a plan, print it as a grid, save it, or load and prove a saved one."""

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console

from harness.base.files import read_text
from harness.base.json_fields import json_text
from harness.cluster.machine import Cluster
from harness.cluster.presets import DEFAULT_CLUSTER, cluster, require
from harness.commands.plan_levels import level_lines
from harness.commands.plan_show import print_blocks
from harness.errors import PlanError
from harness.memory.ledger import ledger
from harness.plan.plan import Plan, to_json
from harness.plan.problem import Direction
from harness.plan.reader import from_json
from harness.plan.residency import Program
from harness.plan.sizes import traffic
from harness.plan.tasks import Tile
from harness.planning.strategy import Context
from harness.prepare.planner_context import context_on
from harness.report.format import cell_heading
from harness.report.time_bar import terms_text
from harness.simulate.gantt import gantt
from harness.simulate.simulator import simulate
from harness.simulate.time_terms import TimeTerms, time_terms
from harness.simulate.trace import task_kind
from harness.terminal.arguments import (
    Help,
    Verbs,
    add_cluster,
    add_plan,
    add_problem,
    count,
    example,
    given,
    path,
    problem_of,
    written,
)
from harness.terminal.progress import say, wrapped
from harness.terminal.targets import require_apart, write_target
from harness.verify.proof import verify
from strategies import strategy

_MIB = 2**20
_LINES = 60  # of a grid on a terminal
_MARGIN = 5  # columns of the rank's number


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "plan",
        help=summary,
        description="Make the plan of a strategy for a problem, prove it, and print it as a "
        "rank x step grid with a summary. A saved plan is proved before anything else is done "
        "with it; a wrong one ends with exit status 1, the broken rule and the place in the grid.",
        epilog=example(
            [
                "plan --strategy zigzag --cp 4",
                "plan --strategy usp:4x2 --direction backward -o usp.json",
                "plan --load usp.json",
                "plan --strategy ring --cp 2 --json",
                "plan --strategy ultraattn --pattern star --cp 4 --show table",
                "plan --strategy ultraattn:levels=node+device --cp 16 --show timeline",
            ]
        ),
        formatter_class=Help,
    )
    _add_plan(parser)
    add_cluster(parser, "cluster for search planners and timelines: ")
    parser.add_argument(
        "--show",
        choices=("grid", "table", "timeline"),
        default="grid",
        help="grid: tasks by rank and step; table: the rank of each block, each rank's work and "
        "traffic; timeline: a Gantt chart",
    )
    group = parser.add_argument_group("files and output")
    group.add_argument(
        "--load",
        type=path,
        metavar="FILE",
        help="prove and print a saved plan (only --cluster and --show may be added)",
    )
    group.add_argument("-o", "--output", type=written, metavar="FILE", help="save the plan as JSON")
    group.add_argument(
        "--svg", type=written, metavar="FILE", help="draw who attends and who sends what, as SVG"
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of the grid")
    parser.set_defaults(run=run)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the flags that decide a plan."""
    add_plan(parser)
    parser.add_argument(
        "--gpus-per-node",
        type=count,
        help="ranks per node (default: as many as the cluster's nodes have)",
    )
    add_problem(parser)


def run(args: argparse.Namespace) -> int:
    """Make or load one plan; 1 if it is wrong."""
    if args.load is not None:
        idle = given(args, _add_plan)
        if idle:
            raise ValueError(f"--load already fixes {idle}; drop {idle}, or drop --load")
    require_apart({"--output": args.output, "--svg": args.svg}, [args.load] if args.load else [])
    plan = _load(args.load) if args.load is not None else _make(args)
    try:
        program = verify(plan)
    except PlanError as error:
        print("\n".join([f"plan: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 1
    if args.output is not None:
        write_target("--output", args.output, to_json(plan) + "\n")
        say(f"{args.output}: written; `plan --load {args.output}` shows it again")
    if args.svg is not None:
        from harness.page.plan_chart import plan_chart  # it loads what draws

        what = cell_heading(plan.strategy, plan.problem, plan.direction)
        write_target("--svg", args.svg, plan_chart(plan, what=what).svg + "\n")
        say(f"{args.svg}: written; open it in a browser")
    levels = {} if args.load is not None else _levels(args)
    terms = _terms(args, program)
    if args.json:
        body = as_json(program, levels)
        if terms is not None:
            body["time"] = {"cluster": args.cluster, **terms.as_json()}
        sys.stdout.write(json_text(body) + "\n")
        return 0
    if args.show == "table":
        print_blocks(plan, Console())
        sys.stdout.write("\n")
    elif args.show == "timeline":
        width = shutil.get_terminal_size().columns
        what = cell_heading(plan.strategy, plan.problem, plan.direction)
        trace = simulate(program, _machine(args, plan))
        sys.stdout.write(gantt(trace, width, what=what) + "\n\n")
    else:
        sys.stdout.write(_fitting(plan) + "\n\n")
    sys.stdout.write(wrapped(_table(program) + "\n" + level_lines(levels, plan.direction)) + "\n")
    if terms is not None:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(terms_text(terms, args.cluster, width) + "\n")
    return 0


def _make(args: argparse.Namespace) -> Plan:
    problem, direction = problem_of(args), Direction(args.direction)
    return strategy(args.strategy).plan(problem, direction, _context(args))


def _context(args: argparse.Namespace) -> Context:
    machine = cluster(args.cluster)
    if args.gpus_per_node is None:
        return context_on(machine)
    if args.cluster != DEFAULT_CLUSTER:
        raise ValueError(
            f"--gpus-per-node ({args.gpus_per_node}) only applies without --cluster, and "
            f"--cluster ({args.cluster}) has {machine.gpus_per_node}; give one of them"
        )
    return Context(gpus_per_node=args.gpus_per_node)


def _terms(args: argparse.Namespace, program: Program) -> TimeTerms | None:
    """Where a plan's time goes; None on other nodes than the cluster's, or on too few GPUs."""
    machine = cluster(args.cluster)
    if args.gpus_per_node is not None or program.plan.problem.cp > machine.gpus:
        return None
    return time_terms(program, machine)


def _machine(args: argparse.Namespace, plan: Plan) -> Cluster:
    machine = cluster(args.cluster)
    require(machine, plan.problem.cp)
    return machine


def _levels(args: argparse.Namespace) -> Mapping[str, Any]:
    """Results of a search planner by level; empty for other strategies."""
    chosen = strategy(args.strategy)
    report = chosen.strategy.report
    if report is None:
        return {}
    problem, direction = problem_of(args), Direction(args.direction)
    return report(problem, direction, chosen.options, _context(args))


def _load(path: Path) -> Plan:
    """Read a saved plan.

    Raises:
        ValueError: The file does not exist, or has no plan.
    """
    try:
        return from_json(read_text(path))
    except OSError as error:
        raise ValueError(f"--load ({path}) cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--load ({path}) holds no plan of schema 1: {error}") from error


def as_json(program: Program, levels: Mapping[str, Any] | None = None) -> dict[str, object]:
    """The plan's hash, what planning it took by level, its tasks, and their summary.

    `levels` has an entry per level of a planner that solves for its plan; the others have none.
    """
    plan = program.plan
    return {
        "plan_hash": plan.hash,
        "strategy": plan.strategy,
        "direction": plan.direction.value,
        "levels": dict(levels or {}),
        "summary": summary(program),
        "tasks": json.loads(to_json(plan))["tasks"],
    }


def summary(program: Program) -> dict[str, object]:
    """Tasks by kind, bytes that ranks send, pairs that they attend, and the memory they hold."""
    plan = program.plan
    cp = plan.problem.cp
    sent, _ = traffic(plan)
    area = [0] * cp
    for task in plan.tasks:
        if isinstance(task, Tile):
            area[task.place.rank] += task.area * task.heads.bit_count()
    book = ledger(program)
    return {
        "tasks": dict(sorted(Counter(map(task_kind, plan.tasks)).items())),
        "sent_bytes": sent,
        "area_times_heads": area,
        "peak_bytes": list(book.peak_bytes),
        "host_peak_bytes": list(book.host_peak_bytes),
    }


def _table(program: Program) -> str:
    plan, found = program.plan, summary(program)
    kinds, sent, area = found["tasks"], found["sent_bytes"], found["area_times_heads"]
    peak, host = found["peak_bytes"], found["host_peak_bytes"]
    assert isinstance(kinds, dict) and isinstance(sent, list) and isinstance(area, list)
    assert isinstance(peak, list) and isinstance(host, list)
    memory = f"{max(peak) / _MIB:,.1f} MiB on the fullest rank"
    if any(host):
        memory += f", {max(host) / _MIB:,.1f} MiB on the fullest host"
    mean = sum(area) / len(area)
    rows = [
        ("plan", f"{plan.hash}, proved"),
        ("tasks", ", ".join(f"{number} {kind}" for kind, number in kinds.items())),
        (
            "sent",
            f"{max(sent) / _MIB:,.1f} MiB by the busiest rank, {sum(sent) / _MIB:,.1f} MiB by all",
        ),
        (
            "area x heads",
            f"{sum(area):,}, the busiest rank {max(area) / mean if mean else 1:.3f} of the mean",
        ),
        ("peak memory", memory),
    ]
    return "\n".join(f"{name:<13} {value}" for name, value in rows)


def _fitting(plan: Plan) -> str:
    """The grid; on a terminal, as many steps and ranks as fit, and a hint to see the rest."""
    text = str(plan)
    if not sys.stdout.isatty():
        return text
    return cut_grid(text, shutil.get_terminal_size().columns, _LINES)


def cut_grid(grid: str, columns: int, lines: int) -> str:
    """Cut a grid to whole steps that fit in so many columns, and whole ranks in so many lines."""
    title, heading, *body = grid.splitlines()
    begins = [match.start() for match in re.finditer("step", heading)]
    whole = max(map(len, (heading, *body)))
    widths = [begin - 1 for begin in begins[1:]] + [whole]
    steps = max(sum(width <= columns for width in widths), 1)
    width = widths[steps - 1]
    heads = [at for at, line in enumerate(body) if line[:_MARGIN].strip()]
    ends = [*heads[1:], len(body)]
    ranks = max(sum(end <= lines for end in ends), 1)
    kept = [title, *(line[:width].rstrip() for line in (heading, *body[: ends[ranks - 1]]))]
    all_steps, all_ranks = len(begins), len(heads)
    if steps >= all_steps and ranks >= all_ranks:
        return grid
    note = (
        f"({steps} of {all_steps} steps and {ranks} of {all_ranks} ranks; for all of them: a wider "
        "terminal, or `... | less -S`)"
    )
    return "\n".join([*kept, *wrap(note, columns, break_long_words=False)])
