"""Simulated cells: what their words say, and what no record may hold."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.plan.problem import Direction, Dtype
from harness.records.cell import CellRecord, Status, from_json
from harness.records.config import Config, Where
from harness.sweep import simulate_cells
from harness.sweep.simulate_cells import simulate_cell

CELL = Config(
    strategy="ring",
    pattern="causal",
    cp=6,
    seqlen_q=6144,
    seqlen_kv=6144,
    heads_q=12,
    heads_kv=4,
    head_dim=128,
    batch=2,
    dtype=Dtype.BFLOAT16,
    direction=Direction.BACKWARD,
    transport=Where.SIMULATED,
    cluster="h800",
)
CELLS = {
    "inside": CELL,
    "outside": replace(CELL, seqlen_q=384, seqlen_kv=384),
    "outside, precision": replace(CELL, dtype=Dtype.FLOAT32),
    "datasheet": replace(CELL, cluster="h100-1x8"),
    "too large": replace(CELL, seqlen_q=3 * 2**22, seqlen_kv=3 * 2**22),
    "refused": replace(CELL, strategy="ulysses", heads_q=5, heads_kv=5),
}


def contradictions(record: CellRecord) -> list[str]:
    """Fields whose words say another thing than a number beside them."""
    words = record.calibration or ""
    share = re.search(r"expected error (\d+%)", words)
    error = record.expected_error
    inside = {True: "; inside its range", False: "; OUTSIDE its range", None: ""}
    found = {
        "expected_error": (error is None) is ("unknown" in words or share is None),
        "its size": share is None or (error is not None and f"{error:.0%}" == share[1]),
        "inside_range": inside[record.inside_range] in words,
        "no range": record.inside_range is not None or "its range" not in words,
        "calibration_id": (record.calibration_id or "") in words
        and (record.calibration_id is None) is ("not calibrated" in words or not words),
        "oom": (record.status is Status.OOM) is record.reason.startswith("needs "),
        "peak_bytes": not record.reason.startswith("needs ")
        or record.reason.startswith(f"needs {record.peak_bytes} bytes of "),
        "time_s": (record.time_s is not None) is (record.status in (Status.OK, Status.OOM)),
        "max_rel_error": record.max_rel_error is None,  # nothing was computed
        "samples": (record.samples_s, record.p20_s, record.p80_s) == ((), None, None),
    }
    return [name for name, right in found.items() if not right]


@pytest.mark.parametrize("kind", CELLS)
def test_no_number_contradicts_the_words_beside_it(kind: str, tmp_path: Path) -> None:
    for _ in range(2):  # the second is read from what the first kept
        record = simulate_cell(CELLS[kind], {}, folder=tmp_path)
        assert contradictions(record) == []
        assert from_json(record.as_json()) == record
    expected = {
        "inside": (Status.OK, True),
        "outside": (Status.OK, False),
        "outside, precision": (Status.OK, False),
        "too large": (Status.OOM, False),
        "datasheet": (Status.OK, None),
        "refused": (Status.ILLEGAL, None),
    }
    assert (record.status, record.inside_range) == expected[kind]


def test_a_time_that_is_no_number_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_cells, "problem_bound_s", lambda *_: math.nan)
    record = simulate_cell(CELL, {}, folder=tmp_path)
    assert (record.status, record.time_s) == (Status.ERROR, None)
    assert "its bound_s (nan) must be a number" in record.reason
