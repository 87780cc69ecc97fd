"""The verb `list`."""

import argparse
import json

import pytest

from harness.commands import listing
from harness.problem import Dtype
from patterns import PATTERNS, make_pattern
from strategies import EVERY_STRATEGY, STRATEGIES, strategy


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    listing.register(parser.add_subparsers())
    args = parser.parse_args(["list", *words])
    status: int = args.run(args)
    return status


def test_json_lists_every_strategy_pattern_and_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    body = json.loads(capsys.readouterr().out)

    assert list(EVERY_STRATEGY) == [entry["name"] for entry in body["strategies"]]
    layers_only = [e["name"] for e in body["strategies"] if e["scopes"] == ["layer"]]
    assert [name for name in EVERY_STRATEGY if name not in STRATEGIES] == layers_only
    assert list(PATTERNS) == [entry["name"] for entry in body["patterns"]]
    assert list(Dtype) == [entry["name"] for entry in body["dtypes"]]


def test_every_alias_and_option_listed_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("strategies", "--json") == 0
    values = {
        "prune": "true",
        "placement": "zigzag",
        "ulysses": "2",
        "ring_inside": "true",
        "inner": "2",
    }
    entries = json.loads(capsys.readouterr().out)["strategies"]
    for entry in entries:
        for alias in entry["aliases"]:
            assert entry["name"] == strategy(alias).strategy.name
        for option in entry["options"]:
            if option in values:
                assert strategy(f"{entry['name']}:{option}={values[option]}")
    assert "p2p" in entries[0]["aliases"]


def test_a_pattern_comes_with_its_picture_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("patterns", "--json") == 0
    patterns = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["patterns"]}

    assert patterns["star"]["parameters"] == {"blocks": "4"}
    assert make_pattern("star", 512).picture(16) == patterns["star"]["picture"]
    assert patterns["documents"]["parameters"]["lengths"] is None
    assert patterns["documents"]["picture"] is None


def test_tables_show_names_summaries_and_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    captured = capsys.readouterr()

    for name in (*EVERY_STRATEGY, *PATTERNS, *Dtype):
        assert f"│ {name} " in captured.out
    assert "██▓░············" in captured.out
    assert "lengths (must be given)" in captured.out
    assert captured.err == ""


def test_one_kind_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("dtypes") == 0
    printed = capsys.readouterr().out

    assert "bfloat16" in printed
    assert "zigzag" not in printed


def test_an_unknown_kind_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        call("clusters")
    assert stop.value.code == 2
    assert capsys.readouterr().out == ""


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--help")
    assert "  python -m harness list" in capsys.readouterr().out
