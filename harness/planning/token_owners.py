"""Pieces that token owners hold at the start and at the end, for every strategy."""

from harness.plan.problem import Direction
from harness.plan.tasks import Tensor
from harness.planning.builder import KV, KV_GRADS, OUT_PARTS, PlanBuilder


def hold_tokens(b: PlanBuilder, rank: int) -> None:
    """Start with what the token owner has: q, k, v; backward also out, lse and dout."""
    heads = b.problem.all_heads
    b.hold(rank, [Tensor.Q], b.queries.owned[rank], heads)
    b.hold(rank, KV, b.keys.owned[rank], heads)
    if b.direction is Direction.BACKWARD:
        b.hold(rank, [Tensor.OUT, Tensor.LSE, Tensor.DOUT], b.queries.owned[rank], heads)


def finish_tokens(b: PlanBuilder, rank: int) -> None:
    """End at the token owner: finish its results, promise and save them."""
    q, kv, heads = b.queries.owned[rank], b.keys.owned[rank], b.problem.all_heads
    if b.direction is Direction.FORWARD:
        b.finish(rank, OUT_PARTS, q, heads)
        b.output(rank, [Tensor.OUT], q, heads)
        b.save(rank, [Tensor.Q, Tensor.OUT, Tensor.LSE], q, heads)
        b.save(rank, KV, kv, heads)
    else:
        b.finish(rank, [Tensor.DQ_PART], q, heads)
        b.finish(rank, KV_GRADS, kv, heads)
        output_gradients(b, rank)


def output_gradients(b: PlanBuilder, rank: int) -> None:
    """Promise that dq, dk and dv end at the token owner."""
    heads = b.problem.all_heads
    b.output(rank, [Tensor.DQ], b.queries.owned[rank], heads)
    b.output(rank, [Tensor.DK, Tensor.DV], b.keys.owned[rank], heads)
