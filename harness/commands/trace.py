"""Draw one run as a Gantt chart, and write it as a trace for Perfetto or Chrome.

The run is simulated on a cluster, or with --measured takes place here in real processes. There the
streams are compute, transfer (the time to issue one) and wait (blocked until one has arrived), by a
clock that all processes share.
"""

import argparse
import shutil
import sys

from harness.base.json_fields import json_text
from harness.cluster.presets import cluster, require
from harness.memory.ledger import ledger
from harness.plan.problem import Direction, Problem
from harness.prepare.planner_context import context_on
from harness.proved.plans import proved
from harness.records.config import Config, Where
from harness.report.format import cell_heading
from harness.simulate.bounds import Bounds, any_plan_bound, bounds, problem_bound_s
from harness.simulate.chrome import to_chrome
from harness.simulate.gantt import gantt
from harness.simulate.simulator import simulate
from harness.simulate.streams import Dispatch
from harness.simulate.trace import Trace
from harness.terminal.arguments import (
    Help,
    Verbs,
    add_plan,
    add_problem,
    add_simulation,
    count,
    example,
    given,
    problem_of,
    written,
)
from harness.terminal.progress import say
from harness.terminal.targets import require_apart, write_target
from strategies import strategy

_MIB = 2**20
_TIMEOUT_S = 120


def register(subparsers: Verbs, summary: str | None = None) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "trace",
        help=summary,
        description=__doc__,
        epilog=example(
            [
                "trace --strategy zigzag --pattern causal --cp 8",
                "trace --strategy usp:8x2 --cp 16 --direction backward -o usp.json",
                "trace --strategy ring --seqlen 4k --runtime eager-torch --json",
                "trace --measured --strategy ring --cp 2 --seqlen 2k --heads-q 4 -o ring.json",
            ]
        ),
        formatter_class=Help,
    )
    add_plan(parser)
    add_problem(parser)
    _add_simulation(parser)
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--measured",
        action="store_true",
        help="run it on this machine, in cp processes; choose a small problem",
    )
    group.add_argument(
        "--timeout", type=count, metavar="S", help=f"time limit of a measured run ({_TIMEOUT_S})"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o",
        "--output",
        type=written,
        metavar="FILE",
        help="write a Chrome trace as JSON; open it at ui.perfetto.dev",
    )
    group.add_argument("--svg", type=written, metavar="FILE", help="draw the timeline as SVG")
    group.add_argument(
        "--ranks", type=count, default=8, help="how many ranks to draw (%(default)s)"
    )
    group.add_argument(
        "--json", action="store_true", help="print the figures as JSON instead of the chart"
    )
    parser.set_defaults(
        needs=lambda args: ("harness.measure.traced_run",) if args.measured else (), run=run
    )


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    add_simulation(parser).add_argument(
        "--dispatch",
        choices=[d.value for d in Dispatch],
        default=Dispatch.IN_ORDER.value,
        help="in-order: each stream runs its tasks in the plan's order; greedy: whichever is ready",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate or run one plan."""
    require_apart({"--output": args.output, "--svg": args.svg})
    problem, direction = problem_of(args), Direction(args.direction)
    if args.measured:
        idle = given(args, _add_simulation)
        if idle:
            raise ValueError(
                f"{idle}: these only apply to a simulation; drop them, or drop --measured"
            )
        return _measured(args, problem, direction)
    if args.timeout is not None:
        raise ValueError(
            f"--timeout ({args.timeout}) only applies to a measured run; add --measured"
        )
    machine, runtime = cluster(args.cluster), args.runtime
    require(machine, problem.cp)
    program = proved(strategy(args.strategy), problem, direction, context_on(machine))
    trace = simulate(
        program,
        machine,
        runtime=runtime,
        dispatch=Dispatch(args.dispatch),
        peak_memory_bytes=ledger(program).peak_bytes,
    )
    limits = bounds(program, machine, runtime)
    even_s = problem_bound_s(problem, direction, machine)
    any_plan_s = any_plan_bound(problem, direction, machine).bound_s
    what = cell_heading(strategy(args.strategy).text, problem, direction)
    _write_files(args, trace, what)
    if args.json:
        body = {
            **trace.summary(),
            "bound_s": limits.bound_s,
            "problem_bound_s": even_s,
            "any_plan_bound_s": any_plan_s,
            "critical_path_s": limits.critical_path_s,
        }
        sys.stdout.write(json_text(body, indent=2) + "\n")
    else:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(gantt(trace, width, args.ranks, what=what) + "\n")
        sys.stdout.write(_figures(trace, limits, (even_s, any_plan_s)) + "\n")
    return 0


def _measured(args: argparse.Namespace, problem: Problem, direction: Direction) -> int:
    """Run one plan in processes of this machine."""
    from harness.measure.traced_run import traced
    from harness.ranks.team import Team

    config = Config(
        strategy=strategy(args.strategy).text,
        pattern=problem.pattern.text,
        cp=problem.cp,
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim=problem.head_dim,
        batch=problem.batch,
        dtype=problem.dtype,
        direction=direction,
        transport=Where.GLOO,
        scope=args.scope,
        hidden=problem.hidden,
        rotary=problem.rotary,
    )
    if problem.head_dim_v != problem.head_dim:
        raise ValueError(f"--head-dim-v ({problem.head_dim_v}) must be --head-dim with --measured")
    with Team(config.cp) as team:
        found = traced(config, team, args.timeout or _TIMEOUT_S)
    what = cell_heading(config.strategy, problem, direction)
    _write_files(args, found.trace, what)
    if args.json:
        body = {
            **found.trace.summary(),
            "bytes_sent_per_rank": found.bytes_sent_per_rank,
            "exposed_comm_s": found.exposed_comm_s,
        }
        sys.stdout.write(json_text(body, indent=2) + "\n")
    else:
        width = shutil.get_terminal_size().columns
        sys.stdout.write(gantt(found.trace, width, args.ranks, what=what) + "\n")
        peak = max(found.trace.peak_memory_bytes or (0,))
        sent = sum(found.trace.link_bytes.values())
        for name, value in (
            ("makespan", f"{found.trace.makespan_s * 1e3:.3f} ms"),
            ("waits", f"{found.exposed_comm_s * 1e3:.3f} ms at most"),
            ("bytes sent", f"{sent / _MIB:,.1f} MiB by all ranks"),
            ("peak memory", f"{peak / _MIB:,.0f} MiB on the fullest rank, by the ledger"),
        ):
            sys.stdout.write(f"{name:<18} {value}\n")
    return 0


def _write_files(args: argparse.Namespace, trace: Trace, what: str) -> None:
    """Write the files that are asked for, and say where each opens."""
    if args.output is not None:
        write_target("--output", args.output, to_chrome(trace))
        say(f"{args.output}: written; open it at ui.perfetto.dev")
    if args.svg is not None:
        from harness.page.gantt_chart import gantt_chart  # it loads what draws

        write_target("--svg", args.svg, gantt_chart(trace, what=what, ranks=args.ranks).svg)
        say(f"{args.svg}: written; open it in a browser")


def _figures(trace: Trace, limits: Bounds, of_problem_s: tuple[float, float]) -> str:
    overlap = "nothing is sent" if trace.overlap is None else f"{trace.overlap:.1%}"
    links = ", ".join(f"{name} {size / _MIB:,.0f} MiB" for name, size in trace.link_bytes.items())
    peak = max(trace.peak_memory_bytes or (0,))
    exposed = (trace.exposed_comm_max_s * 1e3, trace.exposed_comm_mean_s * 1e3)
    makespan_ms, even_ms = trace.makespan_s * 1e3, of_problem_s[0] * 1e3
    rows = [
        ("makespan", f"{makespan_ms:.3f} ms"),
        ("bound, this plan", f"{limits.bound_s * 1e3:.3f} ms"),
        ("bound, any plan", f"{of_problem_s[1] * 1e3:.3f} ms, even compute {even_ms:.3f} ms"),
        ("exposed transfers", f"{exposed[0]:.3f} ms at most, {exposed[1]:.3f} ms on average"),
        ("overlap", overlap),
        (
            "imbalance",
            f"{trace.imbalance_total:.3f} total, {trace.imbalance_lockstep:.3f} lockstep",
        ),
        ("bytes over links", links or "none"),
        ("peak memory", f"{peak / _MIB:,.0f} MiB on the fullest rank"),
    ]
    return "\n".join(f"{name:<18} {value}" for name, value in rows)
