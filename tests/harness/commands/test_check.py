"""The verb `check`: exit status, JSON, resuming, and every wrong flag."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli
from harness.check import run
from harness.check.cell import JudgedCell, check
from harness.records.check_record import Outcome
from harness.records.config import Config
from harness.records.store import ResultFile
from tests.harness.ranks.test_team import ROOT

SMALL = (
    *("check", "--strategies", "ring,ulysses", "--patterns", "causal", "--cp", "3", "--jobs", "1"),
    *("--seqlen", "29", "--heads", "6/2", "--head-dim", "5", "--dtype", "float64", "--batch", "2"),
)
NAMES = {
    *("strategy", "pattern", "cp", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "head_dim"),
    *("batch", "dtype", "direction", "transport", "scope", "status", "reason"),
    *("max_rel_error", "tolerance"),
}
FURTHER = {"cluster", "hidden", "rotary", "runtime", "tolerances"}


def result(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def broken(config: Config) -> tuple[JudgedCell, JudgedCell]:
    """Ring's backward is wrong."""
    forward, backward = check(config)
    if config.strategy == "ring":
        return forward, JudgedCell(backward.config, Outcome.FAILED, "dk is off")
    return forward, backward


def test_json_goes_to_stdout_alone_and_has_the_documented_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*SMALL, "--json"]) == 0
    body = result(capsys)
    assert list(body) == ["passed", "failed", "refused", "cells"]
    assert (body["passed"], body["failed"], body["refused"]) == (4, 0, 0)
    cells = body["cells"]
    assert isinstance(cells, list)
    for cell in cells:
        assert set(cell) == NAMES | FURTHER
        assert cell["status"] == "passed"
        assert set(cell["max_rel_error"]) <= {"out", "lse", "dq", "dk", "dv"}
        assert max(cell["max_rel_error"].values()) <= cell["tolerance"] <= 1e-12


def test_the_table_counts_and_refusals_have_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    usp = ("--strategies", "usp:2x2,ring")
    assert cli.main([*SMALL, *usp]) == 0
    out = capsys.readouterr().out
    assert "2 passed, 0 failed, 2 refused" in out
    assert "refused (2 cells) usp" in out


def test_one_failure_is_named_and_makes_the_exit_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "check", broken)
    assert cli.main([*SMALL]) == 1
    out = capsys.readouterr().out
    assert "failed ring causal cp=3 S=29/29 heads=6/2 D=5 B=2 float64 backward: dk is off" in out
    assert "3 passed, 1 failed, 0 refused" in out


def test_a_check_goes_on_where_its_file_ends_and_tries_failures_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "records.jsonl"
    judged = []

    def counted(config: Config) -> tuple[JudgedCell, JudgedCell]:
        judged.append(config.strategy)
        return check(config)

    words = [*SMALL, "-o", str(file), "--json"]
    with monkeypatch.context() as patch:
        patch.setattr(run, "check", broken)
        assert cli.main(words) == 1
    capsys.readouterr()
    file.write_bytes(file.read_bytes() + b'{"torn')
    monkeypatch.setattr(run, "check", counted)
    assert cli.main(words) == 0
    assert judged == ["ring"]
    body = result(capsys)
    assert (body["passed"], body["failed"]) == (4, 0)
    assert len(body["cells"]) == 4
    assert cli.main([*words, "--cp", "2"]) == 0
    assert judged[0] == "ring"
    assert sorted(judged[1:]) == ["ring", "ulysses"]
    assert result(capsys)["passed"] == 4  # those of this grid only


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "well"}, "status ('well') must be one of passed, failed, refused"),
        ({"max_rel_error": {"out": float("nan")}}, "max_rel_error.out (nan) must be a number"),
        ({"tolerances": {"out": 0}}, "tolerances.out (0) must be a number from"),
        ({"tolerances": {}}, "tolerances lack dk, dq, dv, lse, out"),
        ({"strategy": "ri\x1bng"}, "must be a text of printable characters"),
        ({"cp": 0}, "cp (0) must be a whole number"),
        ({"schema_version": 9}, "has schema_version 9"),
    ],
)
def test_a_record_that_cannot_be_read_is_set_aside_and_its_cell_judged_again(
    change: dict[str, object],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "records.jsonl"
    words = [*SMALL, "--strategies", "ring", "-o", str(file), "--json"]
    assert cli.main(words) == 0
    first = result(capsys)
    *kept, last = map(json.loads, file.read_text().splitlines())
    file.write_text("".join(json.dumps(line) + "\n" for line in (*kept, {**last, **change})))
    judged = []
    monkeypatch.setattr(run, "check", lambda config: judged.append(config) or check(config))
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == first
    assert len(judged) == 1
    assert said in " ".join(err.split())
    assert "\x1b" not in err


def test_a_result_that_is_not_finite_fails_and_its_error_is_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def infinite(config: Config) -> tuple[JudgedCell, JudgedCell]:
        forward, backward = check(config)
        error = dict.fromkeys(forward.max_rel_error, math.inf)
        failed = replace(forward, status=Outcome.FAILED, reason="out is off", max_rel_error=error)
        return failed, backward

    monkeypatch.setattr(run, "check", infinite)
    for words in (["--json"], ["--json", "-o", str(tmp_path / "records.jsonl")]):
        assert cli.main([*SMALL, *words]) == 1
        text = capsys.readouterr().out
        assert "Infinity" not in text
        errors = [cell["max_rel_error"] for cell in json.loads(text)["cells"]]
        assert errors.count({"out": None, "lse": None}) == 2
    assert cli.main(SMALL) == 1
    assert "inf" in capsys.readouterr().out


def test_a_file_that_another_check_writes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ResultFile(tmp_path / "records.jsonl"):
        assert cli.main([*SMALL, "-o", str(tmp_path / "records.jsonl")]) == 1
    assert "another run" in capsys.readouterr().err


def test_the_whole_product_of_some_values_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--full", "--cp", "2,3", "--seqlen", "5,29", "-o", str(tmp_path / "full.jsonl")]
    assert cli.main([*SMALL, *words, "--json"]) == 0
    assert result(capsys)["passed"] == 2 * 2 * 2 * 2


def test_real_processes_are_asked_for_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--transport", "gloo", "--repeat", "2", "--json"]) == 0
    body = result(capsys)
    assert body["passed"] == 4
    assert {cell["transport"] for cell in body["cells"]} == {"gloo"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cp", "0"], "(0) must be a whole number"),
        (["--cp", "100000"], "cp (100000) must be at most 512"),
        (["--seqlen", "x"], "length (x)"),
        (["--seqlen", "10m"], "seqlen (10485760) must be at most 16384"),
        (["--heads", "5/3"], "query heads must be a multiple of KV heads"),
        (["--head-dim", "-4"], "--head-dim"),
        (["--dtype", "half"], "choose float64"),
        (["--transport", "nccl"], "--transport"),
        (["--transport", "tcp"], "(tcp) is unknown"),
        (["--scope", "model"], "choose attention, layer"),
        (["--strategies", "rign"], "strategy (rign) is unknown (did you mean ring?); choose from"),
        (["--patterns", "spiral"], "spiral"),
        (["--repeat", "0"], "--repeat"),
        (["--jobs", "0"], "--jobs"),
        (["-o", "/proc/x"], "/proc/x) cannot be written"),
    ],
)
def test_a_wrong_flag_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: int | str | None = cli.main([*SMALL, *words])
    except SystemExit as left:
        status = left.code
    error = capsys.readouterr().err
    assert status == 2, error
    assert message in " ".join(error.split())


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_reader_that_leaves_early_is_no_failure(words: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *SMALL, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate()
    assert (process.returncode, error) == (0, "")


def test_a_check_in_which_every_cell_is_refused_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ("--cp", "3", "--heads", "6/2", "--dtype", "float64", "--head-dim", "8", "--batch", "2")
    assert cli.main([*SMALL, *few, "--strategies", "usp:5x2"]) == 1
    captured = capsys.readouterr()
    assert "nothing was checked" in captured.err
    assert "try usp:1x3, usp:3x1" in captured.out
    assert cli.main([*SMALL, *few, "--strategies", "usp:5x2,ring"]) == 0
    assert "nothing was checked" not in capsys.readouterr().err
