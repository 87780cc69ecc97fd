"""Inputs of a problem, made from a seed, the same in every process."""

import torch

from harness.plan.problem import Problem
from harness.plan.tasks import Tensor


def make_inputs(
    problem: Problem, seed: int, device: torch.device | None = None
) -> dict[Tensor, torch.Tensor]:
    """Make global q, k, v and dout from a normal distribution.

    They are drawn in float32 on the CPU and rounded to the problem's dtype, so every precision and
    every device starts from the same numbers.

    Args:
        problem: Shapes and dtype.
        seed: Equal seeds give equal tensors.
        device: Where they are put; None is the CPU.

    Returns:
        q `(batch, heads_q, seqlen_q, head_dim)`, k and v with heads_kv and seqlen_kv, dout as out.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        Tensor.Q: (problem.heads_q, problem.seqlen_q, problem.head_dim),
        Tensor.K: (problem.heads_kv, problem.seqlen_kv, problem.head_dim),
        Tensor.V: (problem.heads_kv, problem.seqlen_kv, problem.head_dim_v),
        Tensor.DOUT: (problem.heads_q, problem.seqlen_q, problem.head_dim_v),
    }
    return {
        tensor: torch.randn((problem.batch, *shape), generator=generator).to(
            device=device, dtype=getattr(torch, problem.dtype.value)
        )
        for tensor, shape in shapes.items()
    }


def make_layer_inputs(
    problem: Problem, seed: int, device: torch.device | None = None
) -> dict[Tensor, torch.Tensor]:
    """Make global x, dy and weights from a normal distribution.

    Weights are scaled so that q, k, v, y and dout have about the variance of x. Drawn in float32 on
    the CPU and rounded to the problem's dtype, like the inputs of attention.

    Args:
        problem: Shapes and dtype; has a model width.
        seed: Equal seeds give equal tensors.
        device: Where they are put; None is the CPU.

    Returns:
        x and dy `(batch, 1, seqlen, hidden)`, weights `(1, heads, 1, width * hidden)`.
    """
    generator = torch.Generator().manual_seed(seed)
    model, rows = problem.width, (problem.batch, 1, problem.seqlen_q, problem.width)
    made = {tensor: torch.randn(rows, generator=generator) for tensor in (Tensor.X, Tensor.DY)}
    for tensor, heads, wide, fan_in in (
        (Tensor.W_Q, problem.heads_q, problem.head_dim, model),
        (Tensor.W_K, problem.heads_kv, problem.head_dim, model),
        (Tensor.W_V, problem.heads_kv, problem.head_dim_v, model),
        (Tensor.W_O, problem.heads_q, problem.head_dim_v, problem.heads_q * problem.head_dim_v),
    ):
        drawn = torch.randn((1, heads, 1, wide * model), generator=generator)
        made[tensor] = drawn / float(fan_in) ** 0.5
    return {
        t: x.to(device=device, dtype=getattr(torch, problem.dtype.value)) for t, x in made.items()
    }
