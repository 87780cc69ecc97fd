"""`python -m harness VERB`: the command line.

Exit status: 0 the work was done and found nothing wrong, 1 it found a failure or all that was asked
for is refused (a strategy that cannot do the problem, a cluster that is too small), 2 the call was
wrong (an unknown name or flag, values that contradict one another). Machine output goes to stdout
alone; progress and messages go to stderr.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

from harness.base.workers import Terminated
from harness.commands import (
    calibrate,
    check,
    compare,
    doctor,
    explain,
    listing,
    plan,
    reproduce,
    simulate,
    sweep,
    trace,
)
from harness.commands.progress import wrapped
from harness.errors import HarnessError, UnsupportedError
from harness.ranks import launch

_PROGRAM = "python -m harness"
_COUNTING = ("check", "reproduce", "sweep")  # they say how far they are, over many plans
_VERBS = (
    sweep,
    check,
    explain,
    plan,
    trace,
    simulate,
    reproduce,
    calibrate,
    compare,
    listing,
    doctor,
)


class _Parser(argparse.ArgumentParser):
    """A parser that answers a wrong call in a line, not with all flags."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where the flags are."""
        verb = self.prog.removeprefix(f"{_PROGRAM} ")
        text = f"{verb}: {message}; `{self.prog} --help` shows the flags"
        self.exit(2, wrapped(text) + "\n")


class _Wrapped(logging.Formatter):
    """Says what was logged and nothing else, in lines that fit the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Wrap a message."""
        return wrapped(record.getMessage())


def parser() -> argparse.ArgumentParser:
    """Build the parser of all verbs."""
    top = _Parser(
        prog=_PROGRAM,
        description="Compare, check and explain context-parallel attention strategies.",
        epilog="`python -m harness VERB --help` shows the flags and an example of a verb. Exit "
        "status: 0 all is well; 1 something failed, or all that was asked for is refused (a "
        "strategy that cannot do the problem); 2 the call was wrong (an unknown name, values that "
        "contradict one another).",
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


def _with_values(argv: Sequence[str]) -> list[str]:
    """Join a flag and a value that looks like another flag, so that the value is judged as one."""
    words: list[str] = []
    for word in argv:
        if re.match(r"-\d", word) and words and re.fullmatch(r"--[a-z-]+", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _run(argv: Sequence[str] | None, ranks: launch.Launch | None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows ? for it
    words = _with_values(sys.argv[1:] if argv is None else argv)
    if not words:
        parser().print_help(sys.stderr)
        return 2
    args, unknown = parser().parse_known_args(words)
    if unknown:
        text = f"{args.verb}: unknown arguments: {' '.join(unknown)}"
        text += f"; `{_PROGRAM} {args.verb} --help` shows the flags"
        print(wrapped(text), file=sys.stderr)
        return 2
    args.launch = ranks
    told = logging.StreamHandler(sys.stderr)  # what planners say when a search begins
    told.setFormatter(_Wrapped())
    searches = logging.getLogger("strategies")
    searches.addHandler(told)
    searches.setLevel(logging.WARNING if args.verb in _COUNTING else logging.INFO)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except Terminated:
        print(f"{args.verb}: terminated; what was done is kept", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        print(f"{args.verb}: interrupted; what was done is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout is gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, HarnessError, MemoryError, OSError) as error:
        status, text = _failure(error)
        print(wrapped(f"{args.verb}: {text}"), file=sys.stderr)
    finally:
        searches.removeHandler(told)
    return status


def _failure(error: Exception) -> tuple[int, str]:
    """The exit status of an error, and what to say of it."""
    match error:
        case ValueError():
            return 2, str(error)
        case UnsupportedError():  # the call is right, but what it asks for is refused
            return 1, str(error)
        case MemoryError():
            return 1, f"out of memory ({error}); choose a smaller problem"
        case OSError():  # a full disk, a folder that may not be read
            # A draft has another name than the file that was asked for.
            name = re.sub(r"(\.\d+\.tmp|\.new)$", "", str(error.filename or ""))
            return 1, f"{error.strerror or error}" + (f": {name}" if name else "")
        case _:
            return 1, str(error)
