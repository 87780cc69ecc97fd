"""Attention of one rank as a function that autograd knows: a plan forward, a plan backward."""

from collections.abc import Mapping
from typing import Any

import torch

from harness.attention.call import AttentionCall
from harness.attention.group import transport_of
from harness.attention.lse_gradient import dlse_columns, widened, with_dlse
from harness.attention.pieces import local_tensor, piece_of
from harness.attention.ready import run_plan
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.tasks import Resident, Tensor

_Gradients = tuple[torch.Tensor | None, ...]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Attend from this rank's queries; tensors and result as `ContextParallel.attend` has them."""
    out: torch.Tensor = _Attention.apply(q, k, v, call)  # type: ignore[no-untyped-call]  # torch: no annotations
    return out


def attend_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attend`, with lse, of a call that asks for it."""
    out, lse = _AttentionWithLse.apply(q, k, v, call)  # type: ignore[no-untyped-call]  # torch: no annotations
    return out, lse


class _Attention(torch.autograd.Function):
    """The forward plan forward, the backward plan backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch gives a context without a type that has its attributes
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        plan, results = _forward(ctx, q, k, v, call)
        return local_tensor(plan, results, Tensor.OUT, call, q)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  # as above
        dout: torch.Tensor,
    ) -> _Gradients:
        call: AttentionCall = ctx.call
        saved = dict(zip(ctx.residents, ctx.saved_tensors, strict=True))
        return (*_backward(call, saved, dout, 0), None)


class _AttentionWithLse(torch.autograd.Function):
    """As `_Attention`, with a second result that has a gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # as above
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan, results = _forward(ctx, q, k, v, call)
        out, lse = (
            local_tensor(plan, results, tensor, call, q) for tensor in (Tensor.OUT, Tensor.LSE)
        )
        ctx.set_materialize_grads(False)
        ctx.like, ctx.met_none = out.new_empty(0), lse == -torch.inf
        return out, lse.clone() if any(lse is result for result in results.values()) else lse

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  # as above
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> _Gradients:
        call: AttentionCall = ctx.call
        if dout is None:
            wide = call.problem.head_dim_v
            dout = ctx.like.new_zeros((*ctx.met_none.shape, wide))
        saved = dict(zip(ctx.residents, ctx.saved_tensors, strict=True))
        if dlse is None:
            return (*_backward(call, saved, dout, 0), None)
        dout = with_dlse(dout, dlse.masked_fill(ctx.met_none, 0.0))
        saved = {each: widened(each.piece.tensor, x) for each, x in saved.items()}
        dq, dk, dv = _backward(call, saved, dout, dlse_columns(call.problem.dtype))
        return dq, dk, dv[..., : call.problem.head_dim_v].contiguous(), None


def _forward(
    ctx: Any,  # noqa: ANN401  # as above
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: AttentionCall,
) -> tuple[Plan, Mapping[Resident, torch.Tensor]]:
    ready = call.ready(Direction.FORWARD)
    plan = ready.program.plan
    whole = {Tensor.Q: q, Tensor.K: k, Tensor.V: v}
    inputs = {
        resident: piece_of(plan, whole[resident.piece.tensor], resident.piece, call)
        for resident in plan.initial
        if resident.place.rank == call.rank
    }
    run = run_plan(ready, inputs, transport_of(call.group))
    ctx.residents = [resident for resident in plan.saved if resident.place.rank == call.rank]
    ctx.save_for_backward(*(run.results[resident] for resident in ctx.residents))
    ctx.call = call
    return plan, run.results


def _backward(
    call: AttentionCall, saved: Mapping[Resident, torch.Tensor], dout: torch.Tensor, wider: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the backward plan, its v, out and dout `wider` by so many columns."""
    ready = call.ready(Direction.BACKWARD, wider)
    plan, inputs = ready.program.plan, dict(saved)
    for resident in plan.initial:
        if resident.place.rank == call.rank and resident.piece.tensor is Tensor.DOUT:
            inputs[resident] = piece_of(plan, dout, resident.piece, call)
    run = run_plan(ready, inputs, transport_of(call.group))
    dq, dk, dv = (
        local_tensor(plan, run.results, t, call, dout) for t in (Tensor.DQ, Tensor.DK, Tensor.DV)
    )
    return dq, dk, dv
