"""Files that a verb writes: each its own, none over what the verb reads, whole or not at all."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from harness.base.files import write_whole


def require_apart(written: Mapping[str, Path | None], read: Iterable[Path] = ()) -> None:
    """Refuse to write over what is read, and to write two files under one name.

    Devices and pipes, such as /dev/null, take as much as is written to them.

    Args:
        written: Files by their flags; None is not asked for.
        read: Files that the verb takes its input from.

    Raises:
        ValueError: Two are the same file; it names the flag and says what to do.
    """
    owners = {os.path.realpath(path): "is read" for path in read}
    for flag, path in written.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        place = os.path.realpath(path)
        if place in owners:
            raise ValueError(f"{flag} ({path}) {owners[place]}, too; name another file to write")
        owners[place] = f"is what {flag} writes"


def write_target(flag: str, path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Args:
        flag: The flag that names the file.
        path: The file.
        text: All of it.

    Raises:
        ValueError: It cannot be written there.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise ValueError(
            f"{flag} ({path}) must be a file that can be written: {error.strerror}"
        ) from None
