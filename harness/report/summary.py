"""Files that are generated from records: a CSV, and Markdown with the tables and every cell."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console

from harness.base.files import write_whole
from harness.records.cell import CellRecord, columns
from harness.report.format import worst_error
from harness.report.tables import print_sweep

_WIDTH = 120


def write_summaries(folder: Path, records: Sequence[CellRecord]) -> None:
    """Write summary.csv and summary.md beside the records, each whole or not at all."""
    write_whole(folder / "summary.csv", sheet_text(records))
    write_whole(folder / "summary.md", markdown_text(records))


def sheet_text(records: Sequence[CellRecord]) -> str:
    """Every cell as CSV: a heading, and a line each."""
    sheet = StringIO(newline="")
    csv.writer(sheet).writerows([columns(), *_rows(records)])
    return sheet.getvalue()


def markdown_text(records: Sequence[CellRecord]) -> str:
    """The tables of a sweep, and every cell, as Markdown."""
    names, tables = columns(), StringIO()
    print_sweep(Console(file=tables, width=_WIDTH, color_system=None), records)
    shown = "\n".join(line.rstrip() for line in tables.getvalue().splitlines())
    lines = ["# Sweep", "", "```text", shown, "```", "", "## Every cell", ""]
    lines += [_row(names), _row(["---"] * len(names)), *map(_row, _rows(records))]
    return "\n".join(lines) + "\n"


def _rows(records: Sequence[CellRecord]) -> list[list[str]]:
    names = columns()
    return [_cells(names, entry) for entry in records]


def _cells(names: Sequence[str], entry: CellRecord) -> list[str]:
    values = {**entry.as_json(), "max_rel_error": worst_error(entry)}
    return [_cell(values[name]) for name in names]


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
