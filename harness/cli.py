"""`python -m harness VERB`: the command line.

Exit status: 0 the work was done and found nothing wrong, 1 it found a failure, 2 the call was
wrong. Machine output goes to stdout alone; progress and messages go to stderr.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from harness import launch
from harness.commands import (
    calibrate,
    check,
    compare,
    doctor,
    explain,
    listing,
    plan,
    simulate,
    sweep,
    trace,
)
from harness.errors import HarnessError, UnsupportedError

_VERBS = (sweep, check, explain, plan, trace, simulate, calibrate, compare, listing, doctor)


def parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs."""
    top = argparse.ArgumentParser(
        prog="python -m harness",
        description="Compare, check and explain context-parallel attention strategies.",
        epilog="`python -m harness VERB --help` shows the flags and an example of a verb.",
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in _VERBS:
        verb.register(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status; launched with others, rank 0 runs it for all."""
    if not launch.launched():
        return _run(argv, None)
    me = launch.join()
    if me.rank:
        me.serve()
        return 0
    ranks = launch.drive(me)
    try:
        return _run(argv, ranks)
    finally:
        ranks.dismiss()


def _run(argv: Sequence[str] | None, ranks: launch.Launch | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows ? for it
    args = parser().parse_args(argv)
    args.launch = ranks
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except (ValueError, UnsupportedError) as error:
        print(f"{args.verb}: {error}", file=sys.stderr)
        return 2
    except HarnessError as error:
        print(f"{args.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.verb}: interrupted; what was done is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout is gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that may not be read
        what = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        print(f"{args.verb}: {what}", file=sys.stderr)
        return 1
    return status
