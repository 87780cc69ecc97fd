"""Inputs of a problem, made from a seed, the same in every process."""

import torch

from harness.execute.interpreter import DTYPES
from harness.plan.plan import Tensor
from harness.plan.problem import Problem


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
            device=device, dtype=DTYPES[problem.dtype]
        )
        for tensor, shape in shapes.items()
    }
