"""What is kept between runs, and what makes it stale."""

import os
import shutil
from pathlib import Path

import pytest

from harness import caching
from harness.caching import cache_folder, code_hash, keep, kept_by_this_code


def test_a_folder_of_ones_own_goes_before_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    monkeypatch.delenv("CPBENCH_CACHE", raising=False)
    assert cache_folder() == tmp_path / "users" / "cpbench"
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("package", ["harness", "patterns", "strategies"])
def test_any_change_of_the_code_makes_what_it_kept_stale(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(caching.__file__).parents[1]
    for name in ("harness", "patterns", "strategies"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(caching, "__file__", str(tmp_path / "harness" / "caching.py"))
    before = code_hash.__wrapped__()
    assert before == code_hash()  # a copy is the same code
    changed = sorted((tmp_path / package).rglob("*.py"))[-1]
    changed.write_text(changed.read_text() + "\n# another line\n")
    assert code_hash.__wrapped__() != before


def test_the_two_newest_states_of_the_code_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, state in enumerate(("newest", "middle", "oldest")):
        monkeypatch.setattr(caching, "code_hash", lambda state=state: state)
        keep(tmp_path, "answer", state.encode())
        when = 1e9 - 100 * age
        for at in (tmp_path / state / "answer", tmp_path / state):
            os.utime(at, (when, when))
    monkeypatch.setattr(caching, "code_hash", lambda: "now")
    assert kept_by_this_code(tmp_path, "answer") is None
    keep(tmp_path, "answer", b"now")
    assert kept_by_this_code(tmp_path, "answer") == b"now"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "now"]
