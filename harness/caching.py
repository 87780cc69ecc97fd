"""Where what took long to make is kept between runs, and what makes it stale."""

import hashlib
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from harness.files import write_whole

_STATES = 2
"""Of so many states of the code what they made is kept."""


def cache_folder() -> Path:
    """Return the folder of everything that is kept: CPBENCH_CACHE, or one in the user's cache."""
    own = os.environ.get("CPBENCH_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cpbench"


@cache
def code_hash() -> str:
    """Return a hash of all code here: what other code has made is not read."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in ("harness", "patterns", "strategies"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kept_by_this_code(folder: Path, name: str) -> bytes | None:
    """Read what this very code has kept in a folder under a name; None if nothing is there."""
    try:
        return (folder / code_hash() / name).read_bytes()
    except OSError:
        return None


def keep(folder: Path, name: str, content: bytes) -> None:
    """Keep something, whole or not at all, for this very code; a full disk is no failure."""
    path = folder / code_hash() / name
    with suppress(OSError):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _forget(folder)
        write_whole(path, content)


def _forget(folder: Path) -> None:
    """Drop what all but the newest states of the code have kept."""
    states = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for state in states[_STATES:]:
        for path in state.iterdir():
            path.unlink(missing_ok=True)
        state.rmdir()
