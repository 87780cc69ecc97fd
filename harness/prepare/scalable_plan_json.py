"""A structure as JSON and back: what repeats is written once, and parts are columns of numbers.

    {"plan_hash": "...", ..., "needs": [["tile", [[512, 512, 8, true, 1.0]], ...], ...],
     "hosts": [[1, 0, ...], ...], "rows": [[], [0], [1], [8, 17], ...],
     "parts": {"queues": [1, 1, 3, ...], "need": [0, 1, 0, ...], ...}}

`needs` and `hosts` are tables of `Need` and `Launched`, and `rows` is one of lists of numbers: a
column of `parts` says which line each part has. What a part waits for is written as how many parts
earlier that is, so that these lists repeat too.

Nothing that is read is trusted: other types, columns of other lengths, lines that no table has and
parts that wait for no earlier one are refused. gzip's checksum finds what was damaged otherwise:
it is a CRC, which no short run of wrong bits gets past, as it may past zlib's Adler-32.
"""

import gzip
import json
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, TypeVar, get_origin

from harness.base.json_fields import json_text
from harness.prepare.scalable_plan import Structure
from harness.simulate.jobs import LaunchCounts, Need, NeedKind, Size, Skeleton, UntimedJob
from harness.simulate.tile_calls import TimedCall

T = TypeVar("T", TimedCall, Size, Need, LaunchCounts)
K = TypeVar("K", bound=Hashable)

_LEVEL = 1  # of gzip: the fastest
_AS_THEY_ARE = ("queues", "ranks", "peers")
_EARLIER = ("after", "latest", "gates")
_FIELDS = {
    kind: tuple(get_origin(of) or of for of in kind.__annotations__.values())
    for kind in (TimedCall, Size, Need, LaunchCounts)
}
"""The types of their fields, but not of what these hold."""


def text_of(structure: Structure) -> bytes:
    """Write a structure as compressed JSON, see above."""
    shape = structure.shape
    needs: dict[Need, int] = {}
    hosts: dict[LaunchCounts, int] = {}
    rows: dict[tuple[int, ...], int] = {}
    parts: dict[str, list[int]] = {name: [] for name in UntimedJob._fields}
    for index, part in enumerate(shape.parts):
        for name in _AS_THEY_ARE:
            parts[name].append(_line(rows, getattr(part, name)))
        for name in _EARLIER:
            back = tuple([index - earlier for earlier in getattr(part, name)])
            parts[name].append(_line(rows, back))
        launched = tuple([_line(hosts, counts) for counts in part.launched])
        parts["launched"].append(_line(rows, launched))
        parts["need"].append(_line(needs, part.need))
        parts["task"].append(part.task)
    text = {
        **{name: getattr(structure, name) for name in _plain(Structure)},
        **{name: getattr(shape, name) for name in _plain(Skeleton)},
        "link_bytes": dict(structure.link_bytes),
        "alike": list(shape.alike.items()),
        "needs": list(needs),
        "hosts": list(hosts),
        "rows": list(rows),
        "parts": parts,
    }
    return gzip.compress(json_text(text, compact=True).encode(), _LEVEL, mtime=0)


def structure_from(content: bytes) -> Structure | None:
    """Read what `text_of` wrote, number by number the same; None if it is no such text."""
    try:
        return _structure(json.loads(gzip.decompress(content)))
    except (OSError, EOFError, zlib.error):  # no gzip, cut off, or damaged
        return None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None


def _line(table: dict[K, int], value: K) -> int:
    """The line of a value in a table, at its end if it is new."""
    return table.setdefault(value, len(table))


def _plain(kind: type[Structure] | type[Skeleton]) -> dict[str, type]:
    """Fields that JSON has a word for, with their types."""
    simple = {str: str, int: int, float: float, bool: bool}
    return {field.name: simple[field.type] for field in fields(kind) if field.type in simple}


def _structure(text: dict[str, Any]) -> Structure:
    made, shaped = (
        {name: _one(text[name], kind) for name, kind in _plain(owner).items()}
        for owner in (Structure, Skeleton)
    )
    alike = {_one(rank, int): _one(count, int) for rank, count in _one(text["alike"], list)}
    links = {name: _one(size, int) for name, size in _one(text["link_bytes"], dict).items()}
    shape = Skeleton(parts=_parts(text), alike=alike, **shaped)
    return Structure(shape=shape, link_bytes=links, **made)


def _parts(text: dict[str, Any]) -> tuple[UntimedJob, ...]:
    needs = [_need(line) for line in text["needs"]]
    hosts = [_exact(LaunchCounts._make(line)) for line in text["hosts"]]
    rows = _rows(text["rows"])
    columns: dict[str, Iterable[Any]] = dict(text["parts"])
    for column in columns.values():
        _numbers(_one(column, list))
    for name in _AS_THEY_ARE:
        columns[name] = map(rows.__getitem__, text["parts"][name])
    for name in _EARLIER:
        columns[name] = _earlier([rows[line] for line in text["parts"][name]])
    columns["need"] = map(needs.__getitem__, text["parts"]["need"])
    launched = text["parts"]["launched"]
    known = {line: tuple([hosts[host] for host in rows[line]]) for line in set(launched)}
    columns["launched"] = map(known.__getitem__, launched)
    ordered = [columns[name] for name in UntimedJob._fields]
    return tuple(map(UntimedJob._make, zip(*ordered, strict=True)))


def _need(line: list[Any]) -> Need:
    values = dict(zip(Need._fields, line, strict=True))
    values["kind"] = NeedKind(values["kind"])
    values["calls"] = tuple([_exact(TimedCall._make(call)) for call in _one(values["calls"], list)])
    for name in ("size", "far_size"):
        values[name] = _exact(Size._make(values[name]))
    return _exact(Need(**values))


def _rows(lists: list[list[int]]) -> list[tuple[int, ...]]:
    if set(map(type, lists)) - {list}:
        raise TypeError("rows must be lists")
    _numbers(list(chain.from_iterable(lists)))
    return list(map(tuple, lists))


def _earlier(backs: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Per part, the numbers of the parts that are so many parts earlier."""
    found = [
        tuple([index - back for back in row]) if row else row for index, row in enumerate(backs)
    ]
    if 0 in chain.from_iterable(backs) or min(chain.from_iterable(found), default=0) < 0:
        raise ValueError("a part must wait for earlier parts")
    return found


def _numbers(values: list[int]) -> None:
    """Refuse all but whole numbers from 0."""
    if set(map(type, values)) - {int} or min(values, default=0) < 0:
        raise TypeError("numbers must be whole and not negative")


def _exact(value: T) -> T:
    """Refuse a value with a field of another type than its class says."""
    if tuple(map(type, value)) != _FIELDS[type(value)]:
        raise TypeError(f"{value} must have fields of the types {_FIELDS[type(value)]}")
    return value


def _one(value: Any, kind: type) -> Any:  # noqa: ANN401  # what JSON had there
    if type(value) is not kind:
        raise TypeError(f"{value!r} must have the type {kind}")
    return value
