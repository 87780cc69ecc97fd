"""`calibrate`: fit every parameter of a cluster, and say how well each fits."""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from harness.calibration import dump
from harness.commands.arguments import example
from harness.fit.cluster import MACHINES, fit_cluster, sources_of


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        help="fit a cluster's parameters",
        description=__doc__,
        epilog=example(["calibrate --from-logs ../shared/data --cluster h800 -o h800.toml"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = [machine.name for machine in MACHINES]
    parser.add_argument(
        "--from-logs", type=Path, required=True, metavar="DIR", help="folder of measured tables"
    )
    parser.add_argument("--cluster", choices=known, required=True, help="whose parameters")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="TOML; default stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fit one cluster."""
    machine = next(machine for machine in MACHINES if machine.name == args.cluster)
    date = datetime.now(tz=UTC).date().isoformat()
    if not args.from_logs.is_dir():
        raise ValueError(f"--from-logs ({args.from_logs}) must be a folder of measured tables")
    value = fit_cluster(
        args.from_logs, machine, date, lambda line: print(line, file=sys.stderr, flush=True)
    )
    text = dump(value, sources_of(machine, date))
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
    return 0
