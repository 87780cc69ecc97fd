"""Every tensor of a problem, dense and in float64, by the formulas: what a right plan must give.

Shares no code with the kernels, the oracle or the executor.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor as Array

from harness.plan.problem import Problem
from harness.plan.tasks import Tensor


@lru_cache(maxsize=256)
def truth(problem: Problem) -> dict[Tensor, Array]:
    """Global tensors by kind, shaped as a plan's pieces: `(batch, heads, tokens, width)`.

    lse and delta lack the width, x and its like have one head, weights one token.
    """
    rng = torch.Generator().manual_seed(5)
    found: dict[Tensor, Array] = {}

    def drawn(tensor: Tensor, *shape: int, scale: float = 1.0) -> None:
        found[tensor] = torch.randn(shape, generator=rng, dtype=torch.float64) * scale

    batch, d_k, d_v = problem.batch, problem.head_dim, problem.head_dim_v
    if problem.hidden is None:
        drawn(Tensor.Q, batch, problem.heads_q, problem.seqlen_q, d_k)
        drawn(Tensor.K, batch, problem.heads_kv, problem.seqlen_kv, d_k)
        drawn(Tensor.V, batch, problem.heads_kv, problem.seqlen_kv, d_v)
        drawn(Tensor.DOUT, batch, problem.heads_q, problem.seqlen_q, d_v)
        return found | _attention(problem, found)
    model = problem.hidden
    drawn(Tensor.X, batch, 1, problem.seqlen_q, model)
    drawn(Tensor.DY, batch, 1, problem.seqlen_q, model)
    for tensor, heads, width in (
        (Tensor.W_Q, problem.heads_q, d_k),
        (Tensor.W_K, problem.heads_kv, d_k),
        (Tensor.W_V, problem.heads_kv, d_v),
        (Tensor.W_O, problem.heads_q, d_v),
    ):
        drawn(tensor, 1, heads, 1, width * model, scale=model**-0.5)
    return found | _layer(problem, found)


def _layer(problem: Problem, given: dict[Tensor, Array]) -> dict[Tensor, Array]:
    model = problem.width
    x, dy = given[Tensor.X][:, 0], given[Tensor.DY][:, 0]
    w_q, w_k, w_v, w_o = (
        given[t][0, :, 0].unflatten(-1, (-1, model))  # (heads, width, model)
        for t in (Tensor.W_Q, Tensor.W_K, Tensor.W_V, Tensor.W_O)
    )
    to_heads = "bsm,hdm->bhsd"
    found = {
        Tensor.Q: _turned(problem, torch.einsum(to_heads, x, w_q), 1),
        Tensor.K: _turned(problem, torch.einsum(to_heads, x, w_k), 1),
        Tensor.V: torch.einsum(to_heads, x, w_v),
        Tensor.DOUT: torch.einsum(to_heads, dy, w_o),
    }
    found |= _attention(problem, found)
    found[Tensor.Y] = torch.einsum("bhsd,hdm->bsm", found[Tensor.OUT], w_o)[:, None]
    dx = torch.zeros_like(x)
    for gradient, weight, result in (
        (_turned(problem, found[Tensor.DQ], -1), w_q, Tensor.DW_Q),
        (_turned(problem, found[Tensor.DK], -1), w_k, Tensor.DW_K),
        (found[Tensor.DV], w_v, Tensor.DW_V),
    ):
        dx += torch.einsum("bhsd,hdm->bsm", gradient, weight)
        found[result] = _weight(torch.einsum("bhsd,bsm->hdm", gradient, x))
    found[Tensor.DX] = dx[:, None]
    found[Tensor.DW_O] = _weight(torch.einsum("bhsd,bsm->hdm", found[Tensor.OUT], dy))
    return found


def _weight(matrices: Array) -> Array:
    return matrices.flatten(1)[None, :, None]


def _turned(problem: Problem, values: Array, way: int) -> Array:
    """Rotate neighbouring pairs as complex numbers."""
    if problem.rotary is None:
        return values
    width = values.shape[-1]
    rates = problem.rotary ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(values.shape[2], dtype=torch.float64)[:, None] * rates
    turns = torch.polar(torch.ones_like(angles), way * angles)
    pairs = torch.view_as_complex(values.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


def _attention(problem: Problem, given: dict[Tensor, Array]) -> dict[Tensor, Array]:
    group = problem.group
    q, dout = given[Tensor.Q], given[Tensor.DOUT]
    k, v = (given[t].repeat_interleave(group, dim=1) for t in (Tensor.K, Tensor.V))
    allowed = allowed_of(problem)
    scale = problem.head_dim**-0.5
    scores = (q @ k.mT * scale).masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.where(allowed, torch.exp(scores - lse[..., None]), 0.0)
    out = p @ v
    delta = (out * dout).sum(-1)
    ds = p * (dout @ v.mT - delta[..., None]) * scale

    def over_group(gradient: Array) -> Array:
        return gradient.unflatten(1, (-1, group)).sum(2)

    return {
        Tensor.OUT: out,
        Tensor.LSE: lse,
        Tensor.DELTA: delta,
        Tensor.DQ: ds @ k,
        Tensor.DK: over_group(ds.mT @ q),
        Tensor.DV: over_group(p.mT @ dout),
    }


@lru_cache(maxsize=256)
def allowed_of(problem: Problem) -> Array:
    """Who attends whom: `(queries, keys)`, from the pattern's own definition."""
    q, kv = np.arange(problem.seqlen_q), np.arange(problem.seqlen_kv)
    return torch.tensor(problem.pattern.allowed(q, kv))
