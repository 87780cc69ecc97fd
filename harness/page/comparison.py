"""Two sets of results on one page: what changed, and what cannot be told apart."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report.compare import CellChange, Comparison
from harness.report.format import ABSENT

_HEADS = (
    *(("change", ""), ("worse", ""), ("strategy", "name"), ("cell", "")),
    *(("before", "n"), ("after", "n"), ("ratio", "n"), ("detail", "")),
)


@dataclass(frozen=True, slots=True)
class Changes:
    """A comparison as the page shows it.

    Attributes:
        lines: What is said above the table.
        heads: Names of columns, and their kind.
        rows: Text of each cell, and its kind.
    """

    lines: tuple[str, ...]
    heads: tuple[tuple[str, str], ...]
    rows: tuple[tuple[tuple[str, str], ...], ...]


def changes_of(found: Comparison, before: str, after: str) -> Changes:
    """Write a comparison out.

    Args:
        found: The comparison.
        before: Name of the first set.
        after: Name of the second.
    """
    lines = [
        f"{before} (before) and {after} (after): {found.matched} cells in both; "
        f"{found.unchanged} cannot be told apart, {found.matched - found.unchanged} changed.",
        f"A time counts as changed from {found.threshold:.0%} on"
        + (
            f", here from {found.scatter:.0%}, by which cells of one strategy scatter."
            if found.scatter is not None and found.scatter > found.threshold
            else "."
        ),
    ]
    if found.not_judged:
        lines.append(f"{len(found.not_judged)} times have too few samples to be judged.")
    lines += [f"{name} was {old}, is {new}." for name, (old, new) in found.environment.items()]
    return Changes(tuple(lines), _HEADS, tuple(map(_row, found.changes)))


def _row(change: CellChange) -> tuple[tuple[str, str], ...]:
    values: Sequence[str] = (
        change.kind.value,
        "worse" if change.worse else ABSENT,
        change.strategy,
        change.cell,
        _value(change.before),
        _value(change.after),
        ABSENT if change.ratio is None else f"{change.ratio:.3f}",
        change.detail,
    )
    return tuple(zip(values, (kind for _, kind in _HEADS), strict=True))


def _value(value: object) -> str:
    if value is None:
        return ABSENT
    return f"{value:.4g}" if isinstance(value, float) else str(value)
