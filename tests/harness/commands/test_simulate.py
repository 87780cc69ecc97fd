import json
from pathlib import Path

import pytest

from harness import cli
from harness.cluster.calibration import FOLDER
from harness.cluster.effects import ALL, SAID
from harness.cluster.presets import CLUSTERS
from harness.commands.simulate import _NEGATIVE

SMALL = ("simulate", "--strategy", "zigzag", "--cp", "4", "--seqlen", "8k", "--heads-q", "6")


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_every_cluster_is_accepted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--cluster", name, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["time_s"] > 0
    fitted = CLUSTERS[name].fitted
    assert body["calibration_id"] == (fitted.id if fitted else None)
    assert (body["inside_range"] is None) is (fitted is None)


def test_an_unknown_cluster_is_refused_with_the_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*SMALL, "--cluster", "b200"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in CLUSTERS)


def test_a_file_is_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "a800.toml").read_text())
    both = []
    for name in ("a800", str(path)):
        assert cli.main([*SMALL, "--cluster", name, "--json"]) == 0
        both.append(json.loads(capsys.readouterr().out))
    assert both[0] == both[1]


def test_a_plan_that_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    for length, fits in (("8k", True), ("16m", False)):
        words = ["simulate", "--strategy", "ulysses", "--cp", "8", "--seqlen", length]
        words += ["--heads-q", "128", "--cluster", "h100-1x8"]
        assert cli.main([*words, "--json"]) == 0
        body = json.loads(capsys.readouterr().out)
        room = CLUSTERS["h100-1x8"].gpu.memory_bytes
        assert (body["peak_bytes"] <= room) is fits
        assert (body["shortage"] is None) is fits
        assert cli.main(words) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("It would not run: the fullest rank needs" in shown) is not fits


def test_each_effect_has_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--cluster", "a800", "--runtime", "eager-torch", "--explain"]
    assert cli.main([*words, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert set(body["adds_s"]) == {effect.value for effect in ALL}
    assert body["adds_s"]["host"] > 0
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "expected error" in " ".join(shown.split())
    assert all(f"  {SAID[effect]}\n" in shown for effect in ALL)
    assert max(map(len, shown.splitlines())) <= 80
    negative = any(seconds < 0 for seconds in body["adds_s"].values())
    assert (_NEGATIVE[:40] in " ".join(shown.split())) is negative
    title = "zigzag causal cp=4 S=8k heads=6/6 D=128 bfloat16 forward\non a800, eager-torch:"
    assert shown.startswith(title)


def test_an_effect_that_makes_a_run_shorter_is_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--strategy", "usp:4x4", "--cp", "16", "--seqlen", "128k", "--explain"]
    assert cli.main(["simulate", *words, "--cluster", "h100-hamming", "--json"]) == 0
    assert min(json.loads(capsys.readouterr().out)["adds_s"].values()) < 0
    assert cli.main(["simulate", *words, "--cluster", "h100-hamming"]) == 0
    assert _NEGATIVE in " ".join(capsys.readouterr().out.split())


def test_a_datasheet_has_no_effects_to_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--cluster", "h100-8x8", "--explain"]) == 2
    assert "choose from h100-hamming" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "h800"), "--from-logs"),
        (("--from-logs", "."), "--cluster"),
        (("--from-logs", "nowhere", "--cluster", "h800"), "folder"),
        (("--check", "nowhere.toml"), "cannot be read"),
    ],
)
def test_a_wrong_call_of_calibrate_says_what_is_missing(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", *words]) == 2
    assert said in capsys.readouterr().err
