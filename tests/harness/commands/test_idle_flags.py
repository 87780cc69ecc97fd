"""Flags that nothing would heed, and values that are none: a wrong call, never silence."""

import shlex
from pathlib import Path

import pytest

from harness import cli
from harness.measure import traced_run
from harness.plan.tasks import Scope
from harness.ranks import team
from harness.records.config import Config

ROW = '{"config_hash": "a", "schema_version": 99, "status": "ok"}\n'


def said(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str]:
    """The status of a call, and what it says in one line."""
    try:
        status = cli.main(shlex.split(words))
    except SystemExit as error:  # argparse
        status = int(error.code or 0)
    return status, " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            "explain --strategy ring --gpu-memory 5",
            "--gpu-memory: these only apply to a whole model",
        ),
        ("explain --strategy ring --no-offload", "--offload: these only apply to a whole model"),
        ("explain --strategy ring --step 5", "--step: these only apply to a whole model"),
        ("explain --model llama3-8b --cp 4 --heads-q 4", "--heads-q, --cp: a model is trained"),
        ("explain --model llama3-8b --max-context --seqlen 7", "--seqlen: a model is trained"),
        ("explain --model llama3-8b --step 7", "add --max-context"),
        ("explain --model llama3-8b --gpu-memory inf", "(inf) must be a positive number"),
        ("explain --model llama3-8b --host-memory nan", "(nan) must be a positive number"),
        ("explain --model llama3-8b,layers=1e400", "layers (1e400) must be a whole number"),
        (
            "explain --model llama3-8b,ffn=\u0661",
            "ffn (\u0661) must be a whole number of at least 1",
        ),
        ("explain --model llama3-8b,rotary=nan", "rotary (nan) must be a positive number"),
        ("explain --model llama3-8b,heads=nan", "heads (nan) must be a whole number"),
        ("plan --load none.json --strategy usp", "--load already fixes --strategy"),
        ("plan --cluster a800 --gpus-per-node 4", "give one of them"),
        ("sweep --mode simulate --hidden 64 --dry-run", "require --scope layer"),
        ("sweep --mode simulate --rotary 100 --dry-run", "require --scope layer"),
        ("sweep --mode measure --cluster h800 --dry-run", "only apply to simulated cells"),
        ("sweep --mode measure --runtime graph --dry-run", "only apply to simulated cells"),
        (
            "trace --measured --cluster h800 --dispatch greedy",
            "--cluster, --dispatch: these only apply to a",
        ),
        (
            "trace --strategy ring --timeout 120",
            "--timeout (120) only applies to a measured run; add --measured",
        ),
        ("reproduce upipe --seconds 3", "--cluster and --seconds only apply to ultraattn"),
        ("check --repeat 3", "--repeat (3) only applies to real processes; add --transport gloo"),
        ("compare a b --threshold nan", "(nan) must be a positive number"),
        ("calibrate --check a.toml --cluster h800", "leave --from-logs and --cluster out"),
        ("calibrate -o no/such/folder/a.toml", "must be a file in a folder"),
        ("reproduce upipe --table nosuch", "choose from "),
        ("reproduce ultraattn --figure nosuch", "choose from mean speed-ups"),
    ],
)
def test_a_flag_that_nothing_heeds_is_a_wrong_call(
    capsys: pytest.CaptureFixture[str], words: str, rule: str
) -> None:
    status, text = said(capsys, words)
    assert status == 2
    assert rule in text


def test_logs_without_times_of_kernels_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys, f"calibrate --from-logs {tmp_path} --cluster h800")
    assert status == 2
    assert "kernel_times.csv" in text


@pytest.mark.parametrize("line", [ROW, '{"a": 1}\n'])
def test_records_of_something_else_are_refused_and_left_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(line)
    small = "--strategies ring --patterns causal --cp 3 --seqlen 50 --heads 6/2 --jobs 1"
    for words in (
        f"sweep --mode simulate --resume -o {tmp_path} {small}",
        f"compare {tmp_path} {tmp_path}",
        f"check -o {file} {small}",
    ):
        status, text = said(capsys, words)
        assert status == 2
        assert "record 1" in text
        assert file.read_text() == line


def test_a_measured_trace_of_a_layer_is_one_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the attention alone was timed, under the title of a layer."""

    class SeenError(Exception):
        pass

    class Crew:
        def __init__(self, cp: int) -> None:
            pass

        def __enter__(self) -> "Crew":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def seen(config: Config, *_: object) -> None:
        raise SeenError(config)

    monkeypatch.setattr(team, "Team", Crew)
    monkeypatch.setattr(traced_run, "traced", seen)
    words = "trace --measured --scope layer --hidden 48 --rotary 100 --cp 2 --seqlen 64 --heads-q 2"
    with pytest.raises(SeenError) as caught:
        cli.main([*words.split(), "--head-dim", "8"])
    config = caught.value.args[0]
    assert (config.scope, config.hidden, config.rotary) == (Scope.LAYER, 48, 100.0)
