"""The options of strategies: how their values are read, what may be typed, and what each does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from harness.base.numbers import positive, whole
from harness.plan.sharding import Placement
from harness.planning.checkpoint import Checkpoint
from harness.planning.levels import Level, read_levels, spell_levels

Value = bool | int | float | str | Placement | Checkpoint


@dataclass(frozen=True, slots=True)
class Option:
    """One option, for whoever types it.

    Attributes:
        read: From text to the value; raises ValueError with the rule.
        values: What may be typed.
        summary: What it does.
        unset: What a strategy takes where it is not given and has no default.
    """

    read: Callable[[str], Value]
    values: str
    summary: str
    unset: str = ""


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


def _placement(value: str) -> Placement:
    known: list[str] = list(Placement)
    if value not in known:
        raise ValueError(f"must be one of {', '.join(known)}")
    return Placement(value)


def _checkpoint(value: str) -> Checkpoint:
    known: list[str] = list(Checkpoint)
    if value not in known:
        raise ValueError(f"must be one of {', '.join(known)}")
    return Checkpoint(value)


def _levels(value: str) -> str:
    return spell_levels(read_levels(value))


def _switch(summary: str) -> Option:
    return Option(_flag, "true or false", summary)


def _number(summary: str, unset: str) -> Option:
    return Option(whole, "a whole number", summary, unset)


def _choice(kind: type[StrEnum], read: Callable[[str], Value], summary: str) -> Option:
    return Option(read, " or ".join(kind), summary)


OPTIONS: Mapping[str, Option] = {
    "candidates": _switch("take another strategy's plan where it is faster"),
    "checkpoint": _choice(Checkpoint, _checkpoint, "what backward starts from beside x"),
    "fused": _switch("move chunks by collectives and attend once a rank, without overlap"),
    "in_order": _switch("stages take heads in their natural order, and keys are sent again"),
    "inner": _number("length of the inner ring", "the longest inside a node"),
    "levels": Option(
        _levels,
        "all or none or names joined by +",
        f"levels that are planned, of {', '.join(Level)}",
    ),
    "offload": _switch("let what is saved for backward rest on the host"),
    "parts": _number("parts of the sequence", "of 64k tokens"),
    "placement": _choice(Placement, _placement, "how tokens are dealt to ranks"),
    "prove": _switch("search for proofs, up to a minute for each tiling"),
    "prune": _switch("leave out transfers that the pattern makes useless"),
    "resend": _switch("with a ring, send keys again in each stage rather than keep them"),
    "ring": _number("ranks of the ring axis", "what the other axis leaves"),
    "ring_inside": _switch("put the ring, not the head axis, on neighbouring ranks"),
    "rows": _number("rows of ranks", "as many as move the fewest bytes"),
    "round_sent": _switch("send partial gradients in the dtype of q, not as they are kept"),
    "save_gathered": _switch("save gathered q, k and v rather than project again in backward"),
    "seconds": Option(positive, "seconds", "processor time for each distinct tiling"),
    "short_last": _switch("let the last stage be short where stages do not divide the heads"),
    "stage_heads": _number("query heads of a stage over all ranks", "one a rank"),
    "sum_gradients": _switch("sum gradients of weights over ranks, a share of the heads to each"),
    "ulysses": _number("ranks of the head axis", "the most inside a node"),
}
"""Every option by name; a strategy accepts some of them."""

COMMON_OPTIONS = frozenset({"round_sent"})
"""Those that every strategy takes."""

LAYER_OPTIONS = frozenset({"checkpoint", "offload", "sum_gradients"})
"""Those that every strategy takes at layer scope."""


def read_option(key: str, value: str) -> Value:
    """Read the value of an option.

    Raises:
        ValueError: It is none of what may be typed.
    """
    return OPTIONS[key].read(value)
