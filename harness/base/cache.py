"""Where what took long to make is kept between runs, what makes it stale, and how much it may be.

A file is a line with a checksum, followed by the stored value:

    6b51d431df5d7f14...     SHA-256 of the name of the file and its folder, and of all that follows
    {"forward": ...}

So a file that was edited, cut or put in the place of another is not read, and reading costs no
proof of what it holds. It guards against mistakes, not against who can write a checksum too.
"""

import hashlib
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from harness.base.files import write_whole
from harness.base.remembered import mib
from patterns.files import read_regular

T = TypeVar("T")

CACHE_VARIABLE, DEFAULT_CACHE_MIB = "CPBENCH_CACHE_MIB", 1024
_STATES = 2
"""Number of code versions that keep their cache entries; older entries are deleted."""
_MARK = re.compile(rb"[0-9a-f]{64}\n")
_MARK_BYTES = 65


def cache_folder() -> Path:
    """Return the folder of everything that is kept: CPBENCH_CACHE, or one in the user's cache.

    Where there is neither, it is a place that takes no files: nothing is kept.
    """
    own = os.environ.get("CPBENCH_CACHE")
    if own:
        # A shell leaves ~nobody as it is, and so does this; Path's own raises.
        return Path(os.path.expanduser(own))  # noqa: PTH111
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(given or Path.home() / ".cache") / "cpbench"
    except RuntimeError:  # a user without a home and without a name, as in a container
        return Path(os.devnull) / "cpbench"


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
    # Looking at all files takes milliseconds; names are hashes, so one write in sixteen does.
    root = cache_folder()
    if path.name.startswith("0") and path.is_relative_to(root):
        trim(root, limit_bytes())


def limit_bytes() -> int:
    """Return how much the whole folder may hold: CPBENCH_CACHE_MIB, 1024 MiB by default.

    Raises:
        ValueError: The variable is not a whole number of MiB.
    """
    return mib(CACHE_VARIABLE, DEFAULT_CACHE_MIB)


def kept_files(folder: Path) -> list[tuple[float, int, Path]]:
    """List what looks like kept files below a folder: when each was last used, bytes, path."""
    found = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process may have removed it
            facts = path.lstat()  # a link is somebody's own
            if stat.S_ISREG(facts.st_mode) and _marked(path):
                found.append((facts.st_mtime, facts.st_size, path))
    return sorted(found)


def _marked(path: Path) -> bool:
    """Whether a file begins as kept ones do."""
    with path.open("rb") as file:
        return _MARK.fullmatch(file.read(_MARK_BYTES)) is not None


def trim(folder: Path, limit: int) -> None:
    """Remove kept files, those used longest ago first, until an eighth of the limit is free.

    Nothing is removed where they are within the limit, nor a file that `write_kept` did not write.
    """
    files = kept_files(folder)
    total = sum(size for _, size, _ in files)
    if total <= limit:
        return
    for _, size, path in files:
        if total <= limit - limit // 8:
            return
        with suppress(OSError):
            if read_kept(path, lambda _: True):
                path.unlink()
                total -= size


def read_kept(path: Path, read: Callable[[bytes], T]) -> T | None:
    """Read what `write_kept` wrote at this very place; None if it is nothing else, or not read.

    Args:
        path: The file.
        read: Turns the stored value into the wanted one.
    """
    try:
        checksum, _, content = read_regular(path).partition(b"\n")
        if checksum != _checksum(path, content):
            return None
        with suppress(OSError):  # a folder that is only read
            os.utime(path)
        return read(content)
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
    """Drop what all but the newest states of the code have kept, and nothing else."""
    states = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    for state in sorted(states, key=lambda path: path.stat().st_mtime, reverse=True)[_STATES:]:
        for path in state.iterdir():
            if _removable(path):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # somebody else's file is in it
            state.rmdir()


def _removable(path: Path) -> bool:
    """Whether a file is one that `write_kept` wrote, or a draft that it left when it was killed."""
    if path.is_symlink() or not path.is_file():
        return False
    return (path.name.startswith(".") and path.name.endswith(".part")) or _marked(path)
