"""A whole attention layer over a sequence that is spread over ranks, for a user's own model.

    cp = context_parallel(strategy="upipe", seqlen=4099, heads_q=32, heads_kv=8)
    x = cp.shard(x, dim=1)                                     # this rank's tokens
    y = attention_layer(cp, x, w_q, w_k, w_v, w_o, rotary=5e5)  # gradients flow, to weights too

The weights are those of four `torch.nn.Linear` without bias and are whole on every rank. Their
gradients are what this rank's tokens add: the caller sums them over ranks, as those of every other
parameter. With the option `sum_gradients` the plan adds them, and each rank has the whole of some
heads and 0 of the others: the caller's sum stays right.

Any strategy will do; those that are layers only (`upipe`, `fpdt`) and the options `checkpoint`,
`offload` and `sum_gradients` work here and not in `attend`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.attention.agreement import telling
from harness.attention.call import Call
from harness.attention.compiling import outside_graphs
from harness.attention.group import check_device, transport_of
from harness.attention.inputs import as_autocast, check_alike, check_tensors, described, dtype_of
from harness.attention.parallel import ContextParallel
from harness.attention.pieces import place_in
from harness.attention.ready import run_plan
from harness.plan.heads import members
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import FINISHED, Place, Resident, Tensor
from harness.planning.layer import WEIGHT_GRADS, WEIGHTS


@outside_graphs
def attention_layer(
    cp: ContextParallel,
    x: torch.Tensor,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    w_o: torch.Tensor,
    *,
    rotary: float | None = None,
) -> torch.Tensor:
    """Project, turn by rotary positions, attend and project back. A collective, both ways.

    Args:
        cp: Who has which tokens; of self-attention.
        x: This rank's tokens, `(B, local tokens, M)`.
        w_q: `(heads_q * D, M)`.
        w_k: `(heads_kv * D, M)`.
        w_v: `(heads_kv * E, M)`.
        w_o: `(M, heads_q * E)`.
        rotary: Base of the rotary angles of neighbouring pairs of q and k, by positions in the
            whole sequence; None = not turned.

    Returns:
        `(B, local tokens, M)`, in the dtype of x; under autocast in autocast's, to which x and the
        weights are cast, as for torch's own products.

    Raises:
        UnsupportedError: There is no attention in this dtype or no transport of this device, or the
            strategy cannot do this; from backward, a gradient of the gradient is asked for.
        ValueError: A shape or dtype does not fit the others or `cp`.
        PlanError: The ranks make different calls.
    """
    with telling(cp.group):
        named = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o}
        check_tensors("attention_layer", named)
        x, w_q, w_k, w_v, w_o = as_autocast(named).values()
        problem = _problem(cp, x, (w_q, w_k, w_v, w_o), rotary)
    y: torch.Tensor = _Layer.apply(x, cp.call(problem), w_q, w_k, w_v, w_o)  # type: ignore[no-untyped-call]  # torch: no annotations
    return y


def _problem(
    cp: ContextParallel, x: torch.Tensor, weights: Sequence[torch.Tensor], rotary: float | None
) -> Problem:
    """Check this rank's tensors, and name what all ranks' tensors ask for."""
    named = dict(zip(("x", "w_q", "w_k", "w_v", "w_o"), (x, *weights), strict=True))
    shapes = described(named)
    if x.dim() != 3 or any(w.dim() != 2 for w in weights):
        raise ValueError(f"attention_layer: {shapes}: x has three axes and weights have two")
    model, wide_q, wide_v = x.shape[2], weights[0].shape[0], weights[2].shape[0]
    head_dim, odd_q = divmod(wide_q, cp.heads_q)
    head_dim_v, odd_v = divmod(wide_v, cp.heads_kv)
    wanted = (
        (wide_q, model),
        (cp.heads_kv * head_dim, model),
        (wide_v, model),
        (model, cp.heads_q * head_dim_v),
    )
    tokens = cp.queries.tokens(cp.rank)
    if odd_q or odd_v or [tuple(w.shape) for w in weights] != list(wanted) or x.shape[1] != tokens:
        raise ValueError(
            f"attention_layer: {shapes}: rank {cp.rank} of {cp.cp} has {tokens} tokens; with "
            f"{cp.heads_q} query and {cp.heads_kv} KV heads weights are (heads_q D, M), "
            "(heads_kv D, M), (heads_kv E, M), (M, heads_q E)"
        )
    check_alike("attention_layer", named)
    dtype = dtype_of("attention_layer", x)
    check_device(x.device, cp.group)
    return Problem(
        pattern=cp.pattern,
        heads_q=cp.heads_q,
        heads_kv=cp.heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        batch=x.shape[0],
        dtype=dtype,
        cp=cp.cp,
        hidden=model,
        rotary=rotary,
    )


class _Layer(torch.autograd.Function):
    """The forward plan forward, the backward plan backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch gives a context without a type that has its attributes
        x: torch.Tensor,
        call: Call,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ready = call.ready(Direction.FORWARD)
        plan = ready.program.plan
        given = {Tensor.X: x[:, None], **_slabs(weights, call.problem)}
        inputs = {
            resident: _cut(plan, given[resident.piece.tensor], resident, call)
            for resident in plan.initial
            if resident.place.rank == call.rank
        }
        run = run_plan(ready, inputs, transport_of(call.group))
        ctx.residents = [resident for resident in plan.saved if resident.place.rank == call.rank]
        ctx.save_for_backward(*weights, *(run.results[resident] for resident in ctx.residents))
        ctx.call = call
        return _rows(plan, run.results, Tensor.Y, call, x)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  # as above
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        ready = call.ready(Direction.BACKWARD)
        plan = ready.program.plan
        tensors = ctx.saved_tensors  # once: a checkpoint computes them as they are asked for
        weights, saved = tensors[:4], tensors[4:]
        inputs = dict(zip(ctx.residents, saved, strict=True))
        given = {Tensor.DY: dy[:, None], **_slabs(weights, call.problem)}
        for resident in plan.initial:
            if resident.place.rank == call.rank and resident.piece.tensor in given:
                inputs[resident] = _cut(plan, given[resident.piece.tensor], resident, call)
        run = run_plan(ready, inputs, transport_of(call.group))
        dx = _rows(plan, run.results, Tensor.DX, call, dy)
        grads = (
            _weight_gradient(plan, run.results, part, weight, call)
            for part, weight in zip(WEIGHT_GRADS, weights, strict=True)
        )
        return dx, None, *grads


def _slabs(weights: Sequence[torch.Tensor], problem: Problem) -> dict[Tensor, torch.Tensor]:
    """Weights as a plan has them: `(1, heads, 1, width * M)`; w_o is turned over."""
    heads = (problem.heads_q, problem.heads_kv, problem.heads_kv, problem.heads_q)
    by_head = (*weights[:3], weights[3].T)
    return {
        tensor: weight.reshape(1, count, 1, -1).contiguous()
        for tensor, weight, count in zip(WEIGHTS, by_head, heads, strict=True)
    }


def _cut(plan: Plan, whole: torch.Tensor, resident: Resident, call: Call) -> torch.Tensor:
    """Cut a piece out of this rank's tensor."""
    piece = resident.piece
    if piece.tensor.is_weight:
        return whole[:, list(members(piece.heads))].contiguous()
    rows, _ = place_in(plan, piece, call)
    part = whole if rows == list(range(whole.shape[2])) else whole[:, :, rows]
    return part.contiguous()


def _rows(
    plan: Plan,
    results: Mapping[Resident, torch.Tensor],
    tensor: Tensor,
    call: Call,
    like: torch.Tensor,
) -> torch.Tensor:
    """Put the pieces of y or dx together as this rank's tokens."""
    whole = torch.empty_like(like)
    for resident in plan.outputs:
        if resident.place == Place(call.rank) and resident.piece.tensor is tensor:
            whole[:, place_in(plan, resident.piece, call)[0]] = results[resident][:, 0]
    return whole


def _weight_gradient(
    plan: Plan,
    results: Mapping[Resident, torch.Tensor],
    part: Tensor,
    weight: torch.Tensor,
    call: Call,
) -> torch.Tensor:
    """Put the heads of a weight's gradient together; those that this rank lacks are 0."""
    over = part is Tensor.DW_O_PART
    heads = plan.problem.heads_kv if part.on_kv else plan.problem.heads_q
    like = weight.T if over else weight
    by_head = torch.zeros(like.shape, dtype=weight.dtype, device=weight.device)
    slab = by_head.view(heads, -1)
    for resident in plan.outputs:
        if resident.place == Place(call.rank) and resident.piece.tensor in (part, FINISHED[part]):
            slab[list(members(resident.piece.heads))] = results[resident][0, :, 0].to(slab.dtype)
    return by_head.T.contiguous() if over else by_head
