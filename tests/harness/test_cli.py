"""The command line: wrong calls answered in a line, and errors in a user's words."""

import errno
import json
import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.commands import explain
from harness.errors import MeasurementError, told
from strategies.ultraattn import strategy as ultraattn
from tests.harness.ranks.test_team import ROOT


def refused(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """What a wrong call says, in one line; it is printed in lines that fit."""
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(cli.main(words))
    assert stop.value.code == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(len(line) <= 80 or " " not in line.strip() for line in captured.err.splitlines())
    return " ".join(captured.err.split())


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
        (["doctor", "else"], "doctor: unknown arguments: else"),
        (
            ["explain", "--cp", "99999"],
            "explain: argument --cp: (99999) must be a whole number of at least 1 and at most 1024",
        ),
        (
            ["sweep", "--cp", "2,99999"],
            "sweep: argument --cp: (99999) must be a whole number of at least 1 and at most 1024",
        ),
        (["nope"], "python -m harness: argument VERB: invalid choice: 'nope'"),
        (["plan", "--cp", "²"], "plan: argument --cp: (²) must be a whole number of at least 1"),
        (["sweep", "--jobs", "²"], "sweep: argument --jobs: (²) must be a whole number of at"),
        (["sweep", "--memory", "1_0"], "sweep: argument --memory: (1_0) must be a positive number"),
        (["sweep", "--memory", "1e300"], "sweep: argument --memory: (1e300) must be a positive"),
        (["plan", "--heads-q", "9" * 5000], f"plan: argument --heads-q: ({'9' * 24}...) must be a"),
        (["plan", "--batch", "9" * 4000], f"plan: argument --batch: ({'9' * 24}...) must be a"),
        (["simulate", "--head-dim", f"1{'0' * 24}"], "simulate: argument --head-dim: (1000000"),
        (["plan", "--seqlen", "1025m"], "plan: argument --seqlen: length (1025m) must be like"),
        (["plan", "--seqlen", "\u0661k"], "plan: argument --seqlen: length (\u0661k) must be like"),
        (
            ["check", "--transport", "foo"],
            "check: argument --transport: (foo) is unknown; choose local, gloo;",
        ),
        (
            ["check", "--transport", "nccl"],
            "check: argument --transport: (nccl) is unknown; choose local, gloo;",
        ),
    ],
)
def test_a_wrong_call_is_answered_in_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(words, capsys)
    assert text.startswith(said)
    assert text.endswith("--help` shows the flags")


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


@pytest.mark.parametrize("verb", ["plan", "trace", "check"])
def test_a_folder_or_nothing_where_a_file_is_wanted_is_said_before_the_work(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused([verb, "-o", str(tmp_path)], capsys)
    assert f"({tmp_path}) is a folder; it must be the name of a file" in text
    assert "() is empty; it must be the name of a file" in refused([verb, "-o", ""], capsys)


@pytest.mark.parametrize("words", [["sweep", "-o", ""], ["compare", "", "b"], ["plan", "--load="]])
def test_an_empty_name_is_no_folder(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "() must be the name of a file or a folder" in refused(words, capsys)


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


TOO_FEW_HEADS = ["--cp", "3", "--seqlen", "66"]


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--strategy", "ulysses", "--heads-q", "2"],
        ["simulate", "--strategy", "ulysses", "--heads-q", "2"],
        ["trace", "--strategy", "ulysses", "--heads-q", "2"],
        ["trace", "--strategy", "ring", "--cluster", "h100-1x8", "--cp", "16"],
    ],
)
def test_what_is_refused_gives_status_1_whichever_verb_is_asked(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused([words[0], *TOO_FEW_HEADS, *words[1:]], capsys, status=1)
    assert "must not exceed" in text
    assert "; try " in text


def test_an_illegal_strategy_and_a_sweep_of_nothing_legal_give_status_1_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["explain", "--strategy", "ulysses", "--heads-q", "2", *TOO_FEW_HEADS]
    assert cli.main(asked) == 1
    words = ["sweep", "--mode", "simulate", "--strategies", "ulysses", "--heads", "2/2"]
    words += ["--patterns", "causal", "--jobs", "1", "-o", str(tmp_path / "out")]
    assert cli.main([*words, *TOO_FEW_HEADS]) == 1
    assert "none of the 2 cells ran" in capsys.readouterr().err


@pytest.mark.parametrize("verb", sorted(cli._VERBS))
def test_help_fits_80_columns_and_its_commands_can_be_copied(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    _, _, examples = text.partition("example:\n")
    commands = examples.replace("\\\n", "").splitlines()
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        assert words[:3] == ["python", "-m", "harness"]
        cli.parser().parse_args(words[3:])


def test_a_search_is_announced_once_and_a_kept_plan_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path))
    words = ["simulate", "--strategy", "ultraattn:seconds=0.02", "--cp", "2", "--seqlen", "130"]
    for said in (1, 0):
        ultraattn._both.cache_clear()
        assert cli.main([*words, "--heads-q", "3"]) == 0
        text = " ".join(capsys.readouterr().err.split())
        assert text.count("ultraattn: searches for plans on 2 ranks, at most 0.02 s") == said
        assert text.count("ultraattn: plan stored in the cache") == said
        assert text.count("for each of some ten tilings and some ten schedules") == said
        assert "half a minute" not in text  # that is of many ranks
    words[2] = "ultraattn:levels=none"
    assert cli.main(words) == 0
    assert "searches" not in capsys.readouterr().err
    assert not logging.getLogger("strategies").handlers


def test_a_verb_that_says_how_far_it_is_does_not_tell_of_each_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path))
    ultraattn._both.cache_clear()
    words = "check --strategies ultraattn:seconds=0.02 --cp 2 --seqlen 131 --patterns causal"
    assert cli.main([*words.split(), "--dtype", "float64", "--heads", "3/1", "--jobs", "1"]) == 0
    captured = capsys.readouterr()
    assert "passed" in captured.out
    assert "searches" not in captured.err


def test_ctrl_c_while_torch_is_imported_is_answered_as_later(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException:\n"  # what some imports do
        "    pass\n"
    )
    words = [sys.executable, "-m", "harness", "check", "--strategies", "ring"]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130
    assert done.stderr == "check: interrupted; nothing was begun\n"


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--strategy", "ring", "--cp", "2", "--seqlen", "66", "-o", "plan.json"],
        ["trace", "--strategy", "ring", "--cp", "2", "--seqlen", "66", "-o", "plan.json"],
    ],
)
def test_a_closed_stdout_is_no_failure_and_the_file_is_written(
    words: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        f"{shlex.join([sys.executable, '-m', 'harness', *words])} >&-",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr.startswith("plan.json: written")
    assert json.loads((tmp_path / "plan.json").read_text())


def test_an_interpreter_without_the_packages_is_told_which_one_has_them() -> None:
    words = "import runpy; runpy.run_module('harness', run_name='__main__')"
    bare = subprocess.run(  # -S leaves out what was installed
        [sys.executable, "-S", "-c", words], capture_output=True, text=True, check=False
    )
    assert bare.returncode == 1
    assert "lacks numpy, psutil, rich, torch; use .venv/bin/python" in bare.stderr
    assert "Traceback" not in bare.stderr


def test_help_of_any_verb_loads_nothing_that_takes_seconds() -> None:
    script = (
        "import sys\n"
        "from harness import cli\n"
        "cli.parser()\n"
        "print([name for name in ('torch', 'matplotlib', 'pyscipopt') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_parser_of_one_verb_names_the_others_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser("list").parse_args(["nothing"])
    assert "'doctor'" in capsys.readouterr().err
