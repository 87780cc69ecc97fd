"""Kinds of named patterns: the parameters, and the function that builds the mask."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from patterns.geometry import Band
from patterns.pattern import LONGEST, Predicate

Values = Mapping[str, str]  # parameter name -> canonical value
_MOST_DIGITS = 20  # Python reads no more than 4300, and no position has so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One `name=value` of a pattern's text.

    Attributes:
        default: Canonical value that the text may leave out; None = must be given.
        canonical: Value as typed -> canonical spelling; raises ValueError with the rule.
        instead: Another parameter; where that is given, this one need not be, and has no value.
    """

    default: str | None
    canonical: Callable[[str], str]
    instead: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltMask:
    """Mask that a kind builds: see the attributes of the same names of `Pattern`."""

    bands: tuple[Band, ...]
    predicate: Predicate
    remap: tuple[int, ...] | None = None


def _as_it_is(_: int) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A named family of patterns.

    Attributes:
        summary: One line for lists.
        build: `(values, seqlen_q, seqlen_kv) -> Mask`, values complete and canonical.
        parameters: In the order in which the canonical text prints them.
        cross: Whether `seqlen_q != seqlen_kv` has a meaning.
        sample: Length -> parameters, as typed, with which it is checked at that length; None for
            what cannot be checked without a file of the user's.
        sample_cross: Parameters with which it is checked for cross-attention as well; None if not.
    """

    summary: str
    build: Callable[[Values, int, int], BuiltMask]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    cross: bool = True
    sample: Callable[[int], str] | None = _as_it_is
    sample_cross: str | None = None


def integer(name: str, value: object) -> int:
    """Take a whole number of any kind: Python's, numpy's, a tensor of one number.

    Raises:
        ValueError: The value is not a whole number.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]  # refused below if it is not
    except TypeError:
        raise ValueError(f"{name} ({value!r}) must be a whole number, such as 4096") from None


def real(name: str, value: object) -> float:
    """Take a number of any kind: Python's, numpy's, a tensor of one number.

    Raises:
        ValueError: The value is not a number.
    """
    try:
        return float(value)  # type: ignore[arg-type]  # refused below if it is not
    except (TypeError, ValueError):
        raise ValueError(f"{name} ({value!r}) must be a number, such as 0.125") from None


def digits(value: str) -> int | None:
    """Read the digits 0 to 9 as a whole number; None where there is anything else, or too many."""
    short = value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS
    return int(value) if short else None


def whole_parameter(default: int, *, least: int, most: int = LONGEST) -> Parameter:
    """Return a parameter that is a whole number in `[least, most]`."""

    def canonical(value: str) -> str:
        number = digits(value)
        if number is None or not least <= number <= most:
            raise ValueError(f"must be a whole number in {least}..{most}; try {default}")
        return str(number)

    return Parameter(default=str(default), canonical=canonical)


def parameter_choice(default: str, *others: str) -> Parameter:
    """Return a parameter that is one of a few words."""

    def canonical(value: str) -> str:
        if value not in (default, *others):
            raise ValueError(f"must be one of {', '.join((default, *others))}")
        return value

    return Parameter(default=default, canonical=canonical)
