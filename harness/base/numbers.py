"""Numbers as people type them: one rule for flags, options of strategies and models."""

import math
import re
from collections.abc import Mapping

from patterns.kind import digits

LARGEST_COUNT = 2**20
"""The largest count that is accepted: no shape, vocabulary or number of runs is as large."""
_LARGEST = 1e12  # GiB, seconds, percent, a rotary base: anything larger is a typo
_SHOWN = 24


def whole_number(text: str, most: int = LARGEST_COUNT) -> int:
    """Read a whole number of at least 1, in the digits 0 to 9.

    Raises:
        ValueError: The text is not such a number, or above `most`; the message has the rule.
    """
    number = digits(text.strip().lstrip("0"))
    if number is not None and number <= most:
        return number
    raise ValueError(f"must be a whole number of at least 1 and at most {most}")


def positive(text: str) -> float:
    """Read a positive number, such as 3, 0.5 or 5e5.

    Raises:
        ValueError: The text is not such a number; the message has the rule.
    """
    plain = re.fullmatch(r"[0-9]*\.?[0-9]*(e[+-]?[0-9]+)?", text.strip().lower())
    try:
        value = float(text) if plain else math.nan
    except ValueError:  # a dot alone
        value = math.nan
    if not 0 < value <= _LARGEST:  # false of NaN as well
        raise ValueError("must be a positive number and at most 1e12")
    return value


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinities by None: JSON has no such numbers."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def received(text: str) -> str:
    """A value as a message repeats it: long ones end in dots."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
