"""Small sweeps in processes of their own, to be interrupted and killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.base.json_fields import JsonObject
from harness.records.store import FILE, read_records
from tests.harness.ranks.test_team import ROOT

SIMULATED = (
    *("--mode", "simulate", "--strategies", "ring,zigzag,ulysses", "--patterns", "causal,star"),
    *("--cp", "2,3", "--seqlen", "96,160", "--heads", "6/2", "--head-dim", "16"),
)
"""48 cells, none of which takes long."""


def start(*words: str) -> "subprocess.Popen[str]":
    """Start the command line in a process group of its own, where a hang-up is heeded.

    Whoever runs the tests may ignore hang-ups (`nohup`), and processes inherit that.
    """
    return subprocess.Popen(
        ["env", "--default-signal=HUP", sys.executable, "-m", "harness", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line to its end."""
    process = start(*words)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def lines(folder: Path) -> int:
    """How many lines the records have, whole or torn."""
    file = folder / FILE
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill(process: "subprocess.Popen[str]", number: int = signal.SIGKILL) -> int:
    """Send a signal to the parent alone, and wait for its end."""
    process.send_signal(number)
    process.communicate(timeout=60)
    return process.returncode


def names(records: list[JsonObject]) -> list[str]:
    return [str(record["config_hash"]) for record in records]


def kept(folder: Path) -> list[str]:
    return names(read_records(folder)) if (folder / FILE).exists() else []
