"""`--model` in sweep and check: a model's layers; and the memory columns of records."""

import argparse
import json
from pathlib import Path

import pytest

from harness.commands import check, sweep


def call(verb: object, *words: str) -> int:
    parser = argparse.ArgumentParser()
    verb.register(parser.add_subparsers())
    args = parser.parse_args(list(words))
    status: int = args.run(args)
    return status


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert call(sweep, "sweep", "--mode", "simulate", "--dry-run", "--json", *words) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_a_model_gives_a_sweep_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    cells = dry(capsys, "--model", "qwen3-32b", "--strategies", "upipe", "--cp", "8")
    shapes = {
        tuple(cell[k] for k in ("heads_q", "heads_kv", "head_dim", "hidden", "rotary", "scope"))
        for cell in cells
    }
    assert shapes == {(64, 8, 128, 5120, 1e6, "layer")}


def test_flags_beside_a_model_win(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama3-8b", "--heads", "16/4", "--strategies", "ulysses", "--cp", "8")
    assert {(cell["heads_q"], cell["head_dim"]) for cell in dry(capsys, *words)} == {(16, 128)}


def test_records_say_what_the_algorithm_needs_beside_what_is_held(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--model", "llama3-8b", "--strategies", "upipe,ulysses", "--cp", "8", "--json"]
    words += ["--seqlen", "64k", "--pattern", "causal", "-o", str(tmp_path), "--jobs", "1"]
    words += ["--cluster", "h100-1x8,dgx-h100"]
    assert call(sweep, "sweep", "--mode", "simulate", *words) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 8
    for entry in records:
        assert 0 < entry["peak_bytes_algorithm"] < entry["peak_bytes"]
    by_cluster: dict[tuple[str, str], set[int]] = {}
    for entry in records:
        key = entry["strategy"], entry["direction"]
        by_cluster.setdefault(key, set()).add(entry["peak_bytes_algorithm"])
    assert all(len(peaks) == 1 for peaks in by_cluster.values())
    assert "peak_bytes_algorithm" in (tmp_path / "summary.csv").read_text()


def test_check_takes_a_models_heads(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama3-8b,heads=8/2,head_dim=4", "--strategies", "upipe", "--cp", "4"]
    words += ["--dtype", "float64", "--seqlen", "29", "--patterns", "causal", "--jobs", "1"]
    assert call(check, "check", *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    cells = found if isinstance(found, list) else found["cells"]
    assert cells
    for cell in cells:
        shape = cell["heads_q"], cell["heads_kv"], cell["head_dim"], cell["rotary"]
        assert shape == (8, 2, 4, 5e5)
        assert (cell["scope"], cell["status"]) == ("layer", "passed")
