"""A layer whose projections are part of the plan: its run forward and backward on one rank.

A bias is a column of its weight that meets a column of ones beside x. So it goes the ways of the
weight: through every strategy and every option, and its gradient is a column of the weight's. The
plan is that of a model wider by `BIAS_COLUMNS`, and its bytes, flops and memory are counted so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from harness.attention.call import AttentionCall
from harness.attention.group import transport_of
from harness.attention.layers.given import LayerInputs, Maybe, layer_problem, turns_of
from harness.attention.parallel import ContextParallel
from harness.attention.pieces import place_in
from harness.attention.ready import run_plan
from harness.execute.rotary import TurnsOf
from harness.plan.heads import members
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import FINISHED, Place, Resident, Tensor
from harness.planning.layers.layer import WEIGHT_GRADS, WEIGHTS

BIAS_COLUMNS = 8
"""Columns beside x where q, k or v has a bias: one of ones, and zeros that keep rows aligned."""


def plan_call(cp: ContextParallel, given: LayerInputs) -> tuple[AttentionCall, TurnsOf | None]:
    """Return the call that a layer comes to, and how its tokens turn.

    Raises:
        ValueError: A shape, dtype or number does not fit the others or `cp`.
        UnsupportedError: There is no attention in this dtype or no transport of this device.
    """
    problem = layer_problem(cp, given)
    turns = turns_of(given, problem, cp.queries, cp.rank)
    if given.has_biases:
        problem = replace(problem, hidden=problem.width + BIAS_COLUMNS)
    return replace(cp.call(problem), beside=given.beside), turns


def run_layer(given: LayerInputs, call: AttentionCall, turns: TurnsOf | None) -> torch.Tensor:
    """Run a layer on this rank, but for the bias of y; gradients flow."""
    tensors = (*given.weights, *given.biases[:3])
    y: torch.Tensor = _Layer.apply(given.x, call, turns, *tensors)  # type: ignore[no-untyped-call]  # torch: no annotations
    return y


class _Layer(torch.autograd.Function):
    """The forward plan forward, the backward plan backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch gives a context without a type that has its attributes
        x: torch.Tensor,
        call: AttentionCall,
        turns: TurnsOf | None,
        *tensors: Maybe,
    ) -> torch.Tensor:
        ready = call.ready(Direction.FORWARD)
        plan = ready.program.plan
        rows = _widened(x, call.problem.width, 1.0)
        given = {Tensor.X: rows[:, None], **_slabs(tensors, call.problem)}
        inputs = {
            resident: _cut(plan, given[resident.piece.tensor], resident, call)
            for resident in plan.initial
            if resident.place.rank == call.rank
        }
        run = run_plan(ready, inputs, transport_of(call.group), turns)
        ctx.residents = [resident for resident in plan.saved if resident.place.rank == call.rank]
        ctx.save_for_backward(*tensors, *(run.results[resident] for resident in ctx.residents))
        ctx.call, ctx.turns = call, turns
        return _rows(plan, run.results, Tensor.Y, call, x)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  # as above
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        call: AttentionCall = ctx.call
        ready = call.ready(Direction.BACKWARD)
        plan = ready.program.plan
        tensors = ctx.saved_tensors  # once: a checkpoint computes them as they are asked for
        own, saved = tensors[:7], tensors[7:]
        inputs = dict(zip(ctx.residents, saved, strict=True))
        rows = _widened(dy, call.problem.width, 0.0)
        given = {Tensor.DY: rows[:, None], **_slabs(own, call.problem)}
        for resident in plan.initial:
            if resident.place.rank == call.rank and resident.piece.tensor in given:
                inputs[resident] = _cut(plan, given[resident.piece.tensor], resident, call)
        run = run_plan(ready, inputs, transport_of(call.group), ctx.turns)
        dx = _rows(plan, run.results, Tensor.DX, call, dy)
        grads: list[torch.Tensor] = []
        columns: list[Maybe] = []
        for part, weight, bias in zip(WEIGHT_GRADS, own[:4], (*own[4:], None), strict=True):
            whole = _weight_gradient(plan, run.results, part, weight, call)
            grads.append(_narrowed(whole, weight, 0 if part is Tensor.DW_O_PART else 1))
            columns.append(None if bias is None else whole[:, weight.shape[1]].contiguous())
        return dx, None, None, *grads, *columns[:3]


def _widened(rows: torch.Tensor, width: int, first: float) -> torch.Tensor:
    """Put columns beside the last axis, up to a width: one of a number, and zeros."""
    more = width - rows.shape[-1]
    if not more:
        return rows
    beside = rows.new_zeros((*rows.shape[:-1], more))
    beside[..., 0] = first
    return torch.cat((rows, beside), dim=-1)


def _narrowed(whole: torch.Tensor, like: torch.Tensor, axis: int) -> torch.Tensor:
    """Leave out the columns beside a weight, if there are any."""
    wide = like.shape[axis]
    return whole if whole.shape[axis] == wide else whole.narrow(axis, 0, wide).contiguous()


def _slabs(tensors: Sequence[Maybe], problem: Problem) -> dict[Tensor, torch.Tensor]:
    """Weights as a plan has them: `(1, heads, 1, width * M)`; w_o is turned over."""
    w_q, w_k, w_v, w_o, *biases = tensors
    assert w_o is not None  # autograd takes weights and biases as one row
    heads = (problem.heads_q, problem.heads_kv, problem.heads_kv, problem.heads_q)
    by_head = (w_q, w_k, w_v, w_o.T)
    slabs = {}
    for tensor, weight, bias, count in zip(WEIGHTS, by_head, (*biases, None), heads, strict=True):
        assert weight is not None  # as above
        wide = _widened(weight, problem.width, 0.0)
        if bias is not None:
            wide[:, weight.shape[1]] = bias
        slabs[tensor] = wide.reshape(1, count, 1, -1).contiguous()
    return slabs


def _cut(plan: Plan, whole: torch.Tensor, resident: Resident, call: AttentionCall) -> torch.Tensor:
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
    call: AttentionCall,
    like: torch.Tensor,
) -> torch.Tensor:
    """Put the pieces of y or dx together as this rank's tokens."""
    whole = torch.empty_like(like)
    for resident in plan.outputs:
        if resident.place == Place(call.rank) and resident.piece.tensor is tensor:
            columns = results[resident][:, 0, :, : like.shape[2]]
            whole[:, place_in(plan, resident.piece, call)[0]] = columns
    return whole


def _weight_gradient(
    plan: Plan,
    results: Mapping[Resident, torch.Tensor],
    part: Tensor,
    weight: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Put the heads of a weight's gradient together; those that this rank lacks are 0.

    It is as wide as the plan has it, with the columns beside the weight.
    """
    over = part is Tensor.DW_O_PART
    heads = plan.problem.heads_kv if part.on_kv else plan.problem.heads_q
    rows = weight.shape[1 if over else 0]
    by_head = weight.new_zeros((rows, plan.problem.width))
    slab = by_head.view(heads, -1)
    for resident in plan.outputs:
        if resident.place == Place(call.rank) and resident.piece.tensor in (part, FINISHED[part]):
            slab[list(members(resident.piece.heads))] = results[resident][0, :, 0].to(slab.dtype)
    return by_head.T.contiguous() if over else by_head
