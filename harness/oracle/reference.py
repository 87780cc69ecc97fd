"""Inputs, names of results and reference results for the check of a problem."""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

from harness.oracle import layer
from harness.oracle.inputs import make_inputs, make_layer_inputs
from harness.oracle.tolerance import Tolerance, calibrate
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Tensor
from patterns.pattern import Pattern

RESULTS: Mapping[Direction, tuple[tuple[str, Tensor], ...]] = {
    Direction.FORWARD: (("out", Tensor.OUT), ("lse", Tensor.LSE)),
    Direction.BACKWARD: (("dq", Tensor.DQ), ("dk", Tensor.DK), ("dv", Tensor.DV)),
}
"""Names of attention's results; those of a layer are in `layer.RESULTS`."""


def results_of(problem: Problem, direction: Direction) -> tuple[tuple[str, Tensor], ...]:
    """Names of what a direction is judged on."""
    return (RESULTS if problem.hidden is None else layer.LAYER_RESULTS)[direction]


def inputs_of(
    problem: Problem, seed: int, device: torch.device | None = None
) -> dict[Tensor, torch.Tensor]:
    """Global inputs of attention or of a layer."""
    make = make_inputs if problem.hidden is None else make_layer_inputs
    return make(problem, seed, device)


@lru_cache(maxsize=8)
def reference_of(problem: Problem, seed: int, kv_heads: int | None = None) -> Tolerance:
    """Run the oracle; strategies and degrees of one problem share it.

    Args:
        problem: With cp=1, so that all degrees share the answer.
        seed: Of the inputs.
        kv_heads: Attend only the first KV heads and their query heads, where all take too long;
            None: all. Of a layer no part can be judged alone: all heads are in y.
    """
    tensors = inputs_of(problem, seed)
    mask = allowed_mask(problem.pattern)
    if problem.hidden is not None:
        return layer.layer_reference(problem, tensors, mask)
    kv = problem.heads_kv if kv_heads is None else kv_heads
    q, dout = (tensors[tensor][:, : kv * problem.group] for tensor in (Tensor.Q, Tensor.DOUT))
    k, v = (tensors[tensor][:, :kv] for tensor in (Tensor.K, Tensor.V))
    return calibrate(q, k, v, mask, scale=problem.softmax_scale, dout=dout)


def allowed_mask(pattern: Pattern) -> torch.Tensor:
    """Dense mask for the oracle, from the pattern's own definition."""
    q, kv = np.arange(pattern.seqlen_q), np.arange(pattern.seqlen_kv)
    return torch.from_numpy(pattern.allowed(q, kv))
