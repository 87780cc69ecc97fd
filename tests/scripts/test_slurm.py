"""The Slurm template, with a Slurm that only says what it was asked."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "scripts" / "slurm" / "sweep.sbatch"


def submit(folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    stubs = folder / "bin"
    stubs.mkdir()
    for name, body in (("srun", 'printf "%s\\n" "$@"'), ("scontrol", "printf 'n7\\nn8\\n'")):
        stub = stubs / name
        stub.write_text(f"#!/bin/sh\n{body}\n")
        stub.chmod(0o755)
    return subprocess.run(
        ["bash", str(TEMPLATE), "--cp", "8,16", "-o", "a folder"],
        env={"PATH": f"{stubs}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_starts_one_torchrun_per_node_and_passes_the_words_on(tmp_path: Path) -> None:
    done = submit(
        tmp_path,
        SLURM_SUBMIT_DIR=str(tmp_path),
        SLURM_JOB_ID="123456",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="8",
        SLURM_JOB_NODELIST="n[7-8]",
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()

    assert words[1:4] == [".venv/bin/python", "-m", "torch.distributed.run"]
    flags = dict(zip(words[4:14:2], words[5:14:2], strict=True))
    assert flags == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--rdzv-backend": "c10d",
        "--rdzv-id": "123456",
        "--rdzv-endpoint": "n7:23456",
    }
    assert words[14:] == [
        *("-m", "harness", "sweep", "--mode", "measure", "--cp", "8,16", "-o", "a folder"),
    ]


def test_outside_of_slurm_it_says_how_to_submit_it(tmp_path: Path) -> None:
    done = submit(tmp_path)

    assert done.returncode != 0
    assert "submit this script with sbatch" in done.stderr
    assert done.stdout == ""
