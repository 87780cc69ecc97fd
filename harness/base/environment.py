"""Environment of a run: versions, cores, commit, and variables that change results or speed."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from harness.base.workers import cores

_PACKAGES = ("torch", "numpy", "pyscipopt", "flash-attn", "ring-flash-attn", "yunchang")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "OMP_", "MKL_", "GLOO_", "CUDA_DEVICE_MAX_CONNECTIONS")
_CODE = ("patterns", "strategies", "harness", "scripts", "pyproject.toml", "requirements.lock")
_GIT_S = 5.0


def environment(threads: int = 1) -> dict[str, object]:
    """Describe this machine and checkout, for records.

    Args:
        threads: Threads of each rank.
    """
    commit, dirty = git_state()
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "cpu": cpu_model(),
        "cores": cores(),
        "threads_per_rank": threads,
        "packages": {name: found for name in _PACKAGES if (found := package_version(name))},
        "commit": commit,
        "dirty": dirty,
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
    }


def package_version(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Name of the processor, as the system gives it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_state(root: Path | None = None) -> tuple[str | None, bool | None]:
    """Commit of a checkout, and whether its code differs from it; None if unknown.

    What a run leaves in the checkout (results, traces, notes) does not make it differ.

    Args:
        root: The checkout; None is the one that this file is in.
    """
    root = root or Path(__file__).resolve().parents[2]
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit, bool(_git(root, "status", "--porcelain", "--", *_CODE))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(folder: Path, *args: str) -> str:
    # status would else write to the checkout, and leave a lock behind if it is stopped there
    command = ["git", "--no-optional-locks", "-C", str(folder), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    return done.stdout.strip()
