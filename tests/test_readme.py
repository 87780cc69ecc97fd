"""What the README shows can be typed and runs as printed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import parser

ROOT = Path(__file__).parents[1]


def blocks(kind: str) -> list[str]:
    """Fenced blocks of one kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def harness_commands() -> list[list[str]]:
    """Words after `python -m harness`."""
    lines = (line for block in blocks("sh") for line in block.splitlines())
    words = (shlex.split(line, comments=True) for line in lines)
    return [line[3:] for line in words if line[1:3] == ["-m", "harness"]]


@pytest.mark.parametrize("words", harness_commands(), ids=" ".join)
def test_the_flags_of_every_command_are_flags(words: list[str]) -> None:
    args = parser().parse_args(words)
    assert args.verb == words[0]


def test_the_snippet_runs_as_printed(tmp_path: Path) -> None:
    (snippet,) = blocks("python")
    program = tmp_path / "attend.py"
    program.write_text(snippet)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(program)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = sorted(re.findall(r"rank .*?\(.*?\).*?\(.*?\)", done.stdout))  # lines may run together
    assert told == [
        # 4 chunks of 256, 257, 257 and 257 tokens; rank 0 has the first and the last
        "rank 0: (1, 8, 513, 64), gradient of k (1, 2, 513, 64)",
        "rank 1: (1, 8, 514, 64), gradient of k (1, 2, 514, 64)",
    ]
