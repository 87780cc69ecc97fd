"""Facts about this machine for `doctor`: what is present or missing, and its use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module

import psutil
import torch
import torch.distributed as dist

from harness.base import cache
from harness.base.environment import environment, package_version
from harness.base.remembered import MEMORY_VARIABLE, memory_limit_bytes
from harness.errors import MeasurementError
from harness.execute import kernels
from harness.planning.peers import PEERS
from harness.ranks.team import Member, Team

_MIB, _GIB = 2**20, 2**30
_SMOKE_S = 60.0


class State(StrEnum):
    """How a finding stands."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: What.
        state: Whether it is there and works.
        value: Version, size or reason.
        serves: Its use.
        remedy: How to add it; empty if it is present.
    """

    name: str
    state: State
    value: str
    serves: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """As plain values."""
        return {
            "name": self.name,
            "state": self.state.value,
            "value": self.value,
            "serves": self.serves,
            "remedy": self.remedy,
        }


# Package, the module that it is imported as, what it serves, how to get it.
_PACKAGES = (
    ("torch", "torch", "check, measured sweeps, attention on tensors", "scripts/setup"),
    ("numpy", "numpy", "patterns and plans", "scripts/setup"),
    ("rich", "rich", "tables and progress", "scripts/setup"),
    ("pyscipopt", "pyscipopt", "planners that solve for their plan", "scripts/setup"),
    ("matplotlib", "matplotlib", "plots of reports", "pip install matplotlib"),
    (
        "flash-attn",
        "flash_attn",
        "flash-attention 2 kernels on CUDA",
        "pip install flash-attn (needs a CUDA toolkit); without it torch's own kernels are used",
    ),
)


def examine(start_team: Callable[[int], Team] = Team) -> tuple[dict[str, object], list[Finding]]:
    """Look at everything.

    Args:
        start_team: Starts the two processes that try gloo.

    Returns:
        Facts of the machine and checkout, and the findings.
    """
    facts = environment()
    memory = psutil.virtual_memory()
    facts |= {
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "torch_threads": torch.get_num_threads(),
    }
    findings = [
        *(_package(*row) for row in _PACKAGES),
        *_peers(),
        *_kernels(kernels.capabilities()),
        *_caches(),
        _gloo(start_team),
        _cuda(),
        _nccl(),
    ]
    return facts, findings


def _package(name: str, module: str, serves: str, remedy: str) -> Finding:
    version = package_version(name)
    if version is None:
        return Finding(name, State.MISSING, "not installed", serves, remedy)
    try:
        import_module(module)
    except Exception as error:  # a package that is there may fail in any way
        reason = f"{version}, but its import fails: {error}"
        return Finding(name, State.BROKEN, reason.splitlines()[0], serves, remedy)
    return Finding(name, State.OK, version, serves)


def _peers() -> list[Finding]:
    """Other projects' packages: only whether they are there, since ranks import them in parts."""
    findings: dict[str, Finding] = {}
    for peer in PEERS.values():
        version, serves = package_version(peer.package), f"rows peer:{peer.package}/*"
        if peer.refusal:
            continue
        found = Finding(peer.package, State.OK, version or "", serves)
        absent = Finding(peer.package, State.MISSING, "not installed", serves, peer.install)
        findings[peer.package] = found if version else absent
    return list(findings.values())


def _caches() -> list[Finding]:
    """How much is kept between runs, and how much may be, there and in memory."""
    folder, size = cache.cache_folder(), 0
    try:
        size = sum(size for _, size, _ in cache.kept_files(folder))
        disk, memory = (limit() // _MIB for limit in (cache.limit_bytes, memory_limit_bytes))
    except (ValueError, OSError) as error:
        remedy = "mend or unset the variable"
        return [Finding("caches", State.BROKEN, str(error), "plans kept for reuse", remedy)]
    serves = f"plans kept between runs; the oldest go first ({cache.CACHE_VARIABLE} sets the limit)"
    value = f"{size / _MIB:.1f} of {disk} MiB in {folder}"
    each = f"at most {memory} MiB for each kind"
    return [
        Finding("cache on disk", State.OK, value, serves),
        Finding(
            "cache in memory", State.OK, each, f"plans of this process ({MEMORY_VARIABLE} sets it)"
        ),
    ]


def _kernels(found: Mapping[str, str]) -> list[Finding]:
    return [
        Finding(
            f"kernel {name}",
            State.OK if status == "ok" else State.MISSING,
            status,
            "attention on CPU" if name == "torch_cpu" else "attention on CUDA",
            "" if status == "ok" else "another kernel takes its place where one is ok",
        )
        for name, status in found.items()
    ]


def add_ranks(member: Member) -> int:
    """Sum the ranks' numbers over the group (a job for a `Team`)."""
    number = torch.tensor([member.rank + 1])
    dist.all_reduce(number)
    return int(number)


def _gloo(start_team: Callable[[int], Team]) -> Finding:
    serves = "measured sweeps and checks in real processes"
    remedy = "see whether processes may be started and a local port opened"
    try:
        with start_team(2) as team:
            sums = team.run(add_ranks, _SMOKE_S)
    except (MeasurementError, OSError) as error:
        return Finding("gloo", State.BROKEN, str(error), serves, remedy)
    if sums != [3, 3]:
        return Finding("gloo", State.BROKEN, f"1 + 2 gave {sums}", serves, remedy)
    return Finding("gloo", State.OK, "2 processes added their numbers", serves)


def _cuda() -> Finding:
    serves = "CUDA kernels, scripts/gpu_check.py"
    if not torch.cuda.is_available():
        reason = "no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
        remedy = "a machine with a CUDA card, and a CUDA build of torch"
        return Finding("CUDA", State.MISSING, reason, serves, remedy)
    cards = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        cards.append(f"{card.name} {card.total_memory / _GIB:.0f} GiB")
    return Finding("CUDA", State.OK, f"{torch.version.cuda}: {', '.join(cards)}", serves)


def _nccl() -> Finding:
    serves = "ranks on several GPUs (torchrun)"
    remedy = "a CUDA build of torch, and a CUDA card per rank"
    if not dist.is_nccl_available():
        return Finding("NCCL", State.MISSING, "this torch has none", serves, remedy)
    if not torch.cuda.is_available():
        return Finding("NCCL", State.MISSING, "no CUDA device", serves, remedy)
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch: no annotations
    return Finding("NCCL", State.OK, version, serves)
