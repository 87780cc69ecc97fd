"""A folder of whole plans, so that a problem is planned once, whichever process asks first.

Plans are found by a hash of everything that decides them, this project's own code included. While
one process plans, others that ask for the same plan wait for it: a search under a time limit ends
elsewhere in each process, and ranks that plan for themselves must come to the same plan. What
cannot be read or was edited is planned again, and where nothing can be written nothing is kept.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.base.cache import cache_folder, code_hash, read_kept, write_kept
from harness.base.json_fields import json_text
from harness.plan.residency import without_collection

if TYPE_CHECKING:
    from filelock import BaseFileLock

T = TypeVar("T")
Kept = Mapping[str, Any]
"""Stored form of a plan, as JSON."""

_LOG = logging.getLogger(__name__)
_SILENT_S = 2.0
"""So long a process waits for another one without a word."""


def plan_key(**what: object) -> str:
    """Return a hash of what decides a plan, and of the code; equal in every process."""
    text = json_text([_plain(what), code_hash()], sort_keys=True)
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


def kept(name: str, key: str, make: Callable[[], Kept], read: Callable[[Kept], T]) -> T:
    """Return the value stored under a key; make and store it if none can be read.

    Args:
        name: Of what is made, for messages.
        key: See `plan_key`.
        make: Makes it, in one process at a time.
        read: Turns it into what is wanted; what it cannot read is made again.
    """
    path = cache_folder() / "plans" / f"{key}.json"

    def find() -> T | None:
        with without_collection():
            return read_kept(path, lambda content: read(json.loads(content)))

    found = find()
    if found is not None:
        return found
    try:
        lock = _locked(name, path)
    except (OSError, NotImplementedError) as error:  # a folder that takes no files, or no locks
        made = make()
        _say_lost(name, path, error)
        return read(made)
    try:
        found = find()
        if found is not None:
            return found
        made = make()
        try:
            write_kept(path, json_text(made).encode())
        except OSError as error:  # a full disk
            _say_lost(name, path, error)
        else:
            _LOG.info("%s: plan stored in the cache", name)
        return read(made)
    finally:
        lock.release()
        with suppress(OSError):
            path.with_suffix(".lock").unlink()


def _locked(name: str, path: Path) -> "BaseFileLock":
    """Take the lock of a file to be made; says so if another process has it for long.

    Raises:
        OSError: There can be no file.
        NotImplementedError: The file system has no locks.
    """
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=_SILENT_S)
    except Timeout:
        _LOG.info("%s: waiting for another process with the same plan (%s)", name, lock.lock_file)
        lock.acquire()
    return lock


def _say_lost(name: str, path: Path, error: Exception) -> None:
    why = getattr(error, "strerror", None) or error
    text = "%s: the plan cannot be stored in %s (%s), so the next run searches again"
    _LOG.info(text, name, path.parent, why)
