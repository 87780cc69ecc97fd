"""Predict the time of one strategy on a cluster, on a calibrated one effect by effect."""

import argparse
import sys

from harness.base.json_fields import json_text
from harness.cluster.effects import ALL, SAID, Effect
from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import CLUSTERS, cluster, require
from harness.memory.ledger import ledger
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.residency import Program, without_collection
from harness.prepare.planner_context import context_on
from harness.proved.plans import proved
from harness.report.format import cell_heading
from harness.simulate.calibrated import full_clock, pricer, skeleton_on, trust
from harness.simulate.simulator import simulate
from harness.terminal.arguments import (
    Help,
    Verbs,
    add_plan,
    add_problem,
    add_simulation,
    example,
    problem_of,
)
from harness.terminal.progress import wrapped
from strategies import strategy

_NOTHING = 1e-6
"""Shares of a time below this are rounding."""
_NEGATIVE = (
    "Below 0: the run would take longer without the effect, because work moves to ranks that wait "
    "for transfers anyway, or an earlier transfer takes SMs from a kernel that others wait for."
)


def register(subparsers: Verbs, summary: str | None = None) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help=summary,
        description=__doc__,
        epilog=example(
            [
                "simulate --strategy zigzag --pattern causal --cp 8",
                "simulate --strategy zigzag --cluster h100-hamming --explain",
                "simulate --strategy ring --cp 16 --cluster a800 --runtime eager-torch --explain",
                "simulate --strategy usp:8x2 --cp 16 --cluster mine.toml",
            ]
        ),
        formatter_class=Help,
    )
    add_plan(parser)
    add_problem(parser)
    add_simulation(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--explain",
        action="store_true",
        help="show how much each effect adds (calibrated clusters)",
    )
    group.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Predict one plan."""
    problem, direction = problem_of(args), Direction(args.direction)
    machine = cluster(args.cluster)
    require(machine, problem.cp)
    with without_collection():
        program = proved(strategy(args.strategy), problem, direction, context_on(machine))
        body = _predict(program, machine, args.runtime, explain=args.explain)
        body["peak_bytes"] = peak = max(ledger(program).peak_bytes)
        body["shortage"] = machine.shortage(peak) or None
    if args.json:
        sys.stdout.write(json_text(body, indent=2) + "\n")
    else:
        sys.stdout.write(_text(args, program.plan, body) + "\n")
    return 0


def _predict(
    program: Program, machine: Cluster, runtime: Runtime, *, explain: bool
) -> dict[str, object]:
    plan, fitted = program.plan, full_clock(machine)
    if fitted is None:
        if explain:
            known = ", ".join(name for name, c in CLUSTERS.items() if c.fitted is not None)
            raise ValueError(
                f"cluster ({machine.name}) has datasheet numbers and no effects to explain; "
                f"choose from {known}, or leave --explain out"
            )
        return {
            "time_s": simulate(program, machine, runtime=runtime).makespan_s,
            "calibration": machine.calibration,
            "calibration_id": None,
            "inside_range": None,
            "expected_error": None,
            "expected_error_p90": None,
            "kernel": None,
            "runtime": runtime.value,
            "adds_s": {},
        }
    eager, own = runtime.eager, runtime.own_stream
    prices = pricer(plan.problem, plan.direction, fitted, eager=eager, own_stream=own)
    shape = skeleton_on(program, fitted, eager=eager)
    time_s = prices.seconds_of(shape)
    said = trust(plan.problem, shape, prices, time_s)
    adds = {}
    if explain:
        for effect in sorted(ALL):
            prices.effects = ALL - {effect}
            adds[effect.value] = time_s - prices.seconds_of(shape)
    return {
        "time_s": time_s,
        "calibration": said.text,
        "calibration_id": said.calibration_id,
        "inside_range": said.inside,
        "expected_error": said.expected_error,
        "expected_error_p90": said.p90,
        "kernel": said.kernel,
        "runtime": runtime.value,
        "adds_s": adds,
    }


def _text(args: argparse.Namespace, plan: Plan, body: dict[str, object]) -> str:
    time_s, adds = body["time_s"], body["adds_s"]
    assert isinstance(time_s, float)
    assert isinstance(adds, dict)
    lines = [
        cell_heading(strategy(args.strategy).text, plan.problem, plan.direction),
        f"on {args.cluster}, {body['runtime']}: {time_s * 1e3:.3f} ms",
        str(body["calibration"]),
    ]
    if body["shortage"]:
        lines.append(f"It would not run: the fullest rank {body['shortage']}.")
    if not adds:
        return wrapped("\n".join(lines))
    lines.append("Time saved by switching off each effect alone:")
    table = [
        f"  {name:<12} {seconds * 1e3:9.3f} ms {seconds / time_s:6.1%}  {SAID[Effect(name)]}"
        for name, seconds in adds.items()
    ]
    notes = ["The effects do not add up: switching one off may expose another."]
    if any(seconds < -_NOTHING * time_s for seconds in adds.values()):
        notes.append(_NEGATIVE)
    return "\n".join([wrapped("\n".join(lines)), *table, wrapped(" ".join(notes))])
