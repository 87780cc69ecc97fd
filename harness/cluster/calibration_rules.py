"""What the values of a calibration must be: a file may come from anywhere, and a NaN from a fit.

A value that breaks its rule would not stop a prediction: it would make it silently wrong, or search
without end.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

_POSITIVE = ("_per_s", "alone", "split_efficiency", "causal", "share", "share_beside", "uneven")
"""Ends of the names of what is divided by, or times all of a time."""
_SIGNED = ("delta_passes",)
"""A fitted correction of either sign."""
_CHOICES = {"device": ("cuda", "cpu")}


def judge(section: str, kind: type, values: Mapping[str, object]) -> None:
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
            raise ValueError(f"{section}.{field.name} ({value}) must be {rule}")


def judge_errors(values: Mapping[str, object]) -> None:
    """Refuse shares of error that are none.

    Raises:
        ValueError: As `judge`.
    """
    for name, value in values.items():
        if not _number(value) or cast("float", value) < 0:
            raise ValueError(f"errors.{name} ({value}) must be a number of at least 0")


def _broken(name: str, kind: object, value: object) -> str | None:
    """The rule that a value breaks, None if it is all right."""
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind in (int, int | None):  # what a section may lack is not given as none
        return None if _whole(value) else "a whole number of at least 1"
    if kind is float:
        return _broken_number(name, value)
    if kind is str:
        choices = _CHOICES.get(name, ())
        if choices:
            return None if value in choices else " or ".join(choices)
        return None if isinstance(value, str) and value else "a text"
    words = kind == tuple[str, ...]
    items = value if isinstance(value, tuple) else ()
    if not items or not all(isinstance(v, str) if words else _whole(v) for v in items):
        return "a list of texts" if words else "a list of whole numbers of at least 1"
    return None


def _broken_number(name: str, value: object) -> str | None:
    if name in _SIGNED:
        return None if _number(value) else "a finite number"
    if name.endswith(_POSITIVE):
        return None if _number(value) and cast("float", value) > 0 else "a positive number"
    return None if _number(value) and cast("float", value) >= 0 else "a number of at least 0"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
