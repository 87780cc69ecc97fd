"""The verb `list`."""

import argparse
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from harness.cluster.presets import CLUSTERS
from harness.commands import listing
from harness.plan.problem import Dtype
from harness.planning.options import COMMON_OPTIONS, LAYER_OPTIONS, Common, options_of
from harness.training.named_models import MODELS
from patterns import PATTERNS, make_pattern
from strategies import EVERY_STRATEGY, STRATEGIES, strategy

ROOT = Path(__file__).parents[3]


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
    entries = json.loads(capsys.readouterr().out)["strategies"]
    for entry in entries:
        for alias in entry["aliases"]:
            assert entry["name"] == strategy(alias).strategy.name
        for option in entry["options"]:
            typed = {
                "a whole number": "3",
                "seconds": "3.5",
                "GiB": "0.75",
                "names joined by +": "node+device",
                "whole numbers joined by +": "2+1",
            }
            values = [typed.get(value, value) for value in option["values"].split(" or ")]
            for value in values:
                text = f"{entry['name']}:{option['name']}={value}"
                chosen = strategy(text)
                assert str(getattr(chosen.options, option["name"])).lower() == value
                assert chosen.text == (entry["name"] if value == option["default"] else text)
    assert "p2p" in entries[0]["aliases"]


def test_a_pattern_comes_with_its_picture_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("patterns", "--json") == 0
    patterns = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)["patterns"]}

    assert patterns["star"]["parameters"] == {"blocks": "4"}
    assert make_pattern("star", 512).picture(16) == patterns["star"]["picture"]
    assert patterns["documents"]["parameters"]["lengths"] is None
    sample = f"documents:{patterns['documents']['pictured']}"
    assert make_pattern(sample, 512).picture(16) == patterns["documents"]["picture"]
    assert patterns["table"]["picture"] is None


def test_every_option_of_every_strategy_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("strategies", "--json") == 0
    entries = json.loads(capsys.readouterr().out)["strategies"]
    listed = {entry["name"]: {option["name"] for option in entry["options"]} for entry in entries}

    assert listed == {
        name: {field.name for field in fields(found.defaults)}
        for name, found in EVERY_STRATEGY.items()
    }
    assert {*COMMON_OPTIONS, *LAYER_OPTIONS} == set(options_of(Common))


def test_what_every_strategy_takes_of_layers_is_listed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("strategies") == 0
    out = capsys.readouterr().out
    for name in LAYER_OPTIONS:
        assert out.count(f"  {name}=") == 1
    assert "none or attention or layer (default: none)" in " ".join(out.split())


@pytest.mark.parametrize("columns", [80, 200])
def test_names_summaries_values_and_pictures_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert call() == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()

    for name in (*EVERY_STRATEGY, *PATTERNS, *Dtype):
        assert any(line.startswith(f"{name} ") for line in lines), name
    assert "██▓░············" in captured.out
    words = " ".join(captured.out.split())
    assert "lengths (this or preset must be given)" in words
    assert "file (must be given)" in words
    assert "or documents or ptrr (default: zigzag)" in words
    assert "arXiv:2310.01889" in words
    assert 60 < max(map(len, lines)) <= columns
    assert captured.err == ""


def test_every_cluster_is_listed_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("clusters", "--json") == 0
    entries = {e["name"]: e for e in json.loads(capsys.readouterr().out)["clusters"]}
    assert list(entries) == list(CLUSTERS)
    assert {"dgx-h100", "h200"} < set(entries)
    assert entries["h800"]["errors"] == CLUSTERS["h800"].fitted.errors
    assert entries["h100-8x8"]["errors"] == {}


def test_a_cluster_without_expected_error_says_whether_anything_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("clusters") == 0
    printed = {part.split()[0]: part for part in capsys.readouterr().out.split("\n\n") if part}
    said = {name: " ".join(text.split()) for name, text in printed.items()}
    for name, found in CLUSTERS.items():
        known = found.fitted is not None and bool(found.fitted.validated)
        assert bool(re.search(r"expected error \d+% to", said[name])) == known
        assert ("nothing was measured" in said[name]) == (name in ("dgx-h100", "h200"))
    report = re.search(r"no expected error of plans: .* (results/\S+\.md)", said["local-cpu"])
    assert report is not None
    assert "predicted against measured" in (ROOT / report[1]).read_text().lower()


def test_every_model_is_listed_with_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("models", "--json") == 0
    entries = {e["name"]: e for e in json.loads(capsys.readouterr().out)["models"]}
    assert list(entries) == list(MODELS)
    assert entries["llama3-8b"]["parameters"] == 8_030_261_248
    assert call("models") == 0
    assert "heads=32/8" in " ".join(capsys.readouterr().out.split())


def test_one_kind_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("dtypes") == 0
    printed = capsys.readouterr().out

    assert "bfloat16" in printed
    assert "zigzag" not in printed


def test_an_unknown_kind_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        call("colours")
    assert stop.value.code == 2
    assert capsys.readouterr().out == ""


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--help")
    assert "  python -m harness list" in capsys.readouterr().out
