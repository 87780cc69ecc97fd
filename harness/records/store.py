"""Results on disk: one JSON record a line, appended whole or not at all.

A file belongs to one writer at a time. Records are one write of whole lines, flushed to the disk
before the work goes on; a line that a kill or a full disk tore is cut off when the file is next
opened, so the file is valid at every moment.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.base.json_fields import JsonObject, json_text
from harness.errors import MeasurementError

FILE = "records.jsonl"
_LOCK = ".lock"


class ResultFile:
    """A file of records, open for appending; use as a context manager.

    Args:
        path: Made if it is not there, with its folder, which nobody else may write to meanwhile.

    Raises:
        MeasurementError: Another process writes there.
        ValueError: It cannot be written, or a line in the middle is no record.
    """

    def __init__(self, path: Path) -> None:
        _refuse_device(path)
        self.path = path
        self._open: list[int] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._descriptor(path.parent / _LOCK, os.O_RDWR)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = self._descriptor(path, os.O_RDWR | os.O_APPEND)
            self.count = _repair(self._file, path)
        except BlockingIOError:
            self.close()
            raise MeasurementError(
                f"results ({path.parent}) are being written by another run; wait, or name another"
            ) from None
        except OSError as error:
            self.close()
            raise ValueError(
                f"results ({path}) cannot be written: {error.strerror}; name another place"
            ) from error
        except ValueError:
            self.close()
            raise

    def _descriptor(self, path: Path, flags: int) -> int:
        self._open.append(os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644))
        return self._open[-1]

    def __enter__(self) -> Self:
        """Return the file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let another writer in."""
        self.close()

    def close(self) -> None:
        """Let another writer in."""
        while self._open:
            os.close(self._open.pop())

    def append(self, *records: JsonObject) -> None:
        """Append records, all or none.

        Raises:
            MeasurementError: The disk is full or fails; the file is as it was before.
            ValueError: A number is NaN or infinite; nothing is written.
        """
        lines = "".join(json_text(record) + "\n" for record in records).encode()
        size = os.fstat(self._file).st_size
        try:
            _write_whole(self._file, lines)
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise MeasurementError(
                f"record not written to {self.path}: {error.strerror}; {self.count} records are "
                "safe, and the same command with --resume (or -o, for check) goes on from them"
            ) from error
        self.count += len(records)

    def scan(self) -> Iterator[JsonObject]:
        """Read what is there, one record at a time."""
        return _scan(self.path)


def read_records(path: Path) -> list[JsonObject]:
    """Read the records of a folder or of a file; a torn last line is left out.

    Raises:
        ValueError: There are none, or a line in the middle is no record.
    """
    file = path / FILE if path.is_dir() else path
    _refuse_device(file)
    if not file.exists():
        raise ValueError(f"results ({path}) has no {FILE}; run `sweep -o {path}` first")
    return list(_scan(file))


def _refuse_device(path: Path) -> None:
    """Refuse what is no file: a device or a pipe may be read without end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"results ({path}) must be in a regular file; name another place")


def _write_whole(file: int, lines: bytes) -> None:
    if os.write(file, lines) != len(lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _repair(file: int, path: Path) -> int:
    """Cut off a torn last line; return how many records there are."""
    good = count = 0
    for _, end in _lines(path):
        good, count = end, count + 1
    if good != os.fstat(file).st_size:
        os.ftruncate(file, good)
    return count


def _scan(path: Path) -> Iterator[JsonObject]:
    for record, _ in _lines(path):
        yield record


def _lines(path: Path) -> Iterator[tuple[JsonObject, int]]:
    """Yield each record and where it ends; a torn last line is left out."""
    end, size = 0, path.stat().st_size
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            record = _record(line)
            if record is None:
                if end >= size:
                    return
                raise ValueError(
                    f"results ({path}): line {number} is no JSON record; remove that line, or name "
                    "other results"
                )
            yield record, end


def _record(line: bytes) -> JsonObject | None:
    try:
        record = json.loads(line)  # a NaN in it is judged with the fields; the line is whole
    except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested beyond reading
        return None
    return record if isinstance(record, dict) and line.endswith(b"\n") else None
