"""Read what people name, if it is a file; write a file whole or not at all.

Plans, clusters and suites are read here, block tables by `patterns.files`, which this uses. Files
are written whole whoever reads them and whenever this process is stopped.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from patterns.files import read_regular


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8.

    Raises:
        OSError: It cannot be read, is no regular file, or too large; see `read_regular`.
        ValueError: The file is not UTF-8.
    """
    return read_regular(path).decode()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write bytes, or text as UTF-8, under another name in the same folder, then rename it.

    A link stays one, and the file behind it is written; a device or a pipe is written to as it is.
    A file that was there keeps its mode.

    Raises:
        OSError: It cannot be written there; no part of it is left.
    """
    data = content.encode() if isinstance(content, str) else content
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)  # a file in the place of /dev/null would be a surprise to all
        return
    try:
        _replace(path, data)
    except OSError as error:
        error.filename = str(path)  # the draft's name, or none, says nothing to a user
        raise


def _replace(path: Path, data: bytes) -> None:
    """Write a draft beside the file, with the mode that the file has, and rename it."""
    draft = path.with_name(f".{path.name}.part")
    with os.fdopen(_begun(draft), "wb") as file:
        try:
            with suppress(FileNotFoundError):  # a new file has the mode that the umask leaves
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
            file.flush()
            draft.replace(path)
        except BaseException:  # also Ctrl-C: leave no part behind
            with suppress(OSError):
                draft.unlink()
            raise


def _begun(draft: Path) -> int:
    """Make a draft that no other process writes; what one that was killed has left is removed."""
    while True:
        try:
            own = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            _remove_left(draft)
            continue
        _lock(own)
        if _is_at(own, draft):  # else another took it for one that was left
            return own
        os.close(own)


def _remove_left(draft: Path) -> None:
    """Wait until no process writes a draft, and remove it if it is still there then."""
    try:
        left = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        _lock(left)
        if _is_at(left, draft):
            draft.unlink(missing_ok=True)
    finally:
        os.close(left)


def _lock(handle: int) -> None:
    with suppress(OSError):  # some file systems have no locks
        fcntl.flock(handle, fcntl.LOCK_EX)


def _is_at(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat(follow_symlinks=False))
    return False
