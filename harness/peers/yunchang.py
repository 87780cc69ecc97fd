"""yunchang: Ulysses attention and its hybrid with a ring, on the shards of its own functions."""

from functools import lru_cache
from importlib import import_module

import torch
import torch.distributed as dist

from harness.peers.adapter import Local, kernels_for
from harness.plan.problem import Problem
from harness.planning.peers import ChosenPeer


def adapt(chosen: ChosenPeer, problem: Problem, rank: int, device: torch.device) -> Local:
    """Make a module of the package ready for one rank. A collective: it makes process groups.

    Raises:
        ImportError, AttributeError: The package is not what this was written for.
    """
    with kernels_for(device):
        package = import_module("yunchang")
    u, r = chosen.degrees(problem)
    _groups(u, r, rank, problem.cp)
    causal = problem.pattern.text == "causal"
    if chosen.peer.function == "ulysses":
        kind, layer = "basic", package.UlyssesAttention(dist.group.WORLD)
    else:
        kind, layer = "zigzag", package.LongContextAttention(ring_impl_type="zigzag")
    whole = torch.arange(problem.seqlen_q).view(1, -1, 1)
    mine = package.EXTRACT_FUNC_DICT[kind](whole, rank, world_size=problem.cp, rd=r, ud=u)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(q, k, v, causal=causal)
        return out

    return Local(mine.flatten(), attend)


def _groups(u: int, r: int, rank: int, cp: int) -> None:
    """Let the package make its groups, and give it back those that it made before.

    It keeps the current ones in one place for the whole process.
    """
    current = import_module("yunchang.globals").PROCESS_GROUP
    current.ULYSSES_PG, current.RING_PG = _made(u, r, rank, cp)


@lru_cache(maxsize=64)
def _made(u: int, r: int, rank: int, cp: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    globals_ = import_module("yunchang.globals")
    globals_.set_seq_parallel_pg(u, r, rank, cp)
    return globals_.PROCESS_GROUP.ULYSSES_PG, globals_.PROCESS_GROUP.RING_PG
