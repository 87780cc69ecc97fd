"""Tokens that a plan moves for nothing, from positions and the definition of the pattern alone."""

import numpy as np

from harness.plan.plan import Plan
from harness.plan.tasks import Tensor, Tile, legs_of


def positions(plan: Plan, tensor: Tensor, chunks: tuple[int, ...]) -> set[int]:
    table = plan.kv_chunks if tensor.on_kv else plan.q_chunks
    return {at for chunk in chunks for at in table[chunk]}


def unused(plan: Plan) -> list[tuple[int, Tensor, set[int]]]:
    """Tokens that a rank receives, attends nothing with, and sends to nobody."""
    allowed = plan.problem.pattern.allowed(
        np.arange(plan.problem.seqlen_q), np.arange(plan.problem.seqlen_kv)
    )
    used: dict[tuple[int, Tensor], set[int]] = {}
    got: dict[tuple[int, Tensor], set[int]] = {}
    for task in plan.tasks:
        if isinstance(task, Tile):
            q, k = (sorted(positions(plan, t.tensor, t.chunks)) for t in task.reads[:2])
            pairs = allowed[np.ix_(q, k)]
            rank = task.place.rank
            used.setdefault((rank, Tensor.Q), set()).update(np.array(q)[pairs.any(axis=1)].tolist())
            used.setdefault((rank, Tensor.K), set()).update(np.array(k)[pairs.any(axis=0)].tolist())
        for leg in legs_of(task):
            for piece in leg.pieces:
                if piece.tensor in (Tensor.Q, Tensor.K) and leg.src != leg.dst:
                    moved = positions(plan, piece.tensor, piece.chunks)
                    used.setdefault((leg.src.rank, piece.tensor), set()).update(moved)
                    got.setdefault((leg.dst.rank, piece.tensor), set()).update(moved)
    left = [
        (rank, tensor, at - used.get((rank, tensor), set())) for (rank, tensor), at in got.items()
    ]
    return [each for each in left if each[2]]
