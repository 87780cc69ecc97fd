"""Read measured tables and take every other row, so that what is fitted is not what is reported."""

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from patterns.files import read_regular

Row = dict[str, str]
T = TypeVar("T")


def read(folder: Path, name: str) -> list[Row]:
    """Return the rows of a table; none if it is not there. Bytes that are not UTF-8 become U+FFFD.

    Raises:
        ValueError: The file is not a table.
    """
    path = folder / name
    if not path.exists():
        return []
    with StringIO(read_regular(path).decode("utf-8-sig", "replace"), newline="") as file:
        try:
            return list(csv.DictReader(file))
        except csv.Error as error:
            raise ValueError(f"{path} must be comma-separated values: {error}") from error


def halves(items: Iterable[T], key: Sequence[str], text: Iterable[str]) -> tuple[list[T], list[T]]:
    """Split by a hash of each item's text: the same half in every run, whatever the order.

    Args:
        items: The items to split.
        key: Salt.
        text: Per item, what identifies its shape.
    """
    salt = "/".join(key)
    fit: list[T] = []
    report: list[T] = []
    for item, name in zip(items, text, strict=True):
        (fit if crc32(f"{salt}/{name}".encode()) % 2 else report).append(item)
    return fit, report
