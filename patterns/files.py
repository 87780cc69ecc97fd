"""Files that people name: regular ones, and none larger than any table or plan can be."""

import errno
import os
import stat
from pathlib import Path

MOST_FILE_BYTES = 2**28
"""The largest file that is read whole: the plans of 1024 ranks take less."""


def read_regular(path: Path) -> bytes:
    """Read a regular file. A device, a pipe or a socket is refused before a byte of it is read.

    Raises:
        OSError: The file is missing, not regular, too large, or unreadable; the message says which.
    """
    # Without O_NONBLOCK a pipe that nobody writes to would be waited for.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if status.st_size <= MOST_FILE_BYTES:
            content = file.read(MOST_FILE_BYTES + 1)  # it may grow, and some files have no size
            if len(content) <= MOST_FILE_BYTES:
                return content
    raise OSError(errno.EFBIG, f"it is larger than {MOST_FILE_BYTES // 2**20} MiB", str(path))
