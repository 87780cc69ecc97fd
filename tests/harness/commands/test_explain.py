"""The verb `explain`: its tables, its JSON and its exit status."""

import argparse
import json
import math
import re
from pathlib import Path

import pytest

from harness import cli
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
        assert re.search(rf"^{name}[ :]", printed, re.MULTILINE), name
    assert re.search(r"^ulysses +not legal\b", printed, re.MULTILINE)
    assert re.search(r"^ulysses: cp \(4\) must not exceed heads_q \(2\)", printed, re.M)

    assert call(*words, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert list(STRATEGIES) == [row["strategy"] for row in rows]


def test_imbalance_is_printed_for_a_legal_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--strategy", "ring", "--cp", "4", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert math.isclose(1.75, answer["imbalance_total"], abs_tol=1e-4)

    assert call("--strategy", "p2p", "--cp", "4") == 0  # an alias
    captured = capsys.readouterr()
    assert re.search(r"imbalance +1\.7500 ", captured.out)
    assert re.search(r"imbalance, lockstep +1\.7500 ", captured.out)
    assert captured.err == ""


def test_degrees_equal_rows_and_better_placements_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("--cp", "6", "--seqlen", "1248", "--heads-q", "12", "--heads-kv", "6") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the same plan: zigzag, double_ring:inner=6" in printed
    assert "equal in all but memory: ulysses, usp:6x1" in printed
    found = re.search(
        r"allgather: more even with --strategy allgather:placement=(\w+) --cp 6 "
        r"\(imbalance ([\d.]+), not ([\d.]+)\)",
        printed,
    )
    assert found is not None
    assert call("--strategy", f"allgather:placement={found[1]}", "--cp", "6", "--json") == 0
    assert float(found[2]) < 1.01
    assert float(found[3]) > 1.8

    capsys.readouterr()
    assert call("--cp", "6", "--pattern", "full", "--seqlen", "1248") == 0
    assert "more even" not in capsys.readouterr().out


def test_one_strategy_says_what_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cp", "8", "--seqlen", "4k", "--strategy", "grid")
    assert call(*words) == 0
    printed = capsys.readouterr().out
    assert call(*words, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    both = [answer["resolved"], answer["resolved_backward"]]
    assert len(set(both)) == 2
    assert all(re.fullmatch(r"grid:rows=\d+", text) for text in both)
    for text in both:
        assert text in " ".join(printed.split())


def test_no_formula_is_claimed_or_missed_for_the_volume_of_a_layer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--strategy", "ring", "--cp", "2", "--seqlen", "66", "--heads-q", "6")
    assert call(*words, "--heads-kv", "2", "--head-dim", "8", "--scope", "layer") == 0
    text = capsys.readouterr().out
    assert "closed forms cover attention" in " ".join(text.split())
    assert "no closed form" not in " ".join(text.split())


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", [(), ("--strategy", "usp"), ("--strategy", "grid:rows=3")])
def test_answers_fit_the_terminal_and_nothing_is_cut(
    columns: int,
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    call("--cp", "12", "--heads-q", "40", "--heads-kv", "8", *words)
    printed = capsys.readouterr().out
    assert columns - 30 < max(map(len, printed.splitlines())) <= columns
    assert "…" not in printed
    # What is in a column reads on in it: words are broken only where they are no words.
    for word in ("double_ring:inner=4", "arXiv:2310.01889,", "accumulator", "--strategy"):
        compact = "".join(printed.split())
        assert (word in printed) == (word in compact) or ":" in word


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


@pytest.mark.parametrize("words", [[], ["--strategy", "ring"], ["--json"]])
def test_a_pattern_in_which_nothing_is_attended_is_explained(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "zero.txt"
    table.write_text("000\n000\n")
    shape = ["--cp", "3", "--seqlen", "97", "--heads-q", "6", "--heads-kv", "2"]
    assert call("--pattern", f"table:file={table}", *shape, *words) == 0
    assert "ring" in capsys.readouterr().out


def test_placements_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--placements", "--pattern", "documents:lengths=1500+400+100", "--seqlen", "2000"]
    words += ["--heads-q", "6", "--heads-kv", "2", "--cp", "4"]
    assert call(*words, "--strategy", "owner", "--json") == 0
    body = json.loads(capsys.readouterr().out)
    rows = {
        row["strategy"].partition("placement=")[2].partition(",")[0]: row
        for row in body["rows"]
        if not row["padded"]
    }
    assert list(rows) == ["", "zigzag", "stripe", "balanced", "documents", "ptrr"]
    assert rows["balanced"]["imbalance_total"] < 1.02
    assert rows[""]["imbalance_total"] > 1.5
    assert rows["balanced"]["received_bytes"] < rows["stripe"]["received_bytes"]
    assert body["fastest"] == min(body["rows"], key=lambda row: row["seconds"])["strategy"]
    assert body["padding_tokens"] == (8 - 1500 % 8) % 8 + (8 - 400 % 8) % 8 + (8 - 100 % 8) % 8
    (padded,) = (row for row in body["rows"] if row["padded"])
    assert padded["strategy"] == "owner:placement=documents, each padded to a multiple of 8"
    longer = [
        "--pattern",
        "documents:lengths=1504+400+104",
        "--seqlen",
        "2008",
        *words[5:],
        "--json",
    ]
    assert call("--strategy", "owner:placement=documents", *longer) == 0
    volume = json.loads(capsys.readouterr().out)["volume_bytes"]
    assert padded["received_bytes_most"] == volume > rows["documents"]["received_bytes_most"]
    alone = ["--strategy", body["rows"][3]["strategy"], *words[1:], "--json"]
    assert call(*alone) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["imbalance_total"] == rows["balanced"]["imbalance_total"]
    assert again["volume_bytes"] == rows["balanced"]["received_bytes_most"]

    assert call(*words, "--strategy", "owner") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"fastest by prediction on h100-hamming: {body['fastest']}" in printed
    assert "of the bound on their deal" in printed
    with pytest.raises(ValueError, match=r"--placements is of one strategy; add --strategy"):
        call(*words)
    with pytest.raises(ValueError, match=r"ulysses: it has no options placement"):
        call(*words, "--strategy", "ulysses")


def test_one_strategy_says_where_its_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--strategy", "zigzag", "--cp", "3", "--seqlen", "301", "--cluster", "a800"]
    assert cli.main(["explain", *words, "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["time"]
    assert times.pop("cluster") == "a800"
    assert set(times) == {"forward", "backward"}
    for time in times.values():
        assert sum(time["terms_s"].values()) == pytest.approx(time["time_s"], rel=1e-12)
    assert cli.main(["explain", *words]) == 0
    assert capsys.readouterr().out.count("even compute") == 4
