"""Every script says what it does and refuses what it does not know, before it does anything."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

from tests.harness.ranks.test_team import ROOT

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_help_and_refuses_what_it_does_not_know(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = loaded(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as helped:
        script.main()
    said = capsys.readouterr()

    assert helped.value.code == 0
    assert said.out.startswith(f"usage: {name}.py")

    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--data", ".", "--no-such-flag"])
    with pytest.raises(SystemExit) as refused:
        script.main()
    said = capsys.readouterr()

    assert refused.value.code == 2
    assert said.out == ""
    assert "--no-such-flag" in said.err


def test_planning_is_timed_at_growing_lengths_and_numbers_of_documents(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = loaded("bench_scaling", monkeypatch)
    few = ("--part", "documents", "--documents", "10,3000", "--part", "lengths", "--seqlen", "4m")
    status = script.main([*few, "--strategies", "ulysses", "--patterns", "window:left=4096"])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    ten, many = rows[2:4]

    assert status == 0  # 2 s for a window over 4M tokens on 64 ranks
    assert [int(cell) for cell in (ten[0], many[0])] == [10, 3000]
    for calls in range(2, 9, 2):  # for each strategy, calls of a rank: bounded by tiles
        assert int(many[calls]) < 100
    assert rows[-1][0].strip() == "ulysses"
    assert 0 < float(rows[-1][2]) < 2
