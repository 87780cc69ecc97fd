"""Between a rank's own tensors and the pieces of a plan."""

from collections.abc import Mapping

import torch

from harness.attention.call import AttentionCall
from harness.execute.kernels import accumulator_dtype
from harness.plan.heads import members
from harness.plan.plan import Plan
from harness.plan.sizes import is_per_row
from harness.plan.tasks import Piece, Place, Resident, Tensor


def piece_of(plan: Plan, local: torch.Tensor, piece: Piece, call: AttentionCall) -> torch.Tensor:
    """Cut a piece out of this rank's tensor; the tensor itself where that is all of it."""
    if _is_all(plan, piece, call):
        return local.contiguous()
    rows, heads = place_in(plan, piece, call)
    return local[:, heads][:, :, rows].contiguous()


def local_tensor(
    plan: Plan,
    results: Mapping[Resident, torch.Tensor],
    tensor: Tensor,
    call: AttentionCall,
    like: torch.Tensor,
) -> torch.Tensor:
    """Put the pieces of one result together as this rank's tensor."""
    problem, sharding = plan.problem, call.sharding(keys=tensor.on_kv)
    found = [r for r in plan.outputs if r.place == Place(call.rank) and r.piece.tensor is tensor]
    if len(found) == 1 and _is_all(plan, found[0].piece, call):
        return _unviewed(results[found[0]])
    heads = problem.heads_kv if tensor.on_kv else problem.heads_q
    wide = problem.head_dim if tensor in (Tensor.DQ, Tensor.DK) else problem.head_dim_v
    shape = (problem.batch, heads, sharding.tokens(call.rank))
    if is_per_row(tensor):
        whole = like.new_empty(shape, dtype=accumulator_dtype(like.dtype))
    else:
        whole = like.new_empty((*shape, wide))
    for resident in found:
        rows, own_heads = place_in(plan, resident.piece, call)
        head_at, row_at = (torch.tensor(at, device=whole.device) for at in (own_heads, rows))
        whole[:, head_at[:, None], row_at] = results[resident]
    return whole


def place_in(plan: Plan, piece: Piece, call: AttentionCall) -> tuple[list[int], list[int]]:
    """Rows and heads of this rank's tensor that a piece is made of."""
    sharding = call.sharding(keys=piece.tensor.on_kv)
    start, rows = {}, 0
    for chunk in sharding.owned[call.rank]:
        start[chunk] = rows
        rows += len(sharding.chunks[chunk])
    found = [
        start[chunk] + row
        for chunk, tokens in zip(piece.chunks, plan.chunks(piece), strict=True)
        for row in range(len(tokens))
    ]
    return found, list(members(piece.heads))


def _unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view shows all of: autograd lets nobody change a view in place."""
    base = tensor._base
    if base is None:
        return tensor
    whole = base.shape == tensor.shape and base.data_ptr() == tensor.data_ptr()
    return base if whole else tensor.clone()


def _is_all(plan: Plan, piece: Piece, call: AttentionCall) -> bool:
    """Whether a piece is all of this rank's tensor, in its order."""
    sharding, problem = call.sharding(keys=piece.tensor.on_kv), plan.problem
    heads = problem.heads_kv if piece.tensor.on_kv else problem.heads_q
    owned = tuple(chunk for chunk in sharding.owned[call.rank] if sharding.chunks[chunk])
    return piece.chunks == owned and piece.heads.bit_count() == heads
