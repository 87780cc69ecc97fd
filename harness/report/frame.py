"""Results as a table of pandas, for analysis beyond what the reports show."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.records.cell import CellRecord, columns
from harness.records.legible import read_cells
from harness.report.reading import latest, read_cell

if TYPE_CHECKING:
    import pandas as pd


def results_frame(results: Path | str) -> "pd.DataFrame":
    """Read a folder of results, or its records.jsonl, as a frame: a row for each cell.

    Args:
        results: The folder or file. Records that cannot be read are left out.

    Raises:
        ValueError: There are records, and none can be read.
        ImportError: pandas is not installed (the extra `frame`).
    """
    records, _ = read_cells(Path(results), read_cell)
    return frame_of(latest(records))


def frame_of(records: Sequence[CellRecord]) -> "pd.DataFrame":
    """Make a frame of records: the columns of summary.csv, in SI units; unknown values are missing.

    `max_rel_error` becomes one column for each tensor.
    """
    import pandas as pd

    names = [name for name in columns() if name != "max_rel_error"]
    rows = []
    for entry in records:
        values = entry.as_json()
        errors = entry.max_rel_error or {}
        row = {name: values[name] for name in names}
        rows.append({**row, **{f"max_rel_error_{name}": e for name, e in errors.items()}})
    return pd.DataFrame(rows, columns=None if rows else names).convert_dtypes()
