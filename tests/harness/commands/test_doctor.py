"""The verb `doctor`."""

import argparse
import json

import pytest

from harness.commands import doctor
from harness.commands.parts import machine_facts
from harness.commands.parts.machine_facts import Finding, State

FACTS: dict[str, object] = {
    "python": "3.12.1",
    "system": "Linux",
    "cpu": "Some CPU",
    "cores": 2,
    "memory_bytes": 8 * 2**30,
    "memory_available_bytes": 2 * 2**30,
    "commit": "abc",
    "dirty": True,
    "variables": {"OMP_NUM_THREADS": "1"},
}
FINDINGS = [
    Finding("torch", State.OK, "2.0", "everything"),
    Finding("matplotlib", State.MISSING, "not installed", "plots", "pip install matplotlib"),
    Finding("gloo", State.BROKEN, "no port", "processes", "open a port"),
]


@pytest.fixture(autouse=True)
def examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "examine", lambda: (FACTS, FINDINGS))


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.register(parser.add_subparsers())
    args = parser.parse_args(["doctor", *words])
    status: int = args.run(args)
    return status


def test_what_is_missing_is_told_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    captured = capsys.readouterr()

    assert "matplotlib: pip install matplotlib" in captured.out
    assert "gloo: open a port" in captured.out
    assert "torch:" not in captured.out
    assert "8.0 GiB, 2.0 GiB free" in captured.out
    assert "OMP_NUM_THREADS=1" in captured.out
    assert "abc, with changes" in captured.out
    assert captured.err == ""


def test_json_has_facts_and_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    body = json.loads(capsys.readouterr().out)

    assert body["environment"] == FACTS
    assert body["findings"] == [finding.as_json() for finding in FINDINGS]
    assert body["findings"][1]["remedy"] == "pip install matplotlib"


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call("--help")
    assert "  python -m harness doctor --json" in capsys.readouterr().out
