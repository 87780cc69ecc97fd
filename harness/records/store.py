"""Results on disk: one JSON record a line, appended whole or not at all.

A file belongs to one writer at a time. Records are one write of whole lines, flushed to the disk
before the work goes on. A kill or a full disk may tear the last line: then it has no end, and it is
cut off when the next record is written. A file with anything else in it is somebody else's, and is
refused as it is.
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
            ends = [end for _, end in _lines(path)]
            self.count, self._whole = len(ends), max(ends, default=0)
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
            MeasurementError: The disk is full or fails, and the file is as it was before; or the
                file is gone.
            ValueError: A number is NaN or infinite; nothing is written.
        """
        lines = "".join(json_text(record) + "\n" for record in records).encode()
        self.confirm()
        size = self._mended()
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
        self._whole = size + len(lines)

    def confirm(self) -> None:
        """See that the file is still the one that records were written to.

        Raises:
            MeasurementError: It was removed, or another was put in its place.
        """
        own = os.fstat(self._file)
        try:
            there = self.path.stat()
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino):
            raise MeasurementError(
                f"{self.path} was removed or replaced while it was written to; its {self.count} "
                "records are lost: run again, and leave the file alone"
            )

    def _mended(self) -> int:
        """Cut off a torn last line, or end one that only lacks its end; return the size."""
        if os.fstat(self._file).st_size > self._whole:
            os.ftruncate(self._file, self._whole)
        if self._whole and os.pread(self._file, 1, self._whole - 1) != b"\n":
            _write_whole(self._file, b"\n")
            self._whole += 1
        return self._whole

    def scan(self) -> Iterator[JsonObject]:
        """Read what is there, one record at a time."""
        return _scan(self.path)


def records_file(path: Path) -> Path:
    """The file of the records of a folder of results, or the file itself."""
    return path / FILE if path.is_dir() else path


def read_records(path: Path) -> list[JsonObject]:
    """Read the records of a folder or of a file; a torn last line is left out.

    Raises:
        ValueError: There are none, or a line in the middle is no record.
    """
    file = records_file(path)
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


def _scan(path: Path) -> Iterator[JsonObject]:
    for record, _ in _lines(path):
        yield record


def _lines(path: Path) -> Iterator[tuple[JsonObject, int]]:
    """Yield each record and where it ends; a torn last line is left out."""
    end = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            record = _record(line)
            if record is not None:
                yield record, end
            elif line.endswith(b"\n") or not line.startswith(b"{"):
                raise ValueError(
                    f"results ({path}): line {number} is not a JSON record; remove that line, or "
                    "name other results"
                )


def _record(line: bytes) -> JsonObject | None:
    try:
        record = json.loads(line)  # a NaN in it is judged with the fields; the line is whole
    except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested beyond reading
        return None
    return record if isinstance(record, dict) else None
