"""Values as bytes, by their declared types: nothing that is read here can run code.

A message is a JSON text with the raw bytes of its tensors behind it:

    8 bytes   length of the JSON text, big endian
    JSON      {"value": ..., "blobs": [["float32", [2, 3, 5]], ["bytes", [17]], ...]}
    blobs     one after another, as they lie in memory

The reader states the expected type, and a value of another is refused. Types are those of jobs'
annotations: None, bool, int, float, str, bytes, enumerations, dataclasses, named tuples, tuples,
lists, mappings, unions of such, and `torch.Tensor`.
"""

import inspect
import math
import reprlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, StrEnum, auto
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from harness.base.json_fields import json_text, one_of, parsed, refused, typed, whole
from harness.base.pipe import MOST_BYTES

if TYPE_CHECKING:
    import torch

_MOST_TEXT = 2**28
_LENGTH = struct.Struct(">Q")
_DTYPES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2},
    **{"int64": 8, "int32": 4, "uint8": 1, "bool": 1},
}
"""Names of torch's, and bytes of an element."""
_BYTES = "bytes"
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

_Blob = tuple[str, list[int], bytes | memoryview]
"""A dtype's name or `bytes`, the shape, and the content."""


def pack(kind: object, value: object) -> bytes:
    """Write a value of a declared type.

    Raises:
        TypeError: The value has another type, or one that cannot be sent.
    """
    blobs: list[_Blob] = []
    body = {"value": _put(kind, value, blobs), "blobs": [blob[:2] for blob in blobs]}
    text = json_text(body).encode()
    return b"".join((_LENGTH.pack(len(text)), text, *(content for _, _, content in blobs)))


def unpack(kind: object, data: bytes) -> Any:  # noqa: ANN401  # of the kind
    """Read a value of a declared type.

    Raises:
        ValueError: The bytes are no such value.
    """
    try:
        start = _LENGTH.size + _text_bytes(data)
        body = parsed(data[_LENGTH.size : start])
        return _get(kind, body["value"], _cut(body["blobs"], memoryview(data)[start:]))
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise ValueError(f"message is broken: {type(error).__name__}: {error}") from None


def pack_call(
    job: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """Write the arguments of a job but its first, the `Member`.

    Raises:
        TypeError: They do not fit its signature.
    """
    bound = inspect.signature(job).bind(None, *args, **kwargs)
    bound.apply_defaults()
    return pack(_call_type(job), tuple(bound.arguments.values())[1:])


def unpack_call(job: Callable[..., object], data: bytes) -> dict[str, Any]:
    """Read what `pack_call` wrote, by parameter.

    Raises:
        ValueError: The bytes are no such arguments.
    """
    return dict(zip(_parameters(job), unpack(_call_type(job), data), strict=True))


def answer_type(job: Callable[..., object]) -> object:
    """Return type that a job declares."""
    return get_type_hints(job)["return"]


def _call_type(job: Callable[..., object]) -> object:
    hints = get_type_hints(job)
    return tuple.__class_getitem__(tuple(hints[name] for name in _parameters(job)))


def _parameters(job: Callable[..., object]) -> list[str]:
    return list(inspect.signature(job).parameters)[1:]


def _text_bytes(data: bytes) -> int:
    (size,) = _LENGTH.unpack_from(data)
    if size > min(len(data) - _LENGTH.size, _MOST_TEXT) or len(data) > MOST_BYTES:
        raise ValueError(f"a text of {size} bytes must lie within its {len(data)} bytes")
    return int(size)


def _cut(heads: Sequence[tuple[str, list[int]]], rest: memoryview) -> list[_Blob]:
    """Cut blobs out of what follows the text, by what it says of them."""
    found: list[_Blob] = []
    for name, shape in heads:
        if not all(type(n) is int and n >= 0 for n in shape):
            raise refused("shape", shape, "whole numbers from 0")
        size = math.prod(shape) * (1 if name == _BYTES else _DTYPES[name])
        if size > len(rest):
            raise refused(name, shape, f"no longer than the {len(rest)} bytes left")
        found.append((name, shape, rest[:size]))
        rest = rest[size:]
    if rest:
        raise ValueError(f"{len(rest)} bytes belong to nothing")
    return found


def _taken(number: object, blobs: Sequence[_Blob]) -> _Blob:
    if type(number) is not int or not 0 <= number < len(blobs):
        raise refused("blob", number, f"the number of one of {len(blobs)}")
    return blobs[number]


def _put_tensor(value: "torch.Tensor", blobs: list[_Blob]) -> int:
    import torch

    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"a tensor of {name} does not travel; those of {', '.join(_DTYPES)} do")
    flat = value.detach().cpu().contiguous().reshape(-1)
    blobs.append((name, list(value.shape), flat.view(torch.uint8).numpy().data))
    return len(blobs) - 1


def _get_tensor(number: object, blobs: Sequence[_Blob]) -> "torch.Tensor":
    import torch

    name, shape, content = _taken(number, blobs)
    if name == _BYTES:
        raise refused("blob", name, "a tensor")
    dtype = getattr(torch, name)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _put(kind: Any, value: Any, blobs: list[_Blob]) -> object:  # noqa: ANN401  # any of the types
    """The JSON form of a value; what is no JSON goes to the blobs."""
    form = _form(kind)
    if form is _Form.UNION:
        for number, choice in enumerate(get_args(kind)):
            if isinstance(value, _base(choice)):
                return [number, _put(choice, value, blobs)]
    if form is _Form.UNION or not isinstance(value, _base(kind)):
        raise TypeError(f"{reprlib.repr(value)} is no {kind}, and so cannot be sent")
    match form:
        case _Form.FIELDS:
            return [_put(of, getattr(value, name), blobs) for name, of in _fields(kind).items()]
        case _Form.MAPPING:
            of_key, of_value = get_args(kind)
            return [[_put(of_key, k, blobs), _put(of_value, v, blobs)] for k, v in value.items()]
        case _Form.LIST:
            kinds = _items(kind, value)
            return [_put(of, each, blobs) for of, each in zip(kinds, value, strict=True)]
        case _:
            return _put_leaf(form, value, blobs)


def _put_leaf(form: "_Form", value: Any, blobs: list[_Blob]) -> object:  # noqa: ANN401  # as above
    match form:
        case _Form.NUMBER:
            return float(value) if math.isfinite(value) else str(float(value))
        case _Form.BYTES:
            blobs.append((_BYTES, [len(value)], value))
            return len(blobs) - 1
        case _Form.TENSOR:
            return _put_tensor(value, blobs)
        case _Form.ENUM:
            return value.value
        case _:
            return value


def _get(kind: Any, raw: Any, blobs: Sequence[_Blob]) -> Any:  # noqa: ANN401  # as above
    """The value of a JSON form."""
    form = _form(kind)
    match form:
        case _Form.UNION:
            number, inner = typed("a choice", raw, list)
            return _get(get_args(kind)[whole("a choice", number, 0)], inner, blobs)
        case _Form.FIELDS:
            kinds = _fields(kind)
            found = zip(kinds.items(), typed(kind.__name__, raw, list), strict=True)
            return kind(**{name: _get(of, each, blobs) for (name, of), each in found})
        case _Form.MAPPING:
            of_key, of_value = get_args(kind)
            pairs = typed("pairs", raw, list)
            return {_get(of_key, k, blobs): _get(of_value, v, blobs) for k, v in pairs}
        case _Form.LIST:
            items = zip(_items(kind, typed("a list", raw, list)), raw, strict=True)
            return _base(kind)(_get(of, each, blobs) for of, each in items)
        case _:
            return _get_leaf(form, kind, raw, blobs)


def _get_leaf(form: "_Form", kind: Any, raw: Any, blobs: Sequence[_Blob]) -> Any:  # noqa: ANN401  # as above
    match form:
        case _Form.NUMBER:
            return _SPECIAL[raw] if type(raw) is str else float(typed("a number", raw, float))
        case _Form.BYTES:
            name, _, content = _taken(raw, blobs)
            if name != _BYTES:
                raise refused("blob", name, _BYTES)
            return bytes(content)
        case _Form.TENSOR:
            return _get_tensor(raw, blobs)
        case _Form.ENUM:
            return one_of(kind.__name__, raw, kind)
        case _:
            return typed("a value", raw, _base(kind))


class _Form(Enum):
    """How a type is written."""

    PLAIN = auto()
    NUMBER = auto()
    BYTES = auto()
    TENSOR = auto()
    ENUM = auto()
    FIELDS = auto()
    MAPPING = auto()
    LIST = auto()
    UNION = auto()


_FORMS: tuple[tuple[tuple[type, ...], _Form], ...] = (
    ((StrEnum,), _Form.ENUM),
    ((bool, int, str, NoneType), _Form.PLAIN),
    ((bytes,), _Form.BYTES),
    ((Mapping,), _Form.MAPPING),
    ((list,), _Form.LIST),
)
"""Classes and the writers of their values; the first that fits is used."""


@cache
def _form(kind: Any) -> _Form:  # noqa: ANN401  # a type, or what stands for one
    if get_origin(kind) in (Union, UnionType):
        return _Form.UNION
    if kind is float:
        return _Form.NUMBER
    base = _base(kind)
    for classes, form in _FORMS:
        if issubclass(base, classes):
            return form
    if is_dataclass(base) or hasattr(base, "_fields"):
        return _Form.FIELDS
    if issubclass(base, tuple):
        return _Form.LIST
    if (base.__module__, base.__name__) == ("torch", "Tensor"):
        return _Form.TENSOR
    raise TypeError(f"{kind} does not travel")


def _base(kind: Any) -> Any:  # noqa: ANN401  # as above
    """The class of a type."""
    base = get_origin(kind) or kind
    if base is None:
        return NoneType
    return float | int if base is float else base


@cache
def _fields(kind: Any) -> Mapping[str, object]:  # noqa: ANN401  # as above
    """Names and types of the fields of a dataclass or a named tuple."""
    hints = get_type_hints(kind)
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in fields(kind)]
    return {name: hints[name] for name in names}


def _items(kind: Any, value: Sequence[object]) -> Sequence[object]:  # noqa: ANN401  # as above
    """The type of each item of a list or tuple."""
    given = get_args(kind)
    if given[1:] == (Ellipsis,) or _base(kind) is list:
        return given[:1] * len(value)
    return given
