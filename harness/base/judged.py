"""Values judged by the types that a dataclass gives its fields.

`int`, `float`, `str`, `bool`, enumerations, `X | None`, `tuple[X, ...]`, `Mapping[str, X]` and
dataclasses of these are read by what they are. `Annotated[X, read]` is read by `read(name, value)`,
which returns the value or refuses it. Values may come from JSON or be typed already; an error names
the field, the value and the rule. No number is NaN or infinite.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from harness.base.json_fields import one_of, refused, typed
from harness.base.text import printable

FieldReader = Callable[[str, object], Any]
_LONGEST = 2**20
"""Characters of a name: patterns may list thousands of documents."""
_LARGEST = 2**63 - 1


@cache
def kinds(of: type) -> Mapping[str, object]:
    """The type of each field of a dataclass, with its annotations."""
    return get_type_hints(of, include_extras=True)


def judged(kind: object, name: str, value: object) -> Any:  # noqa: ANN401  # of that kind
    """Return a value as one of a type.

    Args:
        kind: The type of a field.
        name: Of the field, for errors.
        value: From JSON, or typed already.

    Raises:
        ValueError: The value has another type, or the reader of its type refuses it.
    """
    return _reader(kind)(name, value)


@cache
def _reader(kind: object) -> FieldReader:
    origin, options = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found: FieldReader = options[1]
        return found
    if origin in (Union, UnionType):
        (inner,) = (option for option in options if option is not NoneType)
        return _optional(_reader(inner))
    if origin is tuple:
        return _list_of(_reader(options[0]))
    if origin is Mapping:
        return _named(_reader(options[1]))
    assert isinstance(kind, type)  # no other kinds of types are in the dataclasses here
    if is_dataclass(kind):
        return lambda _, value: value if isinstance(value, kind) else kind(**fields_of(kind, value))
    return _member_of(kind) if issubclass(kind, StrEnum) else _PLAIN[kind]


def _optional(inner: FieldReader) -> FieldReader:
    return lambda name, value: None if value is None else inner(name, value)


def _list_of(inner: FieldReader) -> FieldReader:
    def read(name: str, value: object) -> tuple[object, ...]:
        found = typed(name, value, list, tuple)
        return tuple(inner(f"{name}[{at}]", each) for at, each in enumerate(found))

    return read


def _named(inner: FieldReader) -> FieldReader:
    def read(name: str, value: object) -> dict[str, object]:
        found = typed(name, value, dict).items()
        within = f"a name in {name}"
        return {label_of(within, key): inner(f"{name}.{key}", each) for key, each in found}

    return read


def _member_of(kind: type[StrEnum]) -> FieldReader:
    def read(name: str, value: object) -> StrEnum:
        return value if isinstance(value, kind) else one_of(name, value, kind)

    return read


def fields_of(kind: type, values: object) -> dict[str, Any]:
    """Judge the fields of a dataclass that are among some values; others keep their defaults.

    Raises:
        ValueError: A field has a wrong value; it is named.
    """
    found: dict[str, Any] = typed(kind.__name__, values, dict)
    return {
        name: judged(each, name, found[name]) for name, each in kinds(kind).items() if name in found
    }


def label_of(name: str, value: object) -> str:
    """Return a text that can stand in a line of output.

    Raises:
        ValueError: The value is not a text, is empty or very long, or has control characters.
    """
    text: str = typed(name, value, str)
    if not text or not text.isprintable() or len(text) > _LONGEST:
        raise refused(name, value, "a text of printable characters")
    return text


def prose(name: str, value: object) -> str:
    """Return any text, with control characters spelled out.

    Raises:
        ValueError: The value is not a text.
    """
    return printable(typed(name, value, str))


def counts(least: int) -> FieldReader:
    """A reader of whole numbers from `least` to 2^63 - 1."""

    def read(name: str, value: object) -> int:
        if type(value) is not int or not least <= value <= _LARGEST:
            raise refused(name, value, f"a whole number from {least} to {_LARGEST}")
        return value

    return read


def reals(least: float, most: float) -> FieldReader:
    """A reader of finite numbers within two bounds, as floats."""

    def read(name: str, value: object) -> float:
        number: int | float = typed(name, value, float)
        if least <= number <= most:  # false of NaN as well
            return float(number)
        raise refused(name, value, f"a number from {least:g} to {most:g}")

    return read


def facts(depth: int) -> FieldReader:
    """A reader of JSON objects of plain values, texts made printable.

    Args:
        depth: How many objects may stand in one another.
    """

    def read(name: str, value: object) -> dict[str, object]:
        found: dict[str, object] = typed(name, value, dict)
        return {
            label_of(f"a name in {name}", key): _fact(f"{name}.{key}", each, depth)
            for key, each in found.items()
        }

    return read


def _fact(name: str, value: object, depth: int) -> object:
    if isinstance(value, dict) and depth > 1:
        return facts(depth - 1)(name, value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int | float) and not abs(value) <= _LARGEST:  # true of NaN as well
        raise refused(name, value, f"a number from {-_LARGEST} to {_LARGEST}")
    return typed(name, value, bool, int, float, NoneType)


def _truth(name: str, value: object) -> bool:
    found: bool = typed(name, value, bool)
    return found


_PLAIN: Mapping[type, FieldReader] = {
    str: label_of,
    int: counts(0),
    float: reals(-1e300, 1e300),
    bool: _truth,
}


def missing(names: Iterable[str], values: Mapping[str, object]) -> str:
    """Say which names are not among some values; empty if all are."""
    absent = [name for name in names if name not in values]
    return f"lacks {', '.join(absent)}" if absent else ""
