"""Published figures: read from their file, computed anew, judged, and shown with a verdict."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

import pytest

from harness.commands import reproduce as verb
from harness.reproduce import figures as module
from harness.reproduce.figures import Figure, figures, saved, tables
from strategies import EVERY_STRATEGY


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers())
    args = parser.parse_args(["reproduce", *words])
    status: int = args.run(args)
    return status


def figure(published: float | None, ours: float, tolerance: float) -> Figure:
    return Figure(
        table="t", what="w", published=published, ours=ours, tolerance=tolerance, source="s"
    )


def test_every_published_table_names_its_source_and_strategies_that_there_are() -> None:
    for table in tables("upipe"):
        assert table["source"]
        assert table["tolerance"] <= 0.12
        for name, row in table["rows"]:
            assert row or table["predict"]
            if table["what"] != "saved":
                assert set(name.split("/")) <= set(EVERY_STRATEGY)


def test_a_figure_holds_within_its_tolerance_and_an_exact_one_only_if_equal() -> None:
    assert figure(100, 105, 0.05).holds is True
    assert figure(100, 94.9, 0.05).holds is False
    assert figure(20, 20, 0).holds is True
    assert figure(20, 21, 0).holds is False
    assert figure(None, 21, 0).holds is None
    assert figure(None, 21, 0).error is None


@pytest.mark.parametrize(
    ("text", "share"), [("64/64 U=8 cp=8", 0.875), ("64/8 U=8 cp=8", 0.7), ("32/8 U=8 cp=8", 0.5)]
)
def test_buffers_are_saved_as_published_and_with_the_heads_that_there_are(
    text: str, share: float
) -> None:
    assert saved(text) == pytest.approx(share, abs=1e-12)


def test_the_quick_tables_come_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("upipe", "--table", "all-to-alls") == 0
    assert "4 of 4 figures are as published" in capsys.readouterr().out
    assert call("upipe", "--table", "memory of attention", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["published"] for row in found] == [33.0, 19.5]
    assert all(row["holds"] for row in found)


def test_a_figure_that_is_not_as_published_is_said_and_gives_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: Mapping[str, Any] = {
        "name": "all-to-alls",
        "source": "nobody",
        "what": "collectives",
        "model": "llama3-8b",
        "cluster": "h100-1x8",
        "tolerance": 0,
        "rows": [["ulysses", [4, 5]]],
    }
    monkeypatch.setattr(module, "tables", lambda _: [wrong])
    assert call("upipe") == 1
    printed = capsys.readouterr().out
    assert "OFF" in printed
    assert "1 of 2 figures are as published" in printed


def test_unknown_papers_and_tables_are_wrong_calls() -> None:
    with pytest.raises(ValueError, match="choose from upipe"):
        list(figures("nobody"))
    with pytest.raises(ValueError, match="matches no table"):
        call("upipe", "--table", "nothing like it")
