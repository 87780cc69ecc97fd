"""The verb `explain --model`: its JSON, its table with a bar, its refusals."""

import argparse
import json
import re

import pytest

from harness.commands import explain
from harness.commands.explain_model import bar
from harness.training.answer import Answer
from harness.training.footprint import Footprint

M = 2**20
GIB = 2**30


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    explain.register(parser.add_subparsers())
    args = parser.parse_args(["explain", *words])
    status: int = args.run(args)
    return status


def test_one_strategy_has_its_longest_context_its_parts_and_its_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "llama3-8b", "--cluster", "h100-1x8", "--max-context"]
    assert call(*words, "--strategy", "upipe", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_context"] == {"upipe": 5 * M}
    assert found["limited_by"] == {"upipe": "gpu"}
    assert found["gpu_limit_bytes"] == 80 * 10**9
    (one,) = found["strategies"]
    assert one["peak_bytes"] == sum(one["parts_bytes"].values()) <= found["gpu_limit_bytes"]
    assert one["step_s"] == pytest.approx(one["launch_s"] + one["linear_s"] + one["quadratic_s"])
    assert one["step_s"] == pytest.approx(sum(one["terms_s"].values()))
    assert found["max_context_by_column"]["algorithm"]["upipe"] >= 5 * M


def test_more_memory_or_smaller_steps_change_the_longest_context(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--model", "llama3-8b", "--max-context", "--strategy", "ulysses", "--json"]
    found = []
    for more in ([], ["--gpu-memory", "131"], ["--step", "256k"], ["--no-offload"]):
        assert call(*words, *more) == 0
        found.append(json.loads(capsys.readouterr().out)["max_context"]["ulysses"])
    base, larger, finer, resident = found
    assert base == 3 * M
    assert larger > base
    assert base < finer < base + M
    assert resident < base


def test_the_table_has_a_bar_for_each_and_fits_eighty_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(
        "harness.commands.explain_model.EVERY_STRATEGY", {"ulysses": 0, "fpdt": 0, "grid": 0}
    )
    assert call("--model", "llama3-8b", "--max-context") == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert re.search(r"^ulysses +3M +4M +4M +66.2 +W+R+s+g+r+a+k+\.+ +\d+", printed, re.M)
    assert re.search(r"^fpdt +4Mh ", printed, re.M)
    assert re.search(r"^grid +\dM\* ", printed, re.M)  # no released code is known
    assert "one limit for all: 74.5 GiB a GPU" in printed.replace("\n", "")
    said = "s a step: a training step at each row's own longest context"
    assert said in " ".join(printed.split())


def test_where_no_context_fits_the_status_is_1_and_the_limit_has_its_digits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.commands.explain_model.EVERY_STRATEGY", {"ulysses": 0, "grid": 0})
    words = ["--model", "llama3-8b", "--max-context", "--gpu-memory"]
    assert call(*words, "1e-3", "--host-memory", "0.25") == 1
    captured = capsys.readouterr()
    assert len(re.findall("does not fit$|does not fit +$", captured.out, re.M)) == 2
    assert "0.001 GiB a GPU (0.25 GiB a host)" in captured.out.replace("\n", " ")
    assert captured.err.endswith(
        "explain: no context fits, not even 1M tokens; give more --gpu-memory or a smaller --step\n"
    )
    assert call(*words, "1e-3", "--strategy", "ulysses") == 1
    with pytest.raises(ValueError, match=r"--gpu-memory \(1e-10 GiB\) must be a byte or more"):
        call(*words, "1e-10")


def test_at_one_length_there_are_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama3-8b", "--seqlen", "3m", "--strategy", "upipe"]
    assert call(*words) == 0
    assert re.search(r"^upipe +51\.2 ", capsys.readouterr().out, re.M)


def test_what_a_strategy_cannot_do_is_a_row_with_the_reason_and_status_1_if_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = "hidden=24,layers=3,heads=4/2,head_dim=4,ffn=56,vocab=100,rotary=10000"
    assert call("--model", few, "--seqlen", "64k", "--strategy", "ulysses") == 1
    printed = capsys.readouterr().out
    assert "illegal" in printed
    assert "must not exceed heads_q (4)" in printed


@pytest.mark.parametrize("words", [["--max-context"], ["--cluster", "h100-1x8"]])
def test_flags_of_a_model_need_a_model(words: list[str]) -> None:
    with pytest.raises(ValueError, match="add --model"):
        call(*words)


def test_the_bar_is_full_at_the_limit_and_says_when_it_is_passed() -> None:
    parts = {"states": 10 * GIB, "saved": 5 * GIB, "workspace": 5 * GIB}
    found = Answer(name="x", strategy="x", at=Footprint(phase="loss", parts=parts, host_bytes=0))
    assert bar(found, 20 * GIB) == "W" * 11 + "s" * 5 + "k" * 6
    assert bar(found, 40 * GIB).count(".") == 11
    assert bar(found, 29 * GIB) == "W" * 8 + "s" * 3 + "k" * 4 + "." * 7  # 7.6, 11.4, 15.2
    assert bar(found, 10 * GIB).endswith(">")
