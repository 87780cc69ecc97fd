"""Read what people name, if it is a file; write a file whole or not at all.

Plans, clusters and suites are read here, block tables by `patterns.files`, which this uses. Files
are written whole whoever reads them and whenever this process is stopped.
"""

import os
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from patterns.files import read_regular


def read_text(path: Path) -> str:
    """Read a regular file of UTF-8.

    Raises:
        OSError: It cannot be read, is no regular file, or too large; see `read_regular`.
        ValueError: It is no UTF-8.
    """
    return read_regular(path).decode()


def parsed_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: It is none, or nested deeper than Python can follow.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write bytes, or text as UTF-8, under another name in the same folder, then rename it.

    A link stays one, and the file behind it is written; a device or a pipe is written to as it is.

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
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).chmod(0o644)  # mkstemp's own mode is for secrets
        Path(name).replace(path)
    except BaseException:  # also Ctrl-C: leave no part behind
        with suppress(OSError):
            Path(name).unlink()
        raise
