"""Cut global tensors into what ranks hold, and put results together again.

Global tensors are `(batch, heads, tokens, width)` in original token order; lse lacks the width.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from harness.plan import heads as head_sets
from harness.plan.plan import Plan
from harness.plan.sharding import Sharding
from harness.plan.sizes import batch_of
from harness.plan.tasks import Piece, Resident, Tensor


def shard(tensor: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """Take a rank's tokens, in its local order.

    Args:
        tensor: `(batch, heads, tokens, ...)`.
        sharding: Who owns which tokens.
        rank: Whose part.

    Returns:
        A contiguous copy `(batch, heads, local tokens, ...)`.
    """
    return _tokens(tensor, [sharding.chunks[chunk] for chunk in sharding.owned[rank]])


def unshard(parts: Sequence[torch.Tensor], sharding: Sharding) -> torch.Tensor:
    """Put the ranks' parts together; the exact inverse of `shard` over all ranks."""
    tokens = sum(len(chunk) for chunk in sharding.chunks)
    whole = parts[0].new_empty((*parts[0].shape[:2], tokens, *parts[0].shape[3:]))
    for rank, part in enumerate(parts):
        _put(whole, [sharding.chunks[chunk] for chunk in sharding.owned[rank]], part)
    return whole


def initial_inputs(
    plan: Plan, tensors: Mapping[Tensor, torch.Tensor], ranks: Iterable[int]
) -> dict[Resident, torch.Tensor]:
    """Cut global tensors into the initial residents of some ranks.

    Args:
        plan: The plan that will run.
        tensors: Global tensors by kind; kinds that the plan does not start with are not looked at.
        ranks: Which ranks.

    Raises:
        KeyError: The plan starts with a tensor that is not given.
    """
    local = frozenset(ranks)
    return {
        resident: take(plan, tensors[resident.piece.tensor], resident.piece)
        for resident in plan.initial
        if resident.place.rank in local
    }


def positions_of(chunks: Iterable[range], device: torch.device) -> torch.Tensor:
    """Positions of chunks one after another, `(tokens,)` int64."""
    parts = [
        torch.arange(c.start, c.stop, c.step, dtype=torch.int64, device=device) for c in chunks
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def take(plan: Plan, tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Copy the tokens and heads of a piece out of a global tensor."""
    heads = list(head_sets.members(piece.heads))
    return _tokens(tensor[:, heads], plan.chunks(piece))


def collect(plan: Plan, results: Mapping[Resident, torch.Tensor], tensor: Tensor) -> torch.Tensor:
    """Put all pieces of one tensor together into a global tensor.

    Pieces that lie in several places must be equal; the last one counts. Partial results of several
    places are added.

    Raises:
        ValueError: The piece does not exist.
    """
    found = [(r.piece, value) for r, value in results.items() if r.piece.tensor is tensor]
    if not found:
        raise ValueError(f"collect: no result holds {tensor.value}")
    problem = plan.problem
    heads = problem.heads_kv if tensor.on_kv else 1 if tensor.is_headless else problem.heads_q
    tokens = problem.seqlen_kv if tensor.on_kv else problem.seqlen_q
    if tensor.is_weight:
        tokens = 1
    sample = found[0][1]
    shape = (batch_of(plan, tensor), heads, tokens, *sample.shape[3:])
    whole = sample.new_full(shape, 0.0 if tensor.is_part else torch.nan)
    for piece, value in found:
        row = 0
        members = torch.tensor(head_sets.members(piece.heads), device=whole.device)[:, None]
        for chunk in plan.chunks(piece):
            part = value[:, :, row : row + len(chunk)]
            tokens_at = torch.tensor(chunk, device=whole.device)[None, :]
            if tensor.is_part:
                part = part + whole[:, members, tokens_at]
            whole[:, members, tokens_at] = part
            row += len(chunk)
    return whole


def _tokens(tensor: torch.Tensor, chunks: Sequence[range]) -> torch.Tensor:
    parts = [tensor[:, :, c.start : c.stop : c.step] for c in chunks if c]
    if not parts:
        return tensor[:, :, :0].contiguous()
    return torch.cat(parts, dim=2)


def _put(whole: torch.Tensor, chunks: Sequence[range], part: torch.Tensor) -> None:
    row = 0
    for chunk in chunks:
        if chunk:
            whole[:, :, chunk.start : chunk.stop : chunk.step] = part[:, :, row : row + len(chunk)]
        row += len(chunk)
