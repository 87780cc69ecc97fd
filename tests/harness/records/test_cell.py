"""The record of a cell: every value is judged, whoever makes the record and wherever it is from."""

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest

from harness.errors import RecordError
from harness.records.cell import CellRecord, Source, Status, columns, from_json
from harness.records.config import Config, Where
from tests.harness.made import record

MEASURED = Config(
    strategy="usp:2x3",
    pattern="documents:lengths=20+77",
    cp=6,
    seqlen_q=97,
    seqlen_kv=101,
    heads_q=6,
    heads_kv=2,
    head_dim=24,
    batch=2,
    transport=Where.GLOO,
)
SIMULATED = replace(MEASURED, transport=Where.SIMULATED, cluster="h800")


def one(config: Config = MEASURED, **values: object) -> CellRecord:
    return record(config, Status.OK, {"cores": 3}, **{"time_s": 0.5, **values})


def line(config: Config = MEASURED, **values: object) -> dict[str, Any]:
    """A record as a file has it."""
    found: dict[str, Any] = json.loads(json.dumps(one(config).as_json()))
    return {**found, **values}


def test_a_record_is_read_as_it_was_written() -> None:
    made = [
        one(samples_s=(0.25, 0.5, 0.75), max_rel_error={"dq": 1e-7, "dk": None}, peak_bytes=7),
        one(SIMULATED, link_bytes={"nvlink": 5}, inside_range=True, expected_error=0.04),
        record(MEASURED, Status.TIMEOUT, {"packages": {"torch": "2"}}, reason="no answer\nrank 1"),
    ]
    for each in made:
        text = json.dumps(each.as_json(), allow_nan=False)
        assert from_json(json.loads(text)) == each
    assert [each.source for each in made] == [Source.MEASURED, Source.SIMULATED, Source.MEASURED]


def test_the_json_names_every_field_and_a_table_all_but_what_is_nested_or_long() -> None:
    names = {each.name for kind in (Config, CellRecord) for each in fields(kind)} - {"config"}
    assert set(one().as_json()) == names | {"source", "schema_version"}
    assert set(columns()) < set(one().as_json())
    assert not {"samples_s", "environment", "traceback", "link_bytes"} & set(columns())
    assert columns()[:2] == ("strategy", "pattern")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("time_s", math.nan, r"time_s \(nan\) must be a number from 1e-12"),
        ("time_s", 0, r"time_s \(0\) must be"),
        ("time_s", "0.5", r"time_s \('0.5'\) must be a number"),
        ("time_s", True, r"time_s \(True\) must be a number"),
        ("time_s", 10**400, r"time_s \(1000.*must be a number from"),
        ("time_s", None, r"time_s \(None\) must be a number where status is ok"),
        ("samples_s", [1.0, math.inf], r"samples_s\[1\] \(inf\) must be"),
        ("samples_s", 3, r"samples_s \(3\) must be a list"),
        ("peak_bytes", -1, r"peak_bytes \(-1\) must be a whole number from 0"),
        ("peak_bytes", 1.5, r"peak_bytes \(1.5\) must be a whole number"),
        ("cp", 0, r"cp \(0\) must be a whole number from 1"),
        ("heads_q", 2**63, r"heads_q \(9223372036854775808\) must be"),
        ("status", "well", r"status \('well'\) must be one of ok, illegal"),
        ("dtype", 3, r"dtype \(3\) must be one of float64"),
        ("strategy", "ri\x1b[31mng", r"strategy \('ri\\x1b\[31mng'\) must be a text of printable"),
        ("pattern", "", r"pattern \(''\) must be a text"),
        ("plan_hash", ["a"], r"plan_hash \(\['a'\]\) must be a text"),
        ("max_rel_error", {"out": math.nan}, r"max_rel_error.out \(nan\) must be"),
        ("max_rel_error", {"o\x07ut": 1.0}, r"a name in max_rel_error \('o\\x07ut'\) must be"),
        ("max_rel_error", [], r"max_rel_error \(\[\]\) must be an object"),
        ("environment", {"cores": math.nan}, r"environment.cores \(nan\) must be a number"),
        ("environment", {"packages": {"torch": {}}}, r"environment.packages.torch .* must be"),
        ("environment", 7, r"environment \(7\) must be an object"),
        ("source", "simulated", r"source \('simulated'\) must be measured"),
        ("calibration", "h800", r"calibration \(h800\) must be null where source is measured"),
        ("expected_error", 0.1, r"expected_error \(0.1\) must be null where inside_range is None"),
        ("schema_version", 3, r"has schema_version 3, and this code reads 1 and 2"),
        ("schema_version", True, r"has schema_version True"),
        ("schema_version", {}, r"has schema_version {}"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_field(
    name: str, value: object, said: str
) -> None:
    with pytest.raises(RecordError, match=said):
        from_json(line(**{name: value}))


def test_every_field_that_lacks_is_named() -> None:
    whole = line()
    for name in set(whole) - {"schema_version", "expected_error_p90"}:
        with pytest.raises(RecordError, match=rf"lacks {name}$"):
            from_json({key: value for key, value in whole.items() if key != name})
    later = {key: value for key, value in whole.items() if key != "expected_error_p90"}
    assert from_json(later).expected_error_p90 is None  # lines of before lack it
    with pytest.raises(RecordError, match="has schema_version None"):
        from_json({"strategy": "ring"})


def test_no_record_is_made_with_what_none_may_have() -> None:
    with pytest.raises(RecordError, match=r"time_s \(inf\) must be"):
        one(time_s=math.inf)
    with pytest.raises(RecordError, match="expected_error"):
        one(SIMULATED, inside_range=False, expected_error=0.04)
    with pytest.raises(RecordError, match=r"expected_error_p90 \(0.09\) must be null where"):
        one(SIMULATED, inside_range=True, expected_error_p90=0.09)


def test_texts_of_workers_are_kept_printable_and_bounded() -> None:
    said = record(MEASURED, Status.ERROR, {"cpu": "\x1b[2J"}, reason="a\x1b]0;x\x07\n\tb\ud800")
    assert said.reason == "a\\x1b]0;x\\x07\n\tb\\ud800"
    assert said.environment == {"cpu": "\\x1b[2J"}
    long = record(MEASURED, Status.ERROR, {}, detail="x" * 2**20)
    assert len(long.traceback) == 2**16 + len("...")


def test_records_of_version_1_are_read_and_what_they_did_not_know_is_null() -> None:
    later = ("inside_range", "plan_bound_s", "link_bytes", "peak_bytes_algorithm", "calibration_id")
    old = {name: value for name, value in line(SIMULATED).items() if name not in later}
    read = from_json({**old, "schema_version": 1})
    assert read == one(SIMULATED)
    outside = line(SIMULATED, schema_version=1, inside_range=False, expected_error=0.21)
    assert from_json(outside).expected_error is None
    inside = {**outside, "inside_range": True}
    assert from_json(inside).expected_error == 0.21
    with pytest.raises(RecordError, match="lacks status"):
        from_json({name: value for name, value in old.items() if name != "status"})
