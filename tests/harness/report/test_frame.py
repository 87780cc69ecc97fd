"""Results as a frame and as Parquet: the numbers of the records, unknown ones missing."""

from pathlib import Path

import pytest

from harness import cli
from harness.base.json_fields import json_text
from harness.report.frame import results_frame
from tests.harness.page.test_build import CELL, made, some

pandas = pytest.importorskip("pandas", reason="pandas is not installed")


def written(folder: Path) -> int:
    entries = [*some(), made(CELL, None, reason="no"), made(CELL, 3.0, max_rel_error={"out": 1e-9})]
    lines = [json_text(entry.as_json(), compact=True) for entry in entries]
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    return len({entry.config_hash for entry in entries})


def test_a_frame_has_a_row_for_each_cell_with_the_newest_numbers(tmp_path: Path) -> None:
    cells = written(tmp_path)
    frame = results_frame(tmp_path)
    assert len(frame) == cells
    (own,) = (
        frame[frame.strategy.eq("ring") & frame.cp.eq(4)]
        .query("pattern == 'causal' and direction == 'forward'")
        .to_dict("records")
    )
    assert (own["time_s"], own["max_rel_error_out"], own["status"]) == (3.0, 1e-9, "ok")
    assert pandas.isna(own["p20_s"])
    assert frame.max_rel_error_out.notna().sum() == 1


def test_parquet_has_what_the_frame_has(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    written(tmp_path)
    target = tmp_path / "cells.parquet"
    assert cli.main(["report", str(tmp_path), "--parquet", str(target)]) == 0
    again = pandas.read_parquet(target)
    assert again.time_s.tolist() == results_frame(tmp_path).time_s.tolist()
