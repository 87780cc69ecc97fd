"""What a whole layer is checked with: its inputs, the names of its results, and their reference."""

from collections.abc import Mapping

import torch

from harness.execute.interpreter import DTYPES
from harness.oracle.tolerance import Tolerance, calibrate_layer
from harness.plan.plan import Tensor
from harness.plan.problem import Direction, Problem

RESULTS: Mapping[Direction, tuple[tuple[str, Tensor], ...]] = {
    Direction.FORWARD: (("y", Tensor.Y),),
    Direction.BACKWARD: (
        ("dx", Tensor.DX),
        ("dw_q", Tensor.DW_Q_PART),
        ("dw_k", Tensor.DW_K_PART),
        ("dw_v", Tensor.DW_V_PART),
        ("dw_o", Tensor.DW_O_PART),
    ),
}
"""Names of a layer's results; a weight's gradient is the sum of what ranks have of it."""


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
    return {t: x.to(device=device, dtype=DTYPES[problem.dtype]) for t, x in made.items()}


def layer_reference(
    problem: Problem, tensors: Mapping[Tensor, torch.Tensor], allowed: torch.Tensor
) -> Tolerance:
    """Run the dense layer on global inputs; its tensors are shaped as the results here."""
    weights = {
        name: tensors[tensor][0, :, 0].reshape(heads, -1, problem.width)
        for name, tensor, heads in (
            ("w_q", Tensor.W_Q, problem.heads_q),
            ("w_k", Tensor.W_K, problem.heads_kv),
            ("w_v", Tensor.W_V, problem.heads_kv),
            ("w_o", Tensor.W_O, problem.heads_q),
        )
    }
    return calibrate_layer(
        tensors[Tensor.X][:, 0],
        weights,
        allowed,
        scale=problem.softmax_scale,
        dy=tensors[Tensor.DY][:, 0],
        rotary=problem.rotary,
    )
