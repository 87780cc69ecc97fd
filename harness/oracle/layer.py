"""Inputs, names of results and reference results for the check of a whole layer."""

from collections.abc import Mapping

import torch

from harness.oracle.tolerance import Tolerance, calibrate_layer
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Tensor

LAYER_RESULTS: Mapping[Direction, tuple[tuple[str, Tensor], ...]] = {
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
