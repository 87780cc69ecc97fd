"""The campaign against files that people bring, in short, and that it sees what is wrong."""

import sys
import time
from pathlib import Path

import pytest

from harness import cli
from scripts import hunt_files


def test_a_short_campaign_finds_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path / "cache"))
    for name, kind in hunt_files.kinds().items():
        ends, faults = hunt_files.hunt(name, kind, 12, 3, tmp_path)
        assert faults == []
        assert ends.total() == 12
    ends, faults = hunt_files.hunt_cache(10, 3, tmp_path / "cache")
    assert (ends["used"], faults) == (10, [])


def test_whole_files_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a campaign would only see refusals."""
    monkeypatch.setattr(hunt_files, "mutated", lambda text, _: text.encode())
    for name, kind in hunt_files.kinds().items():
        ends, _ = hunt_files.hunt(name, kind, 1, 1, tmp_path)
        assert ends["used"] == 1, name


def crash(_: object) -> int:
    raise ZeroDivisionError


def late(_: object) -> int:
    time.sleep(60)
    return 0


def escape(_: object) -> int:
    sys.stderr.write("\x1b[2J")
    return 2


def not_a_number(_: object) -> int:
    sys.stdout.write('{"time_s": NaN}')
    return 0


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (crash, "ZeroDivisionError at test_hunt_files.py"),
        (late, "not done after 0.2 s"),
        (escape, "stderr is not printable"),
        (not_a_number, "no JSON of finite numbers"),
        (lambda _: 1, "status 1 without a word"),
        (lambda _: 139, "status 139"),
    ],
)
def test_the_campaign_sees_what_is_wrong(
    verb: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "main", verb)
    end, fault = hunt_files.fault_of(("simulate", "--json"), 0.2)
    assert end == "fault"
    assert said in fault
