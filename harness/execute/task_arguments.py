"""Arguments of a task's kernels beyond its pieces: changed scores, and turns of its tokens."""

import torch

from harness.execute import kernels
from harness.execute.rotary import Rotary, Turns, TurnsOf
from harness.execute.shards import positions_of
from harness.plan import heads as head_sets
from harness.plan.kernel_calls import Call
from harness.plan.plan import Plan
from harness.plan.slices import OffsetRange
from harness.plan.tasks import Linear, Tile


def score_change(
    plan: Plan, tile: Tile, call: Call, heads: OffsetRange, device: torch.device
) -> tuple[kernels.ScoreChange, ...]:
    """Return the change to a call's scores, if there is one.

    Args:
        plan: The plan.
        tile: Its tile.
        call: The kernel call.
        heads: Which of the tile's query heads it is for.
        device: Where the call is made.
    """
    softcap, alibi = plan.problem.softcap, plan.problem.alibi
    if alibi is None:
        return () if softcap is None else (kernels.ScoreChange(softcap=softcap),)
    slopes = [alibi[head] for head in head_sets.members(tile.heads)][slice(*heads)]
    q, k = (
        positions_of(plan.chunks(piece), device)[slice(*part)]
        for piece, part in zip(tile.reads[:2], (call.rows, call.cols), strict=True)
    )
    acc = kernels.accumulator_dtype(getattr(torch, plan.problem.dtype.value))
    on_device = torch.tensor(slopes, dtype=acc, device=device)
    return (kernels.ScoreChange(softcap=softcap, slopes=on_device, q=q, k=k),)


def turns_of_task(
    plan: Plan, task: Linear, device: torch.device, turns_of: TurnsOf | None = None
) -> Turns:
    """Turns of a product's tokens.

    Args:
        plan: The plan.
        task: A product with rotary positions.
        device: Where it is made.
        turns_of: How tokens turn; None = by positions in the whole sequence and the problem's base.
    """
    rows = next(piece for piece in task.reads if not piece.tensor.is_weight)
    chunks = plan.chunks(rows)
    if turns_of is not None:
        turns = turns_of(chunks)
    else:
        base = plan.problem.rotary
        assert base is not None  # the verifier asks rotary tasks to follow the problem
        at = positions_of(chunks, torch.device("cpu"))
        turns = Rotary(base=base).turns(at, plan.problem.head_dim, device)
    return turns._replace(cos=turns.cos.to(device), sin=turns.sin.to(device))
