"""Results on disk: one JSON record a line, appended whole or not at all.

A folder belongs to one writer at a time. A record is one write of one line, flushed to the disk
before the sweep goes on; a line that a kill or a full disk tore is cut off when the folder is next
opened, so the file is valid at every moment.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.errors import MeasurementError

FILE = "records.jsonl"
_LOCK = ".lock"

Record = Mapping[str, object]


class ResultFolder:
    """A folder of records, open for appending; use as a context manager.

    Args:
        folder: Made if it is not there.

    Raises:
        MeasurementError: Another process writes into it, or it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise MeasurementError(
                f"results folder ({folder}) cannot be written: {error.strerror}; name another"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise MeasurementError(
                f"results folder ({folder}) is in use by another sweep; wait, or name another"
            ) from None
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self.records = list(_repair(self._file, folder / FILE))

    def __enter__(self) -> Self:
        """Return the folder."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let another writer in."""
        os.close(self._file)
        os.close(self._lock)

    def append(self, record: Record) -> None:
        """Append one record.

        Raises:
            MeasurementError: The disk is full or fails; the file is as it was before.
        """
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        size = os.fstat(self._file).st_size
        try:
            _write_whole(self._file, line)
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise MeasurementError(
                f"record not written to {self.folder / FILE}: {error.strerror}; "
                f"{len(self.records)} records are safe, `--resume` goes on from them"
            ) from error
        self.records.append(record)


def _write_whole(file: int, line: bytes) -> None:
    if os.write(file, line) != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_records(path: Path) -> list[Record]:
    """Read the records of a folder or of a file; a torn last line is left out.

    Raises:
        ValueError: There are none, or a line in the middle is no record.
    """
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        raise ValueError(f"results ({path}) has no {FILE}; run `sweep -o {path}` first")
    return list(_parse(file.read_bytes(), file)[0])


def _repair(file: int, path: Path) -> Iterator[Record]:
    """Read what is there, and cut off a torn last line."""
    size = os.fstat(file).st_size
    data = os.pread(file, size, 0)
    records, good = _parse(data, path)
    if good != size:
        os.ftruncate(file, good)
    yield from records


def _parse(data: bytes, path: Path) -> tuple[list[Record], int]:
    """Records, and the length of the part that is whole."""
    records: list[Record] = []
    good = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        last = good + len(line) == len(data)
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError):
            record = None
        if not isinstance(record, dict) or not line.endswith(b"\n"):
            if last:
                break
            raise ValueError(f"{path}: line {number} is no record; move the file away")
        records.append(record)
        good += len(line)
    return records, good
