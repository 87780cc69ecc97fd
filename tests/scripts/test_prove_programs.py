"""The script that proves device programs: what it prints, and that it sees what is wrong."""

import json

import pytest

from harness.errors import DeviceProgramError
from scripts import prove_programs


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_programs, "QUICK_CPS", (3,))
    monkeypatch.setattr(prove_programs, "QUICK_PATTERNS", ("window",))
    monkeypatch.setattr(prove_programs, "EVERY_STRATEGY", ("stripe", "fpdt", "ring-q"))
    monkeypatch.setattr(prove_programs, "MUTATED", ("usp:2x2", "stripe"))
    monkeypatch.setattr(prove_programs, "RUNS", 12)


def test_the_report_counts_programs_and_mutants(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove_programs.main(["--quick", "--json", "--mutants", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == []
    assert (found["programs"], found["proved"]) == (10, 10)  # fpdt has layers only
    assert (found["mutants"], found["caught"]) == (4, 2)
    assert sum(found["kinds"].values()) == 4
    assert found["seconds"] > 0


def test_a_proof_that_refuses_or_lets_pass_everything_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceProgramError("nothing is right", rank=None)

    monkeypatch.setattr(prove_programs, "RUNS", 6)
    monkeypatch.setattr(prove_programs, "check_program", refuse)
    assert prove_programs.main(["--quick", "--mutants", "4"]) == 1
    assert "nothing is right" in capsys.readouterr().out
    monkeypatch.setattr(prove_programs, "check_program", lambda *_: None)
    assert prove_programs.main(["--quick", "--mutants", "4"]) == 1
    assert "proved, but runs differ" in capsys.readouterr().out
