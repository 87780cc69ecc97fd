"""Every rank's tokens on every rank, in their original order, and the gradient of that."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.attention.agreement import Word, compare_calls, digest_of
from harness.execute.kernels import accumulator_dtype
from harness.execute.shards import positions_of
from harness.plan.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Sharers:
    """The ranks that share tokens, and which of them this one is; group None = it is alone."""

    sharding: Sharding
    rank: int
    group: dist.ProcessGroup | None


def gather_tokens(part: torch.Tensor, seat: Sharers) -> torch.Tensor:
    """Put the ranks' tokens, along the first axis, into their original order. A collective.

    Gradients flow: a token's is summed over the ranks, in rank order, at the rank that owns it.

    Raises:
        PlanError: The ranks make different calls.
    """
    whole: torch.Tensor = _Gather.apply(part, seat)  # type: ignore[no-untyped-call]  # torch: no annotations
    return whole


def rank_positions(sharding: Sharding, rank: int) -> torch.Tensor:
    """Positions of a rank's tokens; on the CPU, whatever the default device is."""
    return positions_of((sharding.chunks[c] for c in sharding.owned[rank]), torch.device("cpu"))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch gives a context without a type that has its attributes
        part: torch.Tensor,
        seat: Sharers,
    ) -> torch.Tensor:
        ctx.seat, sharding = seat, seat.sharding
        whole = part.new_empty((sum(map(len, sharding.chunks)), *part.shape[1:]))
        for rank, tensor in enumerate(_parts(part, seat)):
            whole[rank_positions(sharding, rank).to(whole.device)] = tensor
        return whole

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  # as above
        dwhole: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        return _summed(dwhole, ctx.seat), None


def _agree(x: torch.Tensor, seat: Sharers, call: str) -> None:
    tokens = [*map(seat.sharding.tokens, range(len(seat.sharding.owned)))]
    facts = (
        ("call", call),
        ("dtype", str(x.dtype)),
        ("shape but for tokens", str(tuple(x.shape[1:]))),
        ("tokens of each rank", str(tokens)),
    )
    compare_calls(seat.group, Word.GATHER, facts, digest_of(facts))


def _parts(part: torch.Tensor, seat: Sharers) -> list[torch.Tensor]:
    """Every rank's part; parts are padded on the way to equal lengths."""
    if seat.group is None:
        return [part]
    _agree(part, seat, "unshard")
    tokens = [*map(seat.sharding.tokens, range(len(seat.sharding.owned)))]
    padded = part.new_zeros((max(tokens), *part.shape[1:]))
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in tokens]
    dist.all_gather(parts, padded, group=seat.group)
    return [found[:count] for found, count in zip(parts, tokens, strict=True)]


def _summed(dwhole: torch.Tensor, seat: Sharers) -> torch.Tensor:
    """The gradients that all ranks have of this rank's tokens, summed in rank order."""
    ranks = range(len(seat.sharding.owned))
    own = [rank_positions(seat.sharding, rank).to(dwhole.device) for rank in ranks]
    if seat.group is None:
        return dwhole[own[0]]
    _agree(dwhole, seat, "unshard backward")
    sent = dwhole[torch.cat(own)].contiguous()
    found = sent.new_empty((len(ranks), len(own[seat.rank]), *dwhole.shape[1:]))
    token = dwhole[:1].numel() * dwhole.element_size() if len(dwhole) else 0
    dist.all_to_all_single(
        found.reshape(-1).view(torch.uint8),
        sent.reshape(-1).view(torch.uint8),
        [len(own[seat.rank]) * token] * len(ranks),
        [len(each) * token for each in own],
        group=seat.group,
    )
    total = found[0].to(accumulator_dtype(dwhole.dtype))
    for part in found[1:]:
        total = total + part
    return total.to(dwhole.dtype)
