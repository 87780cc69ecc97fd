"""Files that are generated from records: a CSV and a Markdown table."""

import csv
from collections.abc import Sequence
from pathlib import Path

from harness.records import Record

COLUMNS = (
    "strategy",
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
    "calibration",
    "reason",
)


def write_summaries(folder: Path, records: Sequence[Record]) -> None:
    """Write summary.csv and summary.md beside the records, each whole or not at all."""
    with (folder / "summary.csv.new").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*COLUMNS, "max_rel_error"))
        for entry in records:
            writer.writerow((*(_cell(entry[name]) for name in COLUMNS), worst_error(entry)))
    (folder / "summary.csv.new").replace(folder / "summary.csv")
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS))]
    lines += [_row([_cell(entry[name]) for name in COLUMNS]) for entry in records]
    new = folder / "summary.md.new"
    new.write_text("\n".join(lines) + "\n")
    new.replace(folder / "summary.md")


def worst_error(entry: Record) -> str:
    """Largest error of a record's results, as text; empty if it has none."""
    found = entry["max_rel_error"]
    return f"{max(found.values()):.3g}" if isinstance(found, dict) and found else ""


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
