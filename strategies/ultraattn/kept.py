"""A folder of whole plans, so that a problem is planned once, whichever process asks first.

Plans are found by a hash of everything that decides them, this project's own code included. While
one process plans, others that ask for the same plan wait for it: a search under a time limit ends
elsewhere in each process, and ranks that plan for themselves must come to the same plan. What
cannot be read is planned again, and where nothing can be written nothing is kept.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from harness.caching import cache_folder, code_hash
from harness.files import write_whole

T = TypeVar("T")
Kept = Mapping[str, Any]
"""What is kept of a plan, as JSON."""


def key_of(**what: object) -> str:
    """Return a hash of what decides a plan, and of the code; equal in every process."""
    text = json.dumps([_plain(what), code_hash()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: object) -> object:
    """Return a value as JSON, without the order of sets, which differs between processes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return sorted([str(key), _plain(each)] for key, each in value.items())
    if isinstance(value, Set):
        return sorted(map(repr, value))
    if isinstance(value, tuple | list):
        return list(map(_plain, value))
    return repr(value)


def kept(key: str, make: Callable[[], Kept], read: Callable[[Kept], T]) -> T:
    """Return what is kept under a key, read; make and keep it if there is nothing that can be.

    Args:
        key: See `key_of`.
        make: Makes it, in one process at a time.
        read: Turns it into what is wanted; what it cannot read is made again.
    """
    from filelock import FileLock, Timeout

    path = cache_folder() / "plans" / f"{key}.json"
    found = _read(path, key, read)
    if found is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
    except (OSError, NotImplementedError, Timeout):  # a folder that takes no files
        return read(make())
    try:
        found = _read(path, key, read)
        if found is not None:
            return found
        made = make()
        with suppress(OSError):  # a full disk
            write_whole(path, json.dumps({"key": key, "kept": made}))
        return read(made)
    finally:
        lock.release()
        with suppress(OSError):
            path.with_suffix(".lock").unlink()


def _read(path: Path, key: str, read: Callable[[Kept], T]) -> T | None:
    """Return what a file holds; None if it is none, another's, or not to be understood."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return read(found["kept"]) if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError):
        return None
