"""Run a peer on one rank: times, and its results as global positions know them."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from harness.errors import UnsupportedError
from harness.oracle.reference import inputs_of
from harness.peers import ring_flash_attn, yunchang
from harness.peers.adapter import Local
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Tensor
from harness.planning.peers import ChosenPeer, peer, refuse
from harness.ranks.team import Member
from harness.records.config import Config, Where

_ADAPTERS = {"ring-flash-attn": ring_flash_attn.adapt, "yunchang": yunchang.adapt}
_FORWARD = ("out",)
_BACKWARD = ("dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Outcome of a peer on one rank.

    Attributes:
        samples_s: Seconds of each timed iteration.
        positions: Tokens of the whole sequence that the rank holds, in local order.
        results: "out", "dq", "dk", "dv" as far as they were made, `(batch, heads, tokens, width)`.
    """

    samples_s: tuple[float, ...]
    positions: torch.Tensor
    results: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PeerRefusal:
    """Reason why a rank did not run a peer.

    Attributes:
        reason: In words.
        absent: The package is not installed; the cell may do another time.
    """

    reason: str
    absent: bool = False


def refusal(text: str, problem: Problem) -> PeerRefusal | None:
    """Say why a peer cannot run a problem here; None if it can."""
    chosen = peer(text)
    try:
        refuse(chosen, problem)
    except UnsupportedError as error:
        return PeerRefusal(str(error))
    if not chosen.peer.installed:
        return PeerRefusal(
            f"{chosen.text}: {chosen.peer.package} is not installed; {chosen.peer.install}",
            absent=True,
        )
    return None


def adapted(chosen: ChosenPeer, problem: Problem, rank: int, device: torch.device) -> Local:
    """Make a peer ready for one rank; all ranks call this together."""
    return _ADAPTERS[chosen.peer.package](chosen, problem, rank, device)


def shards_of(
    tensors: Mapping[Tensor, torch.Tensor], positions: torch.Tensor
) -> dict[Tensor, torch.Tensor]:
    """Cut q, k, v and dout as peers take them: `(batch, local tokens, heads, head_dim)`."""
    return {
        tensor: whole[:, :, positions.to(whole.device)].transpose(1, 2).contiguous()
        for tensor, whole in tensors.items()
    }


def peer_job(
    member: Member, config: Config, warmup: int, iterations: int, seed: int = 0
) -> PeerRun:
    """Run one cell of a peer on one rank (a job for a `Team`).

    Forward is timed without autograd, backward alone from one recorded forward.
    """
    warnings.simplefilter("ignore", FutureWarning)  # of calls that torch renames, in their code
    problem = config.problem
    on_gpu = config.transport is Where.NCCL
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    local = adapted(peer(config.strategy), problem, member.rank, device)
    given = shards_of(inputs_of(problem, seed, device), local.positions)
    qkv = tuple(given[tensor] for tensor in (Tensor.Q, Tensor.K, Tensor.V))
    out: torch.Tensor | None = None
    results: Sequence[torch.Tensor] = ()
    forward = config.direction is Direction.FORWARD
    if not forward:
        out = local.attend(*(x.requires_grad_() for x in qkv))
    samples = []
    for iteration in range(warmup + iterations):
        dist.barrier()
        _settle(device)
        begin = time.perf_counter()
        if out is None:
            with torch.no_grad():
                results = (local.attend(*qkv),)
        else:
            results = torch.autograd.grad(out, qkv, given[Tensor.DOUT], retain_graph=True)
        _settle(device)
        if iteration >= warmup:
            samples.append(time.perf_counter() - begin)
    named = dict(zip(_FORWARD if forward else _BACKWARD, results, strict=True))
    if out is not None:
        named["out"] = out.detach()
    heads_first = {name: x.transpose(1, 2).contiguous().cpu() for name, x in named.items()}
    return PeerRun(tuple(samples), local.positions, heads_first)


def _settle(device: torch.device) -> None:
    """Wait for what was launched on a GPU; on a CPU a call is over when it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gathered_results(runs: Sequence[PeerRun]) -> dict[str, torch.Tensor]:
    """Put the ranks' results together as global tensors; what nobody wrote is NaN."""
    tokens = sum(len(run.positions) for run in runs)
    whole: dict[str, torch.Tensor] = {}
    for run in runs:
        for name, part in run.results.items():
            shape = (*part.shape[:2], tokens, part.shape[3])
            target = whole.setdefault(name, part.new_full(shape, torch.nan))
            target[:, :, run.positions] = part
    return whole
