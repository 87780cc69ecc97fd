"""Options: how what is typed behind a strategy's name is read, and what each option means.

A strategy has its own options in its own file, as one frozen dataclass whose fields `option` makes:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        rows: int | None = option(None, "rows of ranks", unset="as many as move the fewest bytes")

Those that every strategy takes are `Common`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar

from harness.base.numbers import positive, whole_number
from harness.plan.sharding import Placement
from harness.planning.checkpoint import Checkpoint

T = TypeVar("T")
_KEY = "option"

PRUNE = "leave out transfers that the pattern makes useless"
PLACEMENT = "how tokens are dealt to ranks"
CHUNK = "tokens of a chunk that placement=balanced or ptrr deals"
CHUNK_UNSET = "balanced: the largest that is even to a hundredth; ptrr: 128"


@dataclass(frozen=True, slots=True)
class Reader:
    """How a value is typed.

    Attributes:
        read: From text to the value; raises ValueError with the rule.
        values: The values that may be typed.
    """

    read: Callable[[str], Any]
    values: str


@dataclass(frozen=True, slots=True)
class Option:
    """One option, for whoever types it.

    Attributes:
        reader: How its value is typed.
        summary: Its meaning.
        unset: The strategy's choice where it is not given and has no default.
    """

    reader: Reader
    summary: str
    unset: str = ""


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


SWITCH = Reader(_flag, "true or false")
WHOLE = Reader(whole_number, "a whole number")
SECONDS = Reader(positive, "seconds")
GIB = Reader(positive, "GiB")


def option_choice(kind: type[StrEnum]) -> Reader:
    """Read one of the values of an enumeration."""
    known = [member.value for member in kind]

    def read(value: str) -> StrEnum:
        if value not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return kind(value)

    return Reader(read, " or ".join(known))


def option(default: T, summary: str, *, unset: str = "", reader: Reader | None = None) -> T:
    """Make a field of a strategy's options.

    Args:
        default: Its value where it is not given; None lets the strategy choose.
        summary: Its meaning, for `list`.
        unset: The strategy's choice where the default is None, for `list`.
        reader: How it is typed; None follows the default: true or false for a bool, a member's
            value for an enumeration, a whole number for None or a number.
    """
    made = Option(reader or _reader_of(default), summary, unset)
    value: T = field(default=default, metadata={_KEY: made})
    return value


def _reader_of(default: object) -> Reader:
    match default:
        case bool():
            return SWITCH
        case StrEnum():
            return option_choice(type(default))
        case None | int():
            return WHOLE
        case _:
            raise TypeError(f"option with default {default!r} needs a reader")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """The options of a strategy that has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The options that every strategy takes.

    Attributes:
        checkpoint: Tensors that a layer saves for backward; see `checkpoint`.
        offload: A layer's saved tensors rest on the host.
        sum_gradients: A layer's weight gradients are summed over ranks.
        round_sent: Partial dq, dk and dv are sent in the problem's dtype.
        align: Tokens that what is sent of a chunk is rounded up to.
    """

    checkpoint: Checkpoint = option(
        Checkpoint.NONE, "recompute in backward: nothing, q, k and v, or the whole layer"
    )
    offload: bool = option(False, "keep the tensors saved for backward in host memory")
    sum_gradients: bool = option(False, "reduce-scatter weight gradients over ranks, by heads")
    round_sent: bool = option(
        False, "send partial gradients in the dtype of q, not in accumulator precision"
    )
    align: int = option(1, "round what is sent of a chunk up to so many tokens; 1: just its need")


COMMON_OPTIONS = ("round_sent", "align")
"""Options of `Common` that apply at either scope."""

LAYER_OPTIONS = ("checkpoint", "offload", "sum_gradients")
"""Options of `Common` that apply to whole layers only."""


def options_of(options: object) -> Mapping[str, Option]:
    """Return the options of a dataclass of options, or of a value of one, by name.

    Raises:
        ValueError: A field was not made by `option`.
    """
    values: Any = options
    for each in fields(values):
        if _KEY not in each.metadata:
            raise ValueError(f"option {each.name} must be a field that `option` made")
    return {each.name: each.metadata[_KEY] for each in fields(values)}


def placement_of(options: object) -> Placement | None:
    """Return how a strategy was told to deal tokens; None where that is no option of it."""
    placement = getattr(options, "placement", None)
    return placement if isinstance(placement, Placement) else None


def shown(value: object) -> str:
    """Spell a value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)
