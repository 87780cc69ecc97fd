"""Files that are generated from records: a CSV, and Markdown with the tables and every cell."""

import csv
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console

from harness.base.files import write_whole
from harness.records.store import Record
from harness.report.format import worst_error
from harness.report.tables import print_sweep

_WIDTH = 120

COLUMNS = (
    "strategy",
    "resolved",
    "pattern",
    "cp",
    "seqlen_q",
    "heads_q",
    "heads_kv",
    "head_dim",
    "batch",
    "dtype",
    "direction",
    "cluster",
    "source",
    "status",
    "time_s",
    "p20_s",
    "p80_s",
    "bound_s",
    "tflops_per_gpu",
    "bytes_sent_per_rank",
    "exposed_comm_s",
    "imbalance",
    "peak_bytes",
    "peak_bytes_algorithm",
    "calibration",
    "expected_error",
    "max_rel_error",
    "reason",
)


def write_summaries(folder: Path, records: Sequence[Record]) -> None:
    """Write summary.csv and summary.md beside the records, each whole or not at all."""
    rows = [[_cell(name, entry) for name in COLUMNS] for entry in records]
    sheet = StringIO(newline="")
    csv.writer(sheet).writerows([COLUMNS, *rows])
    write_whole(folder / "summary.csv", sheet.getvalue())
    tables = StringIO()
    print_sweep(Console(file=tables, width=_WIDTH), records)
    shown = "\n".join(line.rstrip() for line in tables.getvalue().splitlines())
    lines = ["# Sweep", "", "```text", shown, "```", "", "## Every cell", ""]
    lines += [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *map(_row, rows)]
    write_whole(folder / "summary.md", "\n".join(lines) + "\n")


def _cell(name: str, entry: Record) -> str:
    value = worst_error(entry) if name == "max_rel_error" else entry.get(name)
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
