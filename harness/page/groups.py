"""How results are grouped for charts, and how a chart is named."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.plan.problem import Direction
from harness.records.cell import CellRecord
from harness.report.format import problem


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the page.

    Attributes:
        key: Its name in files and links.
        title: What it shows.
        note: How to read it, and what was left out.
        svg: The figure.
    """

    key: str
    title: str
    note: str
    svg: str


def by_problem(
    records: Sequence[CellRecord],
) -> dict[tuple[str, Direction], list[CellRecord]]:
    """Group by machine, model and precision, and by direction."""
    groups: dict[tuple[str, Direction], list[CellRecord]] = {}
    for entry in records:
        groups.setdefault((problem(entry), entry.config.direction), []).append(entry)
    return groups


def slug(text: str) -> str:
    """A text as part of a file's name: letters, digits and single dashes."""
    kept = "".join(c if c.isalnum() and c.isascii() else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part)
