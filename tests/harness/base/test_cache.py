"""What is kept between runs, and what makes it stale."""

import json
import os
import shutil
from pathlib import Path

import pytest

from harness.base import cache
from harness.base.cache import (
    cache_folder,
    code_hash,
    keep,
    kept_by_this_code,
    read_kept,
    write_kept,
)


def test_a_folder_of_ones_own_goes_before_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    monkeypatch.delenv("CPBENCH_CACHE", raising=False)
    assert cache_folder() == tmp_path / "users" / "cpbench"
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_folder_of_ones_own_may_lie_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CPBENCH_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
    monkeypatch.setenv("CPBENCH_CACHE", "~no one has this name/own")
    assert cache_folder() == Path("~no one has this name/own")


def test_what_was_changed_after_it_was_kept_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plans" / "key.json"
    path.parent.mkdir()
    write_kept(path, b'{"cp": 3}\n')
    assert read_kept(path, json.loads) == {"cp": 3}
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert read_kept(path, json.loads) is None, at
        path.write_bytes(whole[:at])
        assert read_kept(path, json.loads) is None, at
    for other in (b"", b"\n", whole + b" ", whole.partition(b"\n")[2]):
        path.write_bytes(other)
        assert read_kept(path, json.loads) is None, other
    path.write_bytes(whole)
    assert read_kept(path, json.loads) == {"cp": 3}


def test_what_was_kept_at_another_place_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plans" / "key.json"
    path.parent.mkdir()
    write_kept(path, b"3")
    for folder, name in (("plans", "other.json"), ("tiles", "key.json")):
        other = tmp_path / folder / name
        other.parent.mkdir(exist_ok=True)
        shutil.copy(path, other)
        assert read_kept(other, json.loads) is None
    moved = shutil.copytree(tmp_path, tmp_path / "copy of all")
    assert read_kept(moved / "plans" / "key.json", json.loads) == 3


@pytest.mark.parametrize("content", ["[" * 10**5, "{", "[1]", '{"a": "b"}', '{"a": Infinity}'])
def test_what_cannot_be_read_is_not_there(content: str, tmp_path: Path) -> None:
    write_kept(tmp_path / "key.json", content.encode())
    assert read_kept(tmp_path / "key.json", lambda kept: int(json.loads(kept)["a"])) is None


@pytest.mark.parametrize("package", ["harness", "patterns", "strategies"])
def test_any_change_of_the_code_makes_what_it_kept_stale(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(cache.__file__).parents[2]
    for name in ("harness", "patterns", "strategies"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "harness" / "base" / "cache.py"))
    before = code_hash.__wrapped__()
    assert before == code_hash()  # a copy is the same code
    changed = sorted((tmp_path / package).rglob("*.py"))[-1]
    changed.write_text(changed.read_text() + "\n# another line\n")
    assert code_hash.__wrapped__() != before


def test_the_two_newest_states_of_the_code_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, state in enumerate(("newest", "middle", "oldest")):
        monkeypatch.setattr(cache, "code_hash", lambda state=state: state)
        keep(tmp_path, "answer", state.encode())
        when = 1e9 - 100 * age
        for at in (tmp_path / state / "answer", tmp_path / state):
            os.utime(at, (when, when))
    monkeypatch.setattr(cache, "code_hash", lambda: "now")
    assert kept_by_this_code(tmp_path, "answer", bytes) is None
    keep(tmp_path, "answer", b"now")
    assert kept_by_this_code(tmp_path, "answer", bytes) == b"now"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "now"]


def test_what_is_kept_stays_below_the_limit_and_what_was_used_last_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("CPBENCH_CACHE_MIB", "1")
    folder = tmp_path / "plans"
    folder.mkdir()
    others = folder / "notes.json", folder / "like ours.json"
    others[0].write_bytes(bytes(2**21))
    others[1].write_bytes(b"f" * 64 + b"\n of someone else")
    for other in others:
        os.utime(other, (1, 1))
    for number in range(1, 13):
        path = folder / f"{number:x}0.json"
        write_kept(path, bytes(100 * 1024))
        os.utime(path, (1000 + number, 1000 + number))
    assert read_kept(folder / "10.json", len) == 100 * 1024  # used now
    write_kept(folder / "0f.json", bytes(100 * 1024))
    left = {path.name for path in folder.iterdir()}
    theirs = {other.name for other in others}
    ours = left - theirs

    assert theirs <= left
    assert {"10.json", "0f.json"} <= left
    assert "20.json" not in left
    assert sum((folder / name).stat().st_size for name in ours) <= 2**20


def test_nothing_is_removed_elsewhere_than_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CPBENCH_CACHE_MIB", "0")
    write_kept(tmp_path / "00.json", b"3")
    assert read_kept(tmp_path / "00.json", json.loads) == 3


def test_cleaning_up_removes_only_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's own files in the folder, and what links lead to, are left alone."""
    folder, away = tmp_path / "structures", tmp_path / "away"
    for state in ("older", "old"):
        monkeypatch.setattr(cache, "code_hash", lambda state=state: state)
        keep(folder, "answer", b"kept")
    (folder / "older" / ".answer.part").write_text("a draft of one that was killed")
    own = folder / "mine"
    own.mkdir()
    away.mkdir()
    (away / "thesis.txt").write_text("years of work")
    (away / "answer").write_bytes((folder / "old" / "answer").read_bytes())
    (folder / "older" / "notes.txt").write_text("mine")
    (own / "thesis.txt").write_text("years of work")
    (folder / "loose.txt").write_text("mine")
    (folder / "link").symlink_to(away)
    for at in (folder / "older", own, folder / "link"):
        os.utime(at, (1, 1), follow_symlinks=False)
    foreign = {p: p.read_bytes() for p in tmp_path.rglob("*.txt")}
    monkeypatch.setattr(cache, "code_hash", lambda: "newest")
    keep(folder, "answer", b"kept")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.txt")} == foreign
    assert [p.name for p in (folder / "older").iterdir()] == ["notes.txt"]
    assert (away / "answer").exists()


def test_a_user_without_home_and_name_keeps_nothing_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "CPBENCH_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    keep(cache_folder() / "structures", "answer", b"kept")
    assert kept_by_this_code(cache_folder() / "structures", "answer", bytes) is None
