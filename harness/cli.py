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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from harness.base.workers import Terminated, ended_by_signals
from harness.errors import HarnessError, UnsupportedError
from harness.ranks import launch, meeting
from harness.terminal.progress import say, wrapped
from patterns.outside import did_you_mean

_PROGRAM = "python -m harness"
_NOBODY = ""
_COUNTING = ("check", "reproduce", "sweep")  # they say how far they are, over many plans
_VERBS: Mapping[str, tuple[str, str]] = {
    "recommend": ("recommend", "which strategy for a model, its data and a cluster; how sure"),
    "sweep": ("sweep", "compare strategies, simulated on a cluster and measured on this machine"),
    "check": ("check", "numerical equivalence to the float64 oracle, forward and backward"),
    "explain": ("explain", "is a configuration supported? what it moves, holds and balances"),
    "plan": ("plan", "make a plan, print it as a grid, save it, load and prove a saved one"),
    "trace": ("trace", "simulate or measure one run and show its timeline"),
    "simulate": ("simulate", "predict one run on a cluster"),
    "reproduce": ("reproduce", "published figures next to ours"),
    "calibrate": ("calibrate", "fit a cluster's parameters, to this machine or to logs"),
    "compare": ("compare", "two result sets: what changed beyond noise"),
    "report": ("report", "results as one HTML page: answer, heat tables, charts, every cell"),
    "list": ("listing", "list strategies, peers, patterns, clusters, models and precisions"),
    "doctor": ("doctor", "check this machine: packages, kernels, CUDA, NCCL, processes"),
}
"""The module of each verb, and what it does. A verb is imported when it is asked for: some need
torch, which takes seconds."""


class _Parser(argparse.ArgumentParser):
    """A parser that answers a wrong call in a line, not with all flags."""

    def error(self, message: str) -> NoReturn:
        """Report a wrong call, and where the flags are listed."""
        verb = self.prog.removeprefix(f"{_PROGRAM} ")
        wrong = re.match(r"argument VERB: invalid choice: '([^']*)'", message)
        near = did_you_mean(wrong[1], _VERBS) if wrong else ""
        text = f"{verb}: {message}{near}; `{self.prog} --help` shows the flags"
        self.exit(2, wrapped(text) + "\n")


class _Wrapped(logging.Formatter):
    """Says what was logged and nothing else, in lines that fit the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Wrap a message."""
        return wrapped(record.getMessage())


def parser(*verbs: str) -> argparse.ArgumentParser:
    """Build the parser of all verbs.

    Args:
        verbs: Those whose flags it knows, of the others only the name; none named: all.
    """
    top = _Parser(
        prog=_PROGRAM,
        description="Compare, check and explain context-parallel attention strategies.",
        epilog="`python -m harness VERB --help` shows the flags and an example of a verb. Exit "
        "status: 0 all is well; 1 something failed, or all that was asked for is refused (a "
        "strategy that cannot do the problem); 2 the call was wrong (an unknown name, values that "
        "contradict one another).",
    )
    top.add_argument("--version", action="version", version=f"cpbench {version('cpbench')}")
    known = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (module, text) in _VERBS.items():
        if not verbs or name in verbs:
            import_module(f"harness.commands.{module}").register(known, text)
        else:
            known.add_parser(name, help=text)
    top.set_defaults(measures=lambda _: False, needs=lambda _: ())
    return top


def main(argv: Sequence[str] | None = None, *, begin: Callable[[], None] = lambda: None) -> int:
    """Run one verb and return its exit status; launched with others, rank 0 runs it for all.

    Args:
        argv: The words; None takes those of the process.
        begin: Called when all that the verb needs is loaded, and its work begins.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows ? for it
    words = _with_values(sys.argv[1:] if argv is None else argv)
    if not words:
        parser(_NOBODY).print_help(sys.stderr)
        return 2
    launched = meeting.launched()
    second = launched and os.environ["RANK"] != "0"
    # Ranks of a launch have the same words: rank 0 says what is wrong with them.
    with _silent() if second else nullcontext():
        args = _parsed(words)
    if args is None:
        return 2
    for module in args.needs(args):
        import_module(module)
    begin()
    if launched and args.measures(args):
        return _ended(args, lambda: _launched(args))
    if second and "TORCHELASTIC_RUN_ID" in os.environ:
        return 0  # rank 0 does alone what needs no others
    return _ended(args, lambda: int(args.run(args)))


@contextmanager
def _silent() -> Iterator[None]:
    with (
        Path(os.devnull).open("w", encoding="utf-8") as void,
        redirect_stderr(void),
        redirect_stdout(void),
    ):
        yield


def _launched(args: argparse.Namespace) -> int:
    """Run a verb with the other ranks of the launch, or serve the one that runs it."""
    from harness.measure.cells import LAUNCHED_JOBS

    me = launch.Rank(meeting.meet(), LAUNCHED_JOBS)
    if me.rank:
        return me.serve()
    ranks = launch.Launch(me)
    args.launch = ranks
    try:
        ranks.backend = launch.backend_of(me.met, args.transport)
        status = int(args.run(args))
    except Terminated:  # the launcher ends all of them
        ranks.dismiss(wait=False)
        raise
    except BaseException:
        ranks.dismiss()
        raise
    ranks.dismiss()
    return status


def _with_values(argv: Sequence[str]) -> list[str]:
    """Join a flag and a value that looks like another flag, so that the value is judged as one."""
    words: list[str] = []
    for word in argv:
        if re.match(r"-\d", word) and words and re.fullmatch(r"--[a-z-]+", words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _parsed(words: Sequence[str]) -> argparse.Namespace | None:
    """Parse the command line; None if it has arguments that the verb does not know."""
    args, unknown = parser(words[0]).parse_known_args(words)
    if unknown:
        text = f"{args.verb}: unknown arguments: {' '.join(map(_with_hint(words[0]), unknown))}"
        _say(text + f"; `{_PROGRAM} {args.verb} --help` shows the flags")
        return None
    return args


def _with_hint(verb: str) -> Callable[[str], str]:
    """Add the most similar flag of a verb to one that is unknown."""
    verbs = argparse.ArgumentParser(prog=_PROGRAM).add_subparsers()
    module, text = _VERBS[verb]
    import_module(f"harness.commands.{module}").register(verbs, text)
    known = re.findall(r"--[a-z-]+", verbs.choices[verb].format_usage())
    return lambda word: word + (did_you_mean(word, known) if word.startswith("--") else "")


def _ended(args: argparse.Namespace, work: Callable[[], int]) -> int:
    """Do the work of a verb; its exit status, however it ends."""
    told = logging.StreamHandler(sys.stderr)  # what planners say when a search begins
    told.setFormatter(_Wrapped())
    searches = logging.getLogger("strategies")
    searches.addHandler(told)
    searches.setLevel(logging.WARNING if args.verb in _COUNTING else logging.INFO)
    try:
        with ended_by_signals():
            status = work()
            sys.stdout.flush()
    except Terminated as end:
        _say(f"{args.verb}: terminated; what was done is kept")
        return 128 + end.number
    except KeyboardInterrupt:
        _say(f"{args.verb}: interrupted; what was done is kept")
        return 130
    except BrokenPipeError:
        # The reader of stdout is gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, HarnessError, MemoryError, OSError) as error:
        status, text = _failure(error)
        _say(f"{args.verb}: {text}")
    finally:
        searches.removeHandler(told)
    return status


def _say(text: str) -> None:
    """Print on stderr, if somebody is still there."""
    with suppress(OSError):
        say(text)


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
