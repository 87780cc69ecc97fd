"""Pieces that token owners hold at the start and at the end, for every strategy."""

from collections.abc import Iterable

from harness.plan.problem import Direction
from harness.plan.tasks import CollectiveKind, Delta, Leg, Tensor, from_rank
from harness.planning.builder import KV, KV_GRADS, OUT_PARTS, Chunks, PlanBuilder

Move = tuple[int, int, Chunks]
"""Source rank, destination rank, chunks."""

_DELTA_FROM = (Tensor.OUT, Tensor.DOUT)


def hold_tokens(b: PlanBuilder, rank: int) -> None:
    """Start with what the token owner has: q, k, v; backward also out, lse and dout."""
    heads = b.problem.all_heads
    b.hold(rank, [Tensor.Q], b.queries.owned[rank], heads)
    b.hold(rank, KV, b.keys.owned[rank], heads)
    if b.direction is Direction.BACKWARD:
        b.hold(rank, [Tensor.OUT, Tensor.LSE, Tensor.DOUT], b.queries.owned[rank], heads)


def make_delta(b: PlanBuilder, rank: int) -> None:
    """Compute delta of a token owner's rows, for plans that send it in place of out.

    Rows that attend nothing are left out unless everything travels (`b.prune`).
    """
    own = b.queries.owned[rank]
    rows = b.attending_q(own) if b.prune else own
    out, dout = (b.piece(tensor, rows, b.problem.all_heads) for tensor in _DELTA_FROM)
    if out.chunks:
        b.add(Delta(b.place(rank), out, dout))


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


# Partial outputs of queries that were attended away from their owner --------------------------


def send_outputs(b: PlanBuilder, moves: Iterable[Move]) -> None:
    """Send partial (out, lse) to the owners of the queries, one transfer each."""
    for src, dst, q in moves:
        b.send(src, dst, OUT_PARTS, q, b.problem.all_heads, arrive=from_rank(src))


def exchange_outputs(b: PlanBuilder, moves: Iterable[Move]) -> None:
    """Send partial (out, lse) to the owners of the queries as one all-to-all."""
    heads = b.problem.all_heads
    legs = [
        Leg(b.place(src), b.place(dst), b.pieces(OUT_PARTS, q, heads), from_rank(src))
        for src, dst, q in moves
    ]
    b.collective(CollectiveKind.ALL_TO_ALL, legs)


def merge_outputs(b: PlanBuilder, moves: Iterable[Move]) -> None:
    """Merge at the owners what was sent to them, in this order."""
    for src, dst, q in moves:
        b.merge(dst, OUT_PARTS, q, b.problem.all_heads, from_rank(src))
