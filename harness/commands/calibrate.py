"""Fit the parameters of a cluster to measurements, and say how well each fits.

Without --from-logs it measures this machine, with two ranks of one thread: kernels forward and
backward by size, gloo messages and all-to-alls by size, and the interpreter's overhead; within 90
seconds. The file that it writes is a cluster: `simulate --cluster FILE`, `sweep --cluster FILE`.
"""

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from harness.base.files import write_whole
from harness.cluster.calibration import dump, load
from harness.fit.cluster import MACHINES, cluster_sources, fit_cluster
from harness.terminal.arguments import Help, Verbs, example, path


def register(subparsers: Verbs, summary: str | None = None) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "calibrate",
        help=summary,
        description=__doc__,
        epilog=example(
            [
                "calibrate -o local-cpu.toml",
                "calibrate --check local-cpu.toml -o results/local-cpu",
                "calibrate --from-logs logs --cluster h800 -o h800.toml",
            ]
        ),
        formatter_class=Help,
    )
    known = [machine.name for machine in MACHINES]
    parser.add_argument(
        "--from-logs",
        type=path,
        metavar="DIR",
        help="fit a published cluster to a folder of its measured tables, instead of this machine",
    )
    parser.add_argument("--cluster", choices=known, help="the cluster to fit (with --from-logs)")
    parser.add_argument(
        "--check",
        type=path,
        metavar="FILE",
        help="measure small sweeps here and compare them with this calibration's predictions",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=path,
        metavar="PATH",
        help="TOML file to write; with --check, a folder for its records",
    )
    parser.set_defaults(
        needs=lambda args: () if args.from_logs else ("harness.calibrate.this_machine",), run=run
    )


def run(args: argparse.Namespace) -> int:
    """Fit one cluster, or check one."""
    date = datetime.now(tz=UTC).date().isoformat()
    if args.check is not None:
        if args.from_logs is not None or args.cluster is not None:
            raise ValueError("--check measures here; leave --from-logs and --cluster out")
        return _check(args)
    if args.from_logs is None:
        if args.cluster is not None:
            raise ValueError("--cluster names whose logs are fitted; give --from-logs with it")
        _require_place(args.output)  # before the work, which would be lost
        from harness.calibrate import this_machine

        text = this_machine.calibrated(date, _log)
    else:
        text = _from_logs(args, date)
    if args.output is None:
        sys.stdout.write(text)
    else:
        write_whole(args.output, text)
        _log(f"wrote {args.output}; it is a cluster: simulate --cluster {args.output}")
    return 0


def _require_place(path: Path | None) -> None:
    """Refuse a file that cannot be written.

    Raises:
        ValueError: It cannot.
    """
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ValueError(f"--output ({path}) must be a file in a folder that can be written")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _from_logs(args: argparse.Namespace, date: str) -> str:
    if args.cluster is None:
        names = ", ".join(machine.name for machine in MACHINES)
        raise ValueError(f"--from-logs needs --cluster; choose from {names}")
    if not args.from_logs.is_dir():
        raise ValueError(f"--from-logs ({args.from_logs}) must be a folder of measured tables")
    _require_place(args.output)
    machine = next(machine for machine in MACHINES if machine.name == args.cluster)
    return dump(fit_cluster(args.from_logs, machine, date, _log), cluster_sources(machine, date))


def _check(args: argparse.Namespace) -> int:
    """Compare; a median error that is larger than promised is a failure found."""
    from harness.calibrate import this_machine

    load(args.check)  # a wrong file is a wrong call
    return this_machine.check_predictions(args.check, args.output, _log)
