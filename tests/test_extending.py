"""What docs/extending.md shows runs as printed."""

import re
import shlex
from pathlib import Path

import pytest

from harness.cli import parser
from harness.explain.volumes import received_bytes
from harness.plan.problem import Direction, Problem
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

TEXT = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()


def blocks(kind: str) -> list[str]:
    """Fenced blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.M | re.S)


def test_the_tutorials_strategy_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("python")
    (tmp_path / "myring.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    for direction in Direction:
        for text in ("myring:STRATEGY", "myring:STRATEGY:left=true"):
            asked = Problem(
                pattern=make_pattern("full", 60), heads_q=6, heads_kv=2, head_dim=5, cp=5
            )
            plan = strategy(text).plan(asked, direction)
            form = strategy(text).volume(asked, direction)
            assert form is not None
            assert form.received_bytes == received_bytes(plan)
    causal = Problem(pattern=make_pattern("causal", 29), heads_q=6, heads_kv=2, head_dim=5, cp=3)
    both = [strategy("myring:STRATEGY:left=true").plan(causal, d) for d in Direction]
    for plan in both:
        verify(plan)
    check_pair(*both)


def commands() -> list[list[str]]:
    """Words after `python -m harness`."""
    words = [
        shlex.split(line, comments=True) for text in blocks("sh") for line in text.splitlines()
    ]
    return [line[3:] for line in words if line[1:3] == ["-m", "harness"]]


def test_its_commands_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("python")
    (tmp_path / "myring.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(commands()) > 5
    for words in commands():
        assert parser().parse_args(words).verb == words[0]
