"""What records say of the checkout that they were made with."""

import os
import subprocess
from pathlib import Path

import pytest

from harness.base.environment import git_state


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "plan.py").write_text("one\n")
    (tmp_path / "README.md").write_text("words\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    git(tmp_path, *who, "commit", "--quiet", "-m", "one")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_what_a_run_leaves_behind_does_not_make_the_code_differ(checkout: Path) -> None:
    (checkout / "results" / "long").mkdir(parents=True)
    (checkout / "results" / "long" / "records.jsonl").write_text("{}\n")
    (checkout / "zigzag.json").write_text("{}\n")
    assert git_state(checkout) == (git(checkout, "rev-parse", "HEAD"), False)


@pytest.mark.parametrize("name", ["harness/plan.py", "harness/new.py", "pyproject.toml"])
def test_other_code_than_the_commit_differs(checkout: Path, name: str) -> None:
    (checkout / name).write_text("two\n")
    assert git_state(checkout)[1] is True


def test_outside_a_checkout_nothing_is_known(tmp_path: Path) -> None:
    assert git_state(tmp_path / "none") == (None, None)


def test_asking_does_not_write_to_the_checkout(checkout: Path) -> None:
    """A run that was stopped while it asked once left a lock, and git refused to commit."""
    index = checkout / ".git" / "index"
    before = index.read_bytes()
    os.utime(checkout / "harness" / "plan.py", (1, 1))  # status would note that it is the same
    assert git_state(checkout)[1] is False
    assert index.read_bytes() == before
