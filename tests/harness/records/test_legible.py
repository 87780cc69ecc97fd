"""Records that cannot be read are named and set aside; the others go on."""

import json
from pathlib import Path

import pytest

from harness.records.cell import Status, from_json
from harness.records.legible import ResultFolder, legible
from harness.records.store import FILE, ResultFile
from harness.report.reading import read_cell
from tests.harness.made import record
from tests.harness.records.test_cell import MEASURED

GOOD = record(MEASURED, Status.OK, {}, time_s=1.0)


def test_what_cannot_be_read_is_named_with_its_number_and_the_others_go_on() -> None:
    good = GOOD.as_json()
    lines = [good, {**good, "time_s": 0}, {"strategy": "ring"}, good]
    found, notes = legible(lines, Path("there"), from_json)
    assert found == [GOOD, GOOD]
    assert [note.partition(";")[0] for note in notes] == [
        "note: there: record 2 time_s (0) must be a number from 1e-12 to 1e+12",
        "note: there: record 3 has schema_version None, and this code reads 1 and 2: something "
        "else wrote it, or another version of this project",
    ]
    assert all(note.endswith("; set aside") for note in notes)


def test_many_are_counted() -> None:
    lines = [GOOD.as_json(), *[{**GOOD.as_json(), "cp": -n} for n in range(9)]]
    _, notes = legible(lines, Path("there"), from_json)
    assert (len(notes), notes[-1]) == (6, "note: there: 4 more set aside")


def test_a_file_of_which_nothing_can_be_read_is_refused() -> None:
    assert legible([], Path("there"), from_json) == ([], [])
    with pytest.raises(ValueError, match=r"record 1 has schema_version.*none of 2 records can be"):
        legible([{"a": 1}, {"b": 2}], Path("there"), from_json)


def test_a_folder_goes_on_beside_what_it_set_aside_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    with ResultFile(tmp_path / FILE) as file:
        file.append({**GOOD.as_json(), "peak_bytes": "many"}, GOOD.as_json())
    before = (tmp_path / FILE).read_bytes()
    with ResultFolder(tmp_path, from_json) as results:
        assert results.records == [GOOD]
        assert len(results.aside) == 1
        results.append(GOOD)
        assert results.records == [GOOD, GOOD]
    assert (tmp_path / FILE).read_bytes() == before + json.dumps(GOOD.as_json()).encode() + b"\n"


def test_a_folder_that_is_refused_is_not_kept_locked(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="none of 1 records"):
        ResultFolder(tmp_path, from_json)
    (tmp_path / FILE).unlink()
    with ResultFolder(tmp_path, from_json) as results:
        assert results.records == []


def test_reason_with_a_huge_value_is_cut() -> None:
    """A note repeats what was received: of a damaged record that may be the whole file."""
    bad = {**GOOD.as_json(), "strategy": "x" * 100_000}
    _, notes = legible([GOOD.as_json(), bad], Path("there"), read_cell)
    assert (len(notes), notes[0].endswith("...; set aside")) == (1, True)
    assert len(notes[0]) < 500
