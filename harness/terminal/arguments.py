"""Arguments that several verbs share, and how their values are read."""

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeAlias, TypeVar

import strategies
from harness.base import numbers
from harness.base.numbers import received, whole_number
from harness.cluster.machine import Runtime
from harness.cluster.presets import CLUSTERS, DEFAULT_CLUSTER, cluster
from harness.plan.problem import MOST_RANKS, Direction, Dtype, Problem
from harness.plan.tasks import Scope
from harness.recommend.automatic import automatic
from harness.records import defaults
from harness.report.format import short
from harness.terminal.progress import say
from harness.training import named_models
from harness.training.models import Model
from patterns import LONGEST, make_pattern

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
_COLUMNS = 80
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_DTYPES = {
    "f64": "float64",
    "fp64": "float64",
    "f32": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
}


def length(text: str) -> int:
    """Read a number of tokens: `4096`, `64k`, `1m` (k = 1024, m = 1024 k).

    Raises:
        argparse.ArgumentTypeError: The text is not a length, or less than 1.
    """
    match = re.fullmatch(r"([0-9]{1,10})([km]?)", text.strip().lower())
    tokens = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= tokens <= LONGEST:
        most = f"at most {short(LONGEST)}"
        raise argparse.ArgumentTypeError(
            f"length ({received(text)}) must be like 1000, 64k or 1m, {most}"
        )
    return tokens


def count(text: str) -> int:
    """Read a whole number of at least 1, and no larger than makes sense.

    Raises:
        argparse.ArgumentTypeError: The text is not such a number.
    """
    return _number(whole_number, text)


def degree(text: str) -> int:
    """Read a context-parallel degree: a plan lists the tasks of every rank, so it has a limit.

    Raises:
        argparse.ArgumentTypeError: The text is not a degree.
    """
    return _number(partial(whole_number, most=MOST_RANKS), text)


def positive_number(text: str) -> float:
    """Read a positive number.

    Raises:
        argparse.ArgumentTypeError: The text is not such a number.
    """
    return _number(numbers.positive, text)


def _number(read: Callable[[str], T], text: str) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"({received(text)}) {error}") from None


def dtype(text: str) -> Dtype:
    """Read a precision: float64, float32, bfloat16, float16, or a usual short form.

    Raises:
        argparse.ArgumentTypeError: The precision is unknown.
    """
    name = _DTYPES.get(text.strip().lower(), text.strip().lower())
    try:
        return Dtype(name)
    except ValueError:
        known = ", ".join(Dtype)
        raise argparse.ArgumentTypeError(f"dtype ({text}) is unknown; choose {known}") from None


def heads(text: str) -> tuple[int, int]:
    """Read query and KV heads: `32/8`, or `32` for as many of each.

    Raises:
        argparse.ArgumentTypeError: The text is not a pair of counts, or KV heads do not divide.
    """
    q, slash, kv = text.partition("/")
    both = count(q), count(kv if slash else q)
    if both[0] % both[1]:
        raise argparse.ArgumentTypeError(
            f"heads ({text}): query heads must be a multiple of KV heads"
        )
    return both


def path(text: str) -> Path:
    """Read the name of a file or a folder.

    Raises:
        argparse.ArgumentTypeError: It is empty, which would be the folder that the user is in.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError(f"({text}) must be the name of a file or a folder")
    return Path(text)


def written(text: str) -> Path:
    """Read the name of a file that is to be written.

    Raises:
        argparse.ArgumentTypeError: It is empty or a folder.
    """
    if not text.strip() or Path(text).is_dir():
        what = "is a folder" if text.strip() else "is empty"
        raise argparse.ArgumentTypeError(f"({text}) {what}; it must be the name of a file")
    return Path(text)


def model_named(text: str) -> Model:
    """Read a model: a preset's name, or `key=value` pairs, see `named_models.model`.

    Raises:
        argparse.ArgumentTypeError: The model is unknown; the choices are listed.
    """
    try:
        return named_models.model(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def choice_of(taken: Iterable[E]) -> Callable[[str], E]:
    """Read one of the values of an enumeration, or one of the accepted subset.

    Raises:
        argparse.ArgumentTypeError: The value is not accepted; the choices are listed.
    """
    known = {member.value: member for member in taken}

    def read(text: str) -> E:
        member = known.get(text.strip().lower())
        if member is None:
            raise argparse.ArgumentTypeError(f"({text}) is unknown; choose {', '.join(known)}")
        return member

    return read


def flag_of(taken: Iterable[StrEnum]) -> dict[str, Any]:
    """The arguments of a flag that takes one of some values: it shows what it reads."""
    members = tuple(taken)
    return {"type": choice_of(members), "choices": members}


def listed(item: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Read a comma-separated list. An `a=b` belongs to the options of the entry before it."""

    def read(text: str) -> tuple[T, ...]:
        entries: list[str] = []
        for part in text.split(","):
            option = re.fullmatch(r"[\w-]+=.*", part.strip()) is not None
            if option and entries:
                entries[-1] += "," + part.strip()
            else:
                entries.append(part.strip())
        if not all(entries):
            raise argparse.ArgumentTypeError(f"({text}) has an empty entry")
        return tuple(item(entry) for entry in entries)

    return read


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say of what a plan is made."""
    parser.add_argument(
        "--strategy",
        default=strategies.DEFAULT_STRATEGY,
        help="name with options, e.g. usp:4x2, or auto: what is recommended (%(default)s)",
    )
    parser.add_argument(
        "--direction", choices=[d.value for d in Direction], default=Direction.FORWARD.value
    )


def add_cluster(group: argparse._ActionsContainer, why: str = "") -> None:
    """Add the flag that names a cluster."""
    group.add_argument(
        "--cluster",
        default=DEFAULT_CLUSTER,
        metavar="NAME",
        help=f"{why}one of {', '.join(CLUSTERS)}, or a file that `calibrate` wrote; "
        ":kernel=NAME takes another attention kernel, as in h100:kernel=cudnn",
    )


def add_simulation(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags that say on what a plan is simulated; returns their group."""
    group = parser.add_argument_group("simulation")
    add_cluster(group)
    group.add_argument(
        "--runtime",
        **flag_of(Runtime),
        default=Runtime.GRAPH,
        help="graph: replayed from a captured graph; eager-torch: launched one by one by the host; "
        "te: as Transformer Engine, whose transfers have a stream of their own",
    )
    return group


def add_heads(group: argparse._ActionsContainer, read: Callable[[str], Any] = heads) -> None:
    """Add the flags of heads, in both spellings: `--heads 32/8`, or each number by itself.

    Args:
        group: Where to.
        read: How `--heads` is read.
    """
    known = f"{defaults.HEADS_Q}/{defaults.HEADS_KV}"
    group.add_argument("--heads", type=read, help=f"query/KV heads, e.g. 64/8 ({known})")
    group.add_argument("--heads-q", type=count, help=f"query heads ({defaults.HEADS_Q})")
    known = f"KV heads (as --heads-q; {defaults.HEADS_KV} where neither is given)"
    group.add_argument("--heads-kv", type=count, help=known)


def heads_asked(args: argparse.Namespace, model: Model | None = None) -> tuple[int, int]:
    """Return query and KV heads: as `add_heads` flags say, else a model's, else the usual.

    Raises:
        ValueError: Both spellings are there.
    """
    apart = args.heads_q is not None or args.heads_kv is not None
    if args.heads is not None and apart:
        raise ValueError("--heads and --heads-q, --heads-kv say the same; give one of them")
    if args.heads is not None:
        both: tuple[int, int] = args.heads
        return both
    if model is not None and not apart:
        return model.heads_q, model.heads_kv
    return defaults.heads_of(args.heads_q, args.heads_kv)


def heads_axis(args: argparse.Namespace) -> tuple[tuple[int, int], ...] | None:
    """Return the pairs of heads of a grid, in whichever spelling; None where none is given.

    Raises:
        ValueError: Both spellings are there, or KV heads do not divide.
    """
    if args.heads_q is None and args.heads_kv is None:
        found: tuple[tuple[int, int], ...] | None = args.heads
        return found
    q, kv = heads_asked(args)
    if q % kv:
        raise ValueError(f"heads ({q}/{kv}): query heads must be a multiple of KV heads")
    return ((q, kv),)


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe one problem."""
    group = parser.add_argument_group("problem (defaults in parentheses)")
    group.add_argument(
        "--pattern",
        default=defaults.PATTERN,
        help="mask, e.g. causal, window:left=4095 (%(default)s; see `list`)",
    )
    known = short(defaults.SEQLEN)
    group.add_argument(
        "--seqlen",
        type=length,
        default=defaults.SEQLEN,
        help=f"tokens over all ranks, e.g. 64k ({known})",
    )
    group.add_argument(
        "--seqlen-kv", type=length, help="keys over all ranks, for cross-attention (as --seqlen)"
    )
    add_heads(group)
    group.add_argument(
        "--head-dim", type=count, default=defaults.HEAD_DIM, help="width of q and k (%(default)s)"
    )
    group.add_argument("--head-dim-v", type=count, help="width of v (as --head-dim)")
    group.add_argument("--batch", type=count, default=1, help="sequences per batch (%(default)s)")
    group.add_argument("--dtype", type=dtype, default=defaults.DTYPE, help="precision (bfloat16)")
    group.add_argument(
        "--cp", type=degree, default=defaults.CP, help="context-parallel degree (%(default)s)"
    )
    group.add_argument(
        "--scope",
        **flag_of(Scope),
        default=Scope.ATTENTION,
        help="attention alone, or the whole layer with its projections (%(default)s)",
    )
    group.add_argument(
        "--hidden", type=count, help="model width of a layer (default: query heads x head width)"
    )
    group.add_argument(
        "--rotary",
        type=positive_number,
        help="rotary base of a layer, e.g. 500000 (default: no rotary positions)",
    )


def problem_of(args: argparse.Namespace) -> Problem:
    """Make the problem that `add_problem` flags describe, and put what is recommended for `auto`.

    Raises:
        ValueError: They contradict one another.
    """
    layer = args.scope is Scope.LAYER
    if not layer and (args.hidden or args.rotary):
        raise ValueError("--hidden and --rotary require --scope layer")
    pattern = make_pattern(
        args.pattern, args.seqlen, args.seqlen_kv, cross=args.seqlen_kv is not None
    )
    heads_q, heads_kv = heads_asked(args)
    problem = Problem(
        pattern=pattern,
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim_v or 0,
        batch=args.batch,
        dtype=args.dtype,
        cp=args.cp,
        hidden=(args.hidden or heads_q * args.head_dim) if layer else None,
        rotary=args.rotary,
    )
    if getattr(args, "strategy", None) == strategies.AUTO:
        named = getattr(args, "cluster", None) or DEFAULT_CLUSTER
        args.strategy = automatic(problem, cluster(named), named)
        say(f"{strategies.AUTO}: {args.strategy}")
    return problem


def given(
    args: argparse.Namespace, add: Callable[[argparse.ArgumentParser], object], *but: str
) -> str:
    """Name the flags, of those that `add` adds, that have another value than their default.

    Args:
        args: The parsed arguments.
        add: Adds them to a parser.
        but: Names of values that are left out.
    """
    plain = argparse.ArgumentParser(add_help=False)
    add(plain)
    values = vars(plain.parse_args([])).items()
    changed = [name for name, value in values if getattr(args, name) != value and name not in but]
    return ", ".join(f"--{name.replace('_', '-')}" for name in changed)


Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a verb adds its parser."""


class Help(argparse.HelpFormatter):
    """Wraps what a verb says of itself; blocks with indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.strip().split("\n\n")
        return "\n\n".join(
            block if "\n  " in block else super(Help, self)._fill_text(block, width, indent)
            for block in blocks
        )


def example(lines: Sequence[str]) -> str:
    """Format the epilog of `--help`; commands that are too long go on in another line."""
    commands = (_continued(f"python -m harness {line}") for line in lines)
    return "example:\n" + "\n".join(commands)


def _continued(command: str) -> str:
    lines = wrap(
        command,
        _COLUMNS - 4,
        initial_indent="  ",
        subsequent_indent=" " * 6,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(lines)
