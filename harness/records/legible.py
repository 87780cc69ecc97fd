"""Read records; name those that cannot be read, set them aside and go on with the others."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from harness.base.json_fields import JsonObject
from harness.base.text import one_line
from harness.records.cell import CellRecord
from harness.records.store import FILE, ResultFile, read_records

R = TypeVar("R")
Read = Callable[[JsonObject], R]
_NAMED = 5
"""Records set aside that are named one by one; the others are counted."""
_MOST_WHY = 300
"""Characters of a reason: it repeats the value, which may be a whole damaged file."""


class Aside(NamedTuple):
    """A record that was set aside."""

    number: int
    why: str


def one_by_one(lines: Iterable[JsonObject], read: Read[R], aside: list[Aside]) -> Iterator[R]:
    """Read records one at a time, for files that memory cannot hold.

    Args:
        lines: What was found.
        read: Reads one, or raises ValueError.
        aside: Receives the records that cannot be read.
    """
    for number, line in enumerate(lines, start=1):
        try:
            yield read(line)
        except ValueError as error:
            aside.append(Aside(number, one_line(str(error), _MOST_WHY)))


def told_unreadable(aside: Sequence[Aside], where: Path, found: int) -> list[str]:
    """Say which records were set aside, in lines for the user.

    Args:
        aside: Those.
        where: The file or folder.
        found: How many were read.

    Raises:
        ValueError: Some were set aside, and none was read.
    """
    if aside and not found:
        raise ValueError(
            f"results ({where}): record {aside[0].number} {aside[0].why}; none of {len(aside)} "
            "records can be read: name other results"
        )
    notes = [f"note: {where}: record {each.number} {each.why}; set aside" for each in aside]
    more = len(notes) - _NAMED
    return notes if more < 2 else [*notes[:_NAMED], f"note: {where}: {more} more set aside"]


def legible(lines: Iterable[JsonObject], where: Path, read: Read[R]) -> tuple[list[R], list[str]]:
    """Read records, and say which were set aside; see `told`.

    Args:
        lines: What was found.
        where: There.
        read: Reads one, or raises ValueError.

    Raises:
        ValueError: There are lines, and none can be read.
    """
    aside: list[Aside] = []
    found = list(one_by_one(lines, read, aside))
    return found, told_unreadable(aside, where, len(found))


def read_cells(path: Path, read: Read[CellRecord]) -> tuple[list[CellRecord], list[str]]:
    """Read the records of a sweep's folder or file; see `legible`.

    Raises:
        ValueError: There are none, none can be read, or a line in the middle is no JSON.
    """
    return legible(read_records(path), path, read)


class ResultFolder:
    """The records of a sweep, on disk and in memory; use as a context manager.

    Args:
        folder: Made if it is not there; nobody else may write there meanwhile.
        read: Reads one record, or raises ValueError.

    Raises:
        MeasurementError: Another process writes there.
        ValueError: It cannot be written, a line in the middle is no JSON, or no record there can be
            read.
    """

    def __init__(self, folder: Path, read: Read[CellRecord]) -> None:
        self.folder = folder
        self._file = ResultFile(folder / FILE)
        try:
            self.records, self.aside = legible(self._file.scan(), folder, read)
        except ValueError:
            self.close()
            raise

    def append(self, *records: CellRecord) -> None:
        """Append records, all or none.

        Raises:
            MeasurementError: The disk is full or fails; the file is as it was before.
        """
        self._file.append(*(record.as_json() for record in records))
        self.records += records

    def confirm(self) -> None:
        """See that the records are still there.

        Raises:
            MeasurementError: Their file was removed, or another was put in its place.
        """
        self._file.confirm()

    def close(self) -> None:
        """Let another writer in."""
        self._file.close()

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
        self.close()
