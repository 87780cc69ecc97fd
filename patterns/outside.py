"""Names from outside this project: `package.module:NAME`, or what an installed package registers.

A name of ours goes before one that is registered, and that before a path. Nothing is imported
before it is asked for.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

STRATEGY_GROUP = "cpbench.strategies"
PATTERN_GROUP = "cpbench.patterns"
"""The groups of entry points under which installed packages register theirs."""

T = TypeVar("T")
_PATH = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)(?::(.*))?", re.DOTALL | re.ASCII)


def split_name(text: str, known: Mapping[str, object], group: str) -> tuple[str, str]:
    """Split what was typed into a name and what follows its colon.

    Args:
        text: Such as `usp:4x2`, `mypkg.myring:STRATEGY` or `mypkg.myring:STRATEGY:hops=2`.
        known: Names of ours.
        group: Entry points that count as names.
    """
    name, _, rest = text.partition(":")
    if name in known or name in registered(group):
        return name, rest
    path = _PATH.fullmatch(text)
    return (name, rest) if path is None else (f"{path[1]}:{path[2]}", path[3] or "")


@cache
def registered(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points that installed packages register in a group; imports nothing."""
    return {point.name: point for point in entry_points(group=group)}


def find(name: str, group: str, kind: type[T]) -> T | None:
    """Import what a name from outside stands for; None if it is no such name.

    Args:
        name: As `split_name` gave it.
        group: Entry points that count as names.
        kind: The expected type.

    Raises:
        ValueError: It cannot be imported, is not there, or is something else; says only what.
    """
    path = _path_of(name, group)
    if path is None:
        return None
    module, _, attribute = path.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        said = " ".join(str(error).split())
        raise ValueError(f"cannot be imported ({type(error).__name__}: {said})") from error
    if isinstance(found, kind):
        return found
    raise ValueError(f"must be a {kind.__name__}, but is a {type(found).__name__}")


def ways_out(known: Mapping[str, object], group: str) -> str:
    """Text that lists the alternatives to a name that cannot be used."""
    names = ", ".join([*known, *(name for name in registered(group) if name not in known)])
    return (
        f"choose from {names}, or name one of a package whose folder is on PYTHONPATH: "
        "package.module:NAME"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` with the most similar known name; empty if none is similar."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def sources(name: str, group: str) -> list[Path]:
    """Return the source files of the package that a name from outside comes from.

    Returns:
        All Python files of its top-level package, or its one module; empty if it has no files.
    """
    path = _path_of(name, group)
    if path is None:
        return []
    try:
        spec = find_spec(path.partition(":")[0].partition(".")[0])
    except (ImportError, ValueError):
        return []
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if folders:
        return sorted(found for folder in folders for found in Path(folder).rglob("*.py"))
    return [] if spec is None or spec.origin is None else [Path(spec.origin)]


def _path_of(name: str, group: str) -> str | None:
    point = registered(group).get(name)
    if point is not None:
        return point.value
    return name if _PATH.fullmatch(name) else None
