"""The table of device tilings: what it solves, prints and calls a failure."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_device_tiles.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_device_tiles", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_device_tiles"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bench = load()


def test_every_group_has_its_cases() -> None:
    counts = Counter(case.group for case in bench.cases())
    assert counts == {"published": 32, "known": 13, "proofs": 44, "large": 9}


def test_a_table_tells_value_bound_and_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--group", "known", "--match", "full"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "known"
    assert [line.split()[:9] for line in out[2:5]] == [
        ["full", "4", "4", "16", "forward", "4", "4", "4", "0%"],
        ["full", "8", "8", "64", "forward", "8", "8", "8", "0%"],
        ["full", "16", "16", "256", "forward", "12", "12", "12", "0%"],
    ]
    assert out[5].startswith("3 of 3 proved; median")


def test_json_is_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--group", "published", "--match", "column, diagonal fixed", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["instance"], row["value"], row["bound"], row["status"]) for row in rows] == [
        ("global_local, 2 nodes, column, diagonal fixed", 14, 14, "optimal"),
        ("global_local, 4 nodes, column, diagonal fixed", 8, 8, "optimal"),
        ("global_local, 8 nodes, column, diagonal fixed", 7, 7, "optimal"),
    ]


def test_a_missed_value_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "KNOWN", [("full", 4, 4, bench.FWD, 3)])
    assert bench.main(["--group", "known"]) == 1
    assert "worse than known: full" in capsys.readouterr().out
