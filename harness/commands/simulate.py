"""`simulate`: one plan on a calibrated cluster, and how much each effect adds to its time."""

import argparse
import json
import sys

from harness.calibration import FOLDER, calibration
from harness.commands.arguments import add_problem, example, problem_of
from harness.effects import ALL
from harness.predict import HARNESS, TORCH, Pricer
from harness.problem import Direction
from harness.skeleton import skeleton
from harness.strategy import Context
from harness.verify import verify
from strategies import strategy


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict one run on a calibrated cluster",
        description=__doc__,
        epilog=example(
            [
                "simulate --strategy zigzag --pattern causal --cp 8 --explain",
                "simulate --strategy ring --cp 16 --cluster a800 --runtime eager-torch --explain",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategy", default="zigzag", help="with options (see `list`)")
    parser.add_argument(
        "--direction", choices=[d.value for d in Direction], default=Direction.FORWARD.value
    )
    add_problem(parser)
    group = parser.add_argument_group("simulation")
    known = sorted(path.stem for path in FOLDER.glob("*.toml"))
    group.add_argument("--cluster", choices=known, default="h100-hamming", help="a calibration")
    group.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of a node")
    group.add_argument(
        "--runtime",
        choices=["graph", "eager-torch"],
        default="graph",
        help="a captured graph, or every launch from the host by torch",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--explain", action="store_true", help="what each effect adds")
    group.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Predict one plan."""
    problem, direction = problem_of(args), Direction(args.direction)
    known = calibration(args.cluster)
    assert known is not None  # argparse refuses other names
    context = Context(gpus_per_node=args.gpus_per_node)
    program = verify(strategy(args.strategy).plan(problem, direction, context))
    shape = skeleton(program, args.gpus_per_node)
    eager = args.runtime == "eager-torch"
    pricer = Pricer(
        calibration=known,
        convention=TORCH if eager else HARNESS,
        direction=direction,
        scale_q=1.0,
        scale_kv=1.0,
        heads=problem.batch,
        head_dim=problem.head_dim,
    )
    time_s = pricer.seconds_of(shape)
    calls = {call for part in shape.parts for call in part.need.calls}
    tokens = tuple(n for call in calls for n in (call.rows, call.columns))
    inside = known.inside(tokens, problem.heads_q, problem.head_dim)
    expected = known.errors.get("eager" if eager else "graph")
    adds = {}
    if args.explain:
        for effect in sorted(ALL):
            pricer.effects = ALL - {effect}
            adds[effect.value] = time_s - pricer.seconds_of(shape)
    body = {
        "time_s": time_s,
        "calibration": known.id,
        "inside": inside,
        "expected_error": expected,
        "runtime": args.runtime,
        "adds_s": adds,
    }
    if args.json:
        sys.stdout.write(json.dumps(body, indent=2) + "\n")
        return 0
    error = "unknown" if expected is None else f"{expected:.0%}"
    where = "inside" if inside else "OUTSIDE"
    sys.stdout.write(
        f"{args.strategy} {direction.value} cp={problem.cp} on {args.cluster}, {args.runtime}: "
        f"{time_s * 1e3:.3f} ms, expected error {error}\n"
        f"calibration {known.id}, {where} its range\n"
    )
    for name, seconds in adds.items():
        sys.stdout.write(f"  {name:<13} {seconds * 1e3:+10.3f} ms\n")
    return 0
