"""The verb `compare`: its table, its JSON and its exit status."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.commands import compare
from harness.records.cell import CellRecord, Status
from harness.records.config import Config, Where
from harness.records.store import FILE, ResultFile
from tests.harness.made import record

CONFIG = Config(
    strategy="ring",
    pattern="causal",
    cp=2,
    seqlen_q=64,
    seqlen_kv=64,
    heads_q=2,
    heads_kv=2,
    head_dim=16,
    transport=Where.GLOO,
)


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    compare.register(parser.add_subparsers())
    args = parser.parse_args(["compare", *words])
    status: int = args.run(args)
    return status


def write(folder: Path, time_s: float, **values: object) -> Path:
    entry: CellRecord = record(
        CONFIG,
        Status.OK,
        {"python": "3.12"},
        time_s=time_s,
        samples_s=[time_s] * 20,
        **values,
    )
    with ResultFile(folder / FILE) as results:
        results.append(entry.as_json())
    return folder


def test_no_change_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write(tmp_path / "a", 1.0), write(tmp_path / "b", 1.05)
    assert call(str(one), str(two / "records.jsonl")) == 0
    captured = capsys.readouterr()

    assert captured.out == "1 cells in both, no change\n"
    assert captured.err == ""


def test_a_slower_cell_exits_with_1_and_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = write(tmp_path / "a", 0.001), write(tmp_path / "b", 0.0012)
    assert call(str(one), str(two)) == 1
    printed = capsys.readouterr().out

    assert "slower" in printed
    assert "1 ms" in printed
    assert "1.2 ms" in printed
    assert "ring: 1 cells slower, median ratio 1.200" in printed
    assert "1 cells in both, 1 of them changed; 1 of 1 changes for the worse" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        ({}, {"time_s": 0.5}, 0),  # faster
        ({}, {"plan_hash": "bb"}, 0),
        ({"peak_bytes": 9}, {"peak_bytes": 8}, 0),
        ({"peak_bytes": 8}, {"peak_bytes": 9}, 1),
        ({"bytes_sent_per_rank": 8}, {"bytes_sent_per_rank": 9}, 1),
        ({"max_rel_error": {"dk": 1e-7}}, {"max_rel_error": {"dk": 5e-7}}, 1),
    ],
)
def test_only_what_is_worse_exits_with_1(
    before: dict[str, Any], after: dict[str, Any], status: int, tmp_path: Path
) -> None:
    fixed = {"time_s": 1.0, "plan_hash": "aa"}
    one = write(tmp_path / "a", **{**fixed, **before})
    two = write(tmp_path / "b", **{**fixed, **after})
    assert call(str(one), str(two)) == status


def test_a_cell_that_is_new_is_no_failure_and_one_that_is_gone_is(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 1.0)
    two = write(tmp_path / "b", 1.0)
    other = replace(CONFIG, seqlen_q=65, seqlen_kv=65)
    with ResultFile(two / FILE) as results:
        results.append(record(other, Status.OK, {}, time_s=1.0, samples_s=[1.0] * 20).as_json())
    assert call(str(one), str(two)) == 0
    assert call(str(two), str(one)) == 1


def test_a_larger_threshold_in_percent_lets_it_pass(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a", 1.0), write(tmp_path / "b", 1.2)

    assert call(str(one), str(two), "--threshold", "25") == 0
    assert call(str(one), str(two), "--threshold", "15") == 1


def test_json_has_every_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "a", 1.0, plan_hash="aa", max_rel_error={"out": 1e-7})
    two = write(tmp_path / "b", 2.0, plan_hash="bb", max_rel_error={"out": 5e-7})
    assert call(str(one), str(two), "--json") == 1
    body = json.loads(capsys.readouterr().out)

    assert (body["matched"], body["unchanged"], body["not_judged"]) == (1, 0, [])
    kinds = {change["kind"]: change for change in body["changes"]}
    assert set(kinds) == {"plan_hash", "slower", "error grew"}
    assert kinds["slower"]["ratio"] == 2.0
    assert kinds["slower"]["config_hash"] == CONFIG.hash
    assert kinds["error grew"]["detail"] == "out"


def test_the_table_names_the_tensor_and_hashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write(tmp_path / "a", 1.0, plan_hash="aa", max_rel_error={"dk": 1e-7})
    two = write(tmp_path / "b", 1.0, plan_hash="bb", max_rel_error={"dk": 5e-7})
    assert call(str(one), str(two)) == 1
    printed = capsys.readouterr().out

    assert "error grew (dk)" in printed
    assert "5.00e-07" in printed
    assert "aa" in printed
    assert "bb" in printed


def test_scatter_that_raises_the_threshold_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sign in (("a", 1), ("b", -1)):
        with ResultFile(tmp_path / name / FILE) as results:
            for number in range(8):
                time_s = 1.25 ** (sign * (-1) ** number)
                config = replace(CONFIG, seqlen_q=64 + number, seqlen_kv=64 + number)
                results.append(
                    record(config, Status.OK, {}, time_s=time_s, samples_s=[time_s] * 20).as_json()
                )
    assert call(str(tmp_path / "a"), str(tmp_path / "b")) == 0
    printed = capsys.readouterr().out

    # Each of 8 changes by 1.25 ** 2; twice that in logarithms is 1.25 ** 4 = 2.44.
    assert "only changes of more than 144% count" in " ".join(printed.split())
    assert "8 cells in both, no change" in printed


def test_sets_that_share_no_cell_are_a_wrong_call(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 1.0)
    other = replace(CONFIG, seqlen_q=65, seqlen_kv=65)
    with ResultFile(tmp_path / "b" / FILE) as results:
        results.append(record(other, Status.OK, {}, time_s=1.0, samples_s=[1.0] * 20).as_json())
    with pytest.raises(ValueError, match=r"no cell of .*a is in .*b"):
        call(str(one), str(tmp_path / "b"))


def test_a_folder_without_records_is_a_wrong_call(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 1.0)
    with pytest.raises(ValueError, match=r"has no records\.jsonl"):
        call(str(one), str(tmp_path / "none"))


def test_other_machines_and_too_few_samples_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, python in (("a", "3.12"), ("b", "3.13")):
        with ResultFile(tmp_path / name / FILE) as results:
            facts = {"python": python}
            results.append(
                record(CONFIG, Status.OK, facts, time_s=1.0, samples_s=[1.0] * 4).as_json()
            )
    assert call(str(tmp_path / "a"), str(tmp_path / "b")) == 0
    printed = capsys.readouterr().out
    assert "note: python was 3.12, is 3.13" in printed
    assert "note: 1 measured times have too few samples" in printed


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--help")
    assert "  python -m harness compare results/monday" in capsys.readouterr().out


def test_cells_that_one_set_alone_has_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many, few = tmp_path / "many", tmp_path / "few"
    records = [
        record(replace(CONFIG, cp=cp), Status.OK, {}, time_s=1.0, samples_s=[1.0] * 20)
        for cp in range(1, 10)
    ]
    for folder, own in ((many, records), (few, records[:1])):
        with ResultFile(folder / FILE) as results:
            results.append(*(each.as_json() for each in own))
    assert call(str(many), str(few)) == 1
    text = capsys.readouterr().out
    assert text.count("missing ring") == 5
    assert "and 3 cells more: missing" in text
    assert call(str(few), str(many)) == 0
    assert "and 3 cells more: extra" in capsys.readouterr().out
    assert call(str(many), str(few), "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["changes"]) == 8
