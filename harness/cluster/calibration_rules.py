"""Rules for the values of a calibration: a file may come from anywhere, and a NaN from a fit.

A value that breaks its rule would not stop a prediction: it would make it silently wrong, or search
without end. So every number has bounds, as wide as any machine or fit needs; the unit is the end of
its name.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from harness.base.json_fields import refused
from harness.base.numbers import LARGEST_COUNT

_RATIOS = ("alone", "split_efficiency", "causal", "share", "share_beside", "uneven")
"""Range of values that times are divided or multiplied by."""
_BOUNDS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("_per_s", "_per_s_float32", "_per_s_float64"), 1e3, 1e21),
    (("_s",), 0.0, 1e4),
    (("_bytes",), 0.0, 1e18),
    (_RATIOS, 1e-6, 1e6),
    (("delta_passes",), -1e6, 1e6),  # a fitted correction of either sign
    (("",), 0.0, 1e6),
)
"""Ends of names, the least and the most of a number; the first that fits."""
_WHOLE: Mapping[str, int] = {
    "memory_bytes": 10**18,
    "max_tokens": LARGEST_COUNT,
    "min_tokens": LARGEST_COUNT,
}
_MOST_WHOLE = 10**6
_MOST_ERROR = 1e3
_MOST_NAME = 200
_MOST_ITEMS = 1000
_CHOICES = {"device": ("cuda", "cpu")}


def judge_section(section: str, kind: type, values: Mapping[str, object]) -> None:
    """Refuse values of a section that its fields cannot be.

    Raises:
        ValueError: Says the section and the name, the value received and the rule.
    """
    for field in fields(cast("Any", kind)):
        if field.name not in values or is_dataclass(field.type):
            continue
        value = values[field.name]
        rule = _broken(field.name, field.type, value)
        if rule is not None:
            raise refused(f"{section}.{field.name}", value, rule)


def judge_errors(values: Mapping[str, object]) -> None:
    """Refuse shares of error that are none.

    Raises:
        ValueError: As `judge`.
    """
    for name, value in values.items():
        if not _between(value, 0.0, _MOST_ERROR):
            raise refused(f"errors.{name}", value, f"a number from 0 to {_MOST_ERROR:g}")


def is_name(value: object) -> bool:
    """Whether a value is a text that can be shown as it is."""
    return isinstance(value, str) and 0 < len(value) <= _MOST_NAME and value.isprintable()


def _broken(name: str, kind: object, value: object) -> str | None:
    """The rule that a value breaks, None if it is all right."""
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind in (int, int | None):  # what a section may lack is not given as none
        most = _WHOLE.get(name, _MOST_WHOLE)
        return None if _whole(value, most) else f"a whole number from 1 to {most}"
    if kind is float:
        return _broken_number(name, value)
    if kind is str:
        choices = _CHOICES.get(name, ())
        if choices:
            return None if value in choices else " or ".join(choices)
        return None if is_name(value) else f"a printable text of at most {_MOST_NAME} characters"
    return _broken_list(value, words=kind == tuple[str, ...])


def _broken_list(value: object, *, words: bool) -> str | None:
    items = value if isinstance(value, tuple) else ()
    whole = 0 < len(items) <= _MOST_ITEMS
    if words:
        return None if whole and all(map(is_name, items)) else "a list of texts"
    right = whole and all(_whole(item, _MOST_WHOLE) for item in items)
    return None if right else f"a list of whole numbers from 1 to {_MOST_WHOLE}"


def _broken_number(name: str, value: object) -> str | None:
    low, high = next((low, high) for ends, low, high in _BOUNDS if name.endswith(ends))
    return None if _between(value, low, high) else f"a number from {low:g} to {high:g}"


def _between(value: object, low: float, high: float) -> bool:
    """Whether a value is a number within bounds; a whole one may be too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return low <= value <= high and math.isfinite(value)


def _whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
