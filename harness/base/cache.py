"""Where what took long to make is kept between runs, and what makes it stale.

A file is a line with a checksum and, behind it, what is kept:

    6b51d431df5d7f14...     SHA-256 of the name of the file and its folder, and of all that follows
    {"forward": ...}

So a file that was edited, cut or put in the place of another is not read, and reading costs no
proof of what it holds. It guards against mistakes, not against who can write a checksum too.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from harness.base.files import write_whole
from patterns.files import read_regular

T = TypeVar("T")

_STATES = 2
"""Of so many states of the code what they made is kept."""


def cache_folder() -> Path:
    """Return the folder of everything that is kept: CPBENCH_CACHE, or one in the user's cache."""
    own = os.environ.get("CPBENCH_CACHE")
    if own:
        # A shell leaves ~nobody as it is, and so does this; Path's own raises.
        return Path(os.path.expanduser(own))  # noqa: PTH111
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpbench"


@cache
def code_hash() -> str:
    """Return a hash of all code here: what other code has made is not read."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in ("harness", "patterns", "strategies"):
        sources = sorted((root / package).rglob("*.py"))
        assert sources, f"no sources of {package} in {root}: stale plans would be served"
        for path in sources:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def write_kept(path: Path, content: bytes) -> None:
    """Write a file behind its checksum, whole or not at all.

    Raises:
        OSError: It cannot be written there; no part of it is left.
    """
    write_whole(path, _checksum(path, content) + b"\n" + content)


def read_kept(path: Path, read: Callable[[bytes], T]) -> T | None:
    """Read what `write_kept` wrote at this very place; None if it is nothing else, or not read.

    Args:
        path: The file.
        read: Turns what is kept into what is wanted.
    """
    try:
        checksum, _, content = read_regular(path).partition(b"\n")
        return read(content) if checksum == _checksum(path, content) else None
    except (
        *(OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError),
        *(ArithmeticError, RecursionError),
    ):
        return None


def _checksum(path: Path, content: bytes) -> bytes:
    """Of a file's content and place, but not of where the whole cache lies."""
    place = f"{path.parent.name}/{path.name}\n"
    return hashlib.sha256(place.encode() + content).hexdigest().encode()


def kept_by_this_code(folder: Path, name: str, read: Callable[[bytes], T | None]) -> T | None:
    """Read what this very code has kept in a folder under a name; None as for `read_kept`."""
    return read_kept(folder / code_hash() / name, read)


def keep(folder: Path, name: str, content: bytes) -> None:
    """Keep something, whole or not at all, for this very code; a full disk is no failure."""
    path = folder / code_hash() / name
    with suppress(OSError):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget(folder)
        write_kept(path, content)


def _forget(folder: Path) -> None:
    """Drop what all but the newest states of the code have kept."""
    states = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for state in states[_STATES:]:
        for path in state.iterdir():
            path.unlink(missing_ok=True)
        state.rmdir()
