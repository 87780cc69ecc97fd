"""Answers on terminals of any width."""

import pytest

from harness import cli

WORDS = "recommend --heads 3/1 --head-dim 8 --seqlen 34 --cp 1 --memory 0.0000001"


@pytest.mark.parametrize("columns", [1, 10])
def test_answer_is_printed_where_hardly_a_word_fits(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal narrower than the labels is no wrong call."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(WORDS.split()) == 1
    shown = capsys.readouterr()
    assert "".join(shown.out.split()).find("Nothingruns.") >= 0
    assert shown.err == ""
