"""Values from JSON, checked by type: an error names the field, the value and the rule.

A field inside another is named by the way to it, as in `tasks[3].reads[1].heads`.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
JsonObject = Mapping[str, object]
"""A JSON object: read and not judged yet, or about to be written."""

_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "an object",
    NoneType: "null",
}


def refused(name: str, value: object, rule: str) -> ValueError:
    """Return the error of a field; long values are cut."""
    return ValueError(f"{name} ({reprlib.repr(value)}) must be {rule}")


def parsed(text: str | bytes) -> Any:  # noqa: ANN401  # whatever JSON has
    """Parse JSON.

    Raises:
        ValueError: It is invalid, has a NaN or an infinity, or is nested deeper than Python can
            follow.
    """
    try:
        return json.loads(text, parse_constant=_not_finite)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply to be read") from None


def _not_finite(token: str) -> NoReturn:
    raise ValueError(f"{token} is not a number in JSON")


def json_text(
    value: object, *, indent: int | None = None, compact: bool = False, sort_keys: bool = False
) -> str:
    """Write JSON that every reader takes: in ASCII, without NaN and infinities.

    Args:
        value: Objects, lists, texts, numbers, truths and nulls.
        indent: Columns by which each level is indented; None writes one line.
        compact: Without spaces, for hashes and caches.
        sort_keys: In the order of the names, so that equal values give equal text.

    Raises:
        ValueError: A number is NaN or infinite.
    """
    separators = (",", ":") if compact else None
    return json.dumps(
        value, allow_nan=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


def typed(name: str, value: object, *kinds: type) -> Any:  # noqa: ANN401  # one of the kinds
    """Return a value of one of some types; true is not 1, but a whole number is a number.

    Raises:
        ValueError: The value has another type.
    """
    if type(value) in kinds or (type(value) is int and float in kinds):
        return value
    words = dict.fromkeys(_WORDS[kind] for kind in kinds)
    raise refused(name, value, " or ".join(words))


def whole(name: str, value: object, least: int) -> int:
    """Return a whole number.

    Raises:
        ValueError: The value is not a whole number, or less than `least`.
    """
    if type(value) is not int or value < least:
        raise refused(name, value, f"a whole number of at least {least}")
    return value


def wholes(name: str, value: object) -> tuple[int, ...]:
    """Return a list of whole numbers from 0.

    Raises:
        ValueError: The value is not such a list.
    """
    if type(value) is not list or set(map(type, value)) - {int} or min(value, default=0) < 0:
        raise refused(name, value, "a list of whole numbers of at least 0")
    return tuple(value)


def one_of(name: str, value: object, kind: type[E]) -> E:
    """Return the member of an enumeration.

    Raises:
        ValueError: The value is not a member; the choices are listed.
    """
    found: E | None = _members(kind).get(value) if type(value) is str else None
    if found is None:
        raise refused(name, value, f"one of {', '.join(kind)}")
    return found


@cache
def _members(kind: type[E]) -> Mapping[str, E]:
    """By value: to ask an enumeration itself is slow, and plans are long."""
    return {member.value: member for member in kind}


def row(name: str, value: object, columns: Sequence[str]) -> list[Any]:
    """Return a list with a value for each of some columns.

    Raises:
        ValueError: The value is not a list, or has another length.
    """
    if type(value) is not list or len(value) != len(columns):
        raise refused(name, value, f"a list of {', '.join(columns)}")
    return value


def each(name: str, value: object, read: Callable[[Any], T]) -> tuple[T, ...]:
    """Read each entry of a list.

    Raises:
        ValueError: The value is not a list, or `read` refuses an entry.
    """
    found: list[T] = []
    try:
        found.extend(map(read, typed(name, value, list)))
    except ValueError as error:
        raise ValueError(f"{name}[{len(found)}].{error}") from None
    return tuple(found)


def of_fields(
    name: str, value: object, kinds: Mapping[str, tuple[type, ...]], optional: set[str]
) -> dict[str, Any]:
    """Return an object that has some fields, each of one of its types, and no others.

    Raises:
        ValueError: The value is not an object, lacks a field, or has an unknown one.
    """
    found: dict[str, Any] = typed(name, value, dict)
    for field in found:
        if field not in kinds:
            raise refused(f"a field of {name}", field, f"one of {', '.join(kinds)}")
    for field in kinds:
        if field not in found and field not in optional:
            raise ValueError(f"{name} lacks {field}")
    return {field: typed(f"{name}.{field}", of, *kinds[field]) for field, of in found.items()}
