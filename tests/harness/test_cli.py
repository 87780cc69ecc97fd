"""The command line: wrong calls answered in a line, and errors in a user's words."""

import errno
from pathlib import Path

import pytest

from harness import cli
from harness.commands import explain
from harness.errors import MeasurementError, told


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a wrong call says."""
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(cli.main(words))
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep", "--cp", "0"], "sweep: argument --cp: (0) must be a whole number of at least 1"),
        (["sweep", "--seqlen", "-4k"], "sweep: argument --seqlen: length (-4k) must be like 1000"),
        (["explain", "--seqlen", "-3"], "explain: argument --seqlen: length (-3) must be like"),
        (["explain", "--cp"], "explain: argument --cp: expected one argument"),
        (["explain", "--nope"], "explain: unknown arguments: --nope"),
        (
            ["explain", "--strategy", "peer:yunchang/usp"],
            "explain: argument --strategy: peer:",
        ),
        (["list", "dtypes", "else"], "list: unknown arguments: else"),
        (["explain", "--cp", "99999"], "explain: argument --cp: cp (99999) must be at most 1024"),
        (["sweep", "--cp", "2,99999"], "sweep: argument --cp: cp (99999) must be at most 1024"),
        (["nope"], "python -m harness: argument VERB: invalid choice: 'nope'"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(words, capsys)
    assert text.startswith(said)
    assert text.endswith("--help` shows the flags\n")
    assert text.count("\n") == 1


def test_without_a_verb_all_verbs_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused([], capsys)
    assert "doctor" in text
    assert "Exit status: 0" in " ".join(text.split())


def test_a_negative_number_is_a_value_and_a_flag_stays_a_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "expected one argument" in refused(["sweep", "--seqlen", "--json"], capsys)
    assert "(-2) must be a positive number" in refused(["sweep", "--memory", "-2"], capsys)


@pytest.mark.parametrize(
    ("draft", "wanted"),
    [
        ("summary.csv.new", "summary.csv"),
        ("plan.json.1234.tmp", "plan.json"),
        ("summary.csv", "summary.csv"),
    ],
)
def test_a_full_disk_names_the_file_that_was_wanted(
    draft: str, wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", f"out/{draft}")

    monkeypatch.setattr(explain, "problem_of", full)
    assert cli.main(["explain"]) == 1
    said = capsys.readouterr().err
    assert said == f"explain: No space left on device: out/{wanted}\n"


@pytest.mark.parametrize("verb", ["plan", "trace"])
def test_a_place_that_cannot_be_written_is_named_as_the_user_gave_it(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = tmp_path / "none" / "x.json"
    words = ["--strategy", "ring", "--cp", "2", "--seqlen", "66", "-o", str(wanted)]
    text = refused([verb, *words], capsys)
    assert f"({wanted}) must be a file that can be written: No such file" in text
    assert ".tmp" not in text


def test_too_large_a_problem_is_no_crash(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(_: object) -> int:
        raise MemoryError("Unable to allocate 728 TiB")

    monkeypatch.setattr(explain, "problem_of", large)
    assert cli.main(["explain"]) == 1
    assert capsys.readouterr().err == (
        "explain: out of memory (Unable to allocate 728 TiB); choose a smaller problem\n"
    )


def test_errors_on_purpose_speak_for_themselves_and_others_give_their_kind() -> None:
    assert told(MeasurementError("rank 2 is gone")) == "rank 2 is gone"
    assert told(ValueError("cp (0) must be 1 or more")) == "cp (0) must be 1 or more"
    assert told(KeyError("q")) == "internal error, KeyError: 'q'"
