"""Files that verbs write: never over what is read, never two under one name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import cli
from harness.terminal.targets import require_apart


def test_outputs_of_their_own_and_devices_are_taken(tmp_path: Path) -> None:
    """Different files are fine; a device takes what two flags write."""
    require_apart({"-o": tmp_path / "a", "--svg": tmp_path / "b"}, [tmp_path / "c"])
    require_apart({"-o": Path("/dev/null"), "--svg": Path("/dev/null")})
    require_apart({"-o": None, "--svg": None}, [tmp_path / "c"])


def test_link_to_what_is_read_is_refused(tmp_path: Path) -> None:
    """Another name of one file is found out."""
    (tmp_path / "records").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "records")
    with pytest.raises(ValueError, match=r"--csv .* is read, too; name another file"):
        require_apart({"--csv": tmp_path / "link"}, [tmp_path / "records"])


def _report(folder: Path) -> list[str]:
    (folder / "records.jsonl").write_text("")
    return ["report", str(folder), "-o", str(folder / "records.jsonl")]


def _compared(folder: Path) -> list[str]:
    (folder / "records.jsonl").write_text("")
    (folder / "other.jsonl").write_text("")
    other = str(folder / "other.jsonl")
    return ["report", str(folder), "--csv", other, "--compare", other]


def _two(verb: str) -> Callable[[Path], list[str]]:
    return lambda folder: [verb, "-o", str(folder / "x"), "--svg", str(folder / "y/../x")]


def _two_tables(folder: Path) -> list[str]:
    (folder / "records.jsonl").write_text("")
    return ["report", str(folder), "--markdown", str(folder / "x"), "--csv", str(folder / "x")]


@pytest.mark.parametrize(
    "words",
    [_report, _compared, _two_tables, _two("plan"), _two("trace")],
    ids=["results", "compared", "tables", "plan", "trace"],
)
def test_verbs_refuse_before_they_write(
    words: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report over its own records would lose a campaign."""
    (tmp_path / "y").mkdir()
    line = words(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert cli.main(line) == 2
    assert "name another file to write" in " ".join(capsys.readouterr().err.split())
    after = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert after == before


def test_plan_is_not_drawn_over_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--load` reads what `--svg` would write."""
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert cli.main(["plan", "--load", str(plan), "--svg", str(plan)]) == 2
    assert "--svg" in capsys.readouterr().err
    assert plan.read_text() == "{}"


def test_message_names_the_flag_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drawing that cannot be written is not called the output."""
    target = tmp_path / "none" / "x.svg"
    words = "plan --strategy ring --cp 2 --seqlen 34 --heads 3/1 --head-dim 5 --svg"
    assert cli.main([*words.split(), str(target)]) == 2
    assert "--svg" in capsys.readouterr().err
