"""The verb `explain`: its tables, its JSON and its exit status."""

import argparse
import json
import math
import re

import pytest

from harness.commands import explain
from strategies import STRATEGIES


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    explain.register(parser.add_subparsers())
    args = parser.parse_args(["explain", *words])
    status: int = args.run(args)
    return status


def test_the_worked_example_comes_out(capsys: pytest.CaptureFixture[str]) -> None:
    for text, heads_kv, mib in (
        *(("ring", "32", 1792), ("ring", "8", 448)),
        *(("ulysses", "32", 448), ("ulysses", "8", 280)),
    ):
        words = ["--strategy", text, "--pattern", "full", "--heads-kv", heads_kv, "--json"]
        assert call(*words) == 0
        answer = json.loads(capsys.readouterr().out)
        assert mib * 2**20 == answer["volume_bytes"]
        assert mib * 2**20 == answer["closed_form_bytes"]


def test_a_refusal_exits_with_1_and_names_what_is_legal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--heads-q", "10", "--heads-kv", "2", "--cp", "16", "--seqlen", "4k"]
    assert call(*words, "--strategy", "ulysses", "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["legal"] is False
    assert "heads_q (10)" in answer["reason"]
    assert "--strategy usp:8x2 --cp 16" in answer["nearest"]
    assert "--strategy ulysses --cp 10" in answer["nearest"]

    assert call(*words, "--strategy", "ulysses") == 1
    table = capsys.readouterr().out
    assert "--strategy usp:8x2 --cp 16" in table
    assert "heads_q (10)" in table


def test_without_a_strategy_there_is_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--heads-q", "2", "--cp", "4", "--seqlen", "64"]
    assert call(*words) == 0  # a row that is not legal is an answer, not a failure
    printed = capsys.readouterr().out
    for name in STRATEGIES:
        assert f"│ {name} " in printed
    assert "not legal" in printed
    assert "ulysses: cp (4) must not exceed heads_q (2)" in printed

    assert call(*words, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(STRATEGIES) == [row["strategy"] for row in rows]


def test_imbalance_is_printed_for_a_legal_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--strategy", "ring", "--cp", "4", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert math.isclose(1.75, answer["imbalance_total"], abs_tol=1e-4)

    assert call("--strategy", "p2p", "--cp", "4") == 0  # an alias
    captured = capsys.readouterr()
    assert re.search(r"│ imbalance +│ 1\.7500 ", captured.out)
    assert re.search(r"│ imbalance, lockstep +│ 1\.7500 ", captured.out)
    assert captured.err == ""


@pytest.mark.parametrize(
    "words", [["--strategy", "rong"], ["--cp", "0"], ["--strategy", "usp:pace=3"]]
)
def test_a_wrong_call_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        call(*words)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words[1].partition(":")[0] in captured.err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--help")
    assert "  python -m harness explain --strategy ring" in capsys.readouterr().out
