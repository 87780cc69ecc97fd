"""Attention of one rank as a function that autograd knows: a plan forward, a plan backward."""

from typing import Any

import torch

from harness.attention.call import Call
from harness.attention.group import transport_of
from harness.attention.pieces import local_tensor, piece_of
from harness.attention.ready import run_plan
from harness.plan.problem import Direction
from harness.plan.tasks import Tensor


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Attend from this rank's queries; tensors and result as `ContextParallel.attend` has them."""
    out: torch.Tensor = _Attention.apply(q, k, v, call)  # type: ignore[no-untyped-call]  # torch: no annotations
    return out


class _Attention(torch.autograd.Function):
    """The forward plan forward, the backward plan backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch gives a context without a type that has its attributes
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
    ) -> torch.Tensor:
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
        return local_tensor(plan, run.results, Tensor.OUT, call, q)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  # as above
        dout: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        ready = call.ready(Direction.BACKWARD)
        plan = ready.program.plan
        inputs = dict(zip(ctx.residents, ctx.saved_tensors, strict=True))
        for resident in plan.initial:
            if resident.place.rank == call.rank and resident.piece.tensor is Tensor.DOUT:
                inputs[resident] = piece_of(plan, dout, resident.piece, call)
        run = run_plan(ready, inputs, transport_of(call.group))
        grads = (
            local_tensor(plan, run.results, t, call, dout)
            for t in (Tensor.DQ, Tensor.DK, Tensor.DV)
        )
        return (*grads, None)
