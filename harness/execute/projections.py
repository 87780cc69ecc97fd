"""The products of a layer on tensors: projections, rotary positions, and their gradients.

Shape suffix legend: B batch, H heads, S tokens, D head width, M model width.

A weight is `(1, H, 1, D * M)`, a slab like any other: per head a `(D, M)` matrix, stored by rows.
So q = x W^T and y = sum over heads of out W; w_o is stored as its transpose, head by head.

Every product takes its factors in accumulator precision and rounds once, at its end: to the dtype
of the inputs where the result is a value (q, k, v, dout), not at all where it is part of a sum.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from harness.execute.kernels import accumulator_dtype


def project(x: Tensor, weight: Tensor, angles: Tensor | None) -> Tensor:
    """Make q, k or v of some heads from x.

    Args:
        x: `(B, 1, S, M)`.
        weight: `(1, H, 1, D * M)`.
        angles: Rotary angles `(S, D / 2)` by which the result is turned; None = not turned.

    Returns:
        `(B, H, S, D)`, contiguous, in the dtype of x.
    """
    x_BSM, w_HDM = _rows(x), _matrices(weight, x.shape[3])
    batch, seqlen, heads, width = *x_BSM.shape[:2], *w_HDM.shape[:2]
    flat = x_BSM.reshape(batch * seqlen, -1) @ w_HDM.reshape(heads * width, -1).T
    made = flat.reshape(batch, seqlen, heads, width).transpose(1, 2)
    if angles is not None:
        made = rotate(made, angles)
    return _made(made, x.dtype)


def to_model(
    values: Tensor, weight: Tensor, angles: Tensor | None, into: Tensor | None = None
) -> Tensor:
    """Multiply values of some heads back to the model's width, summed over those heads.

    This is y from out, and what dq, dk or dv add to dx.

    Args:
        values: `(B, H, S, D)`.
        weight: `(1, H, 1, D * M)`.
        angles: Rotary angles that are first undone; None = none.
        into: A contiguous result to add to, in place; None = make one.

    Returns:
        `(B, 1, S, M)`, contiguous, in accumulator precision.
    """
    flat, shape = _flat(values, angles)
    w_HDM = weight.to(flat.dtype).reshape(flat.shape[1], -1)
    if into is not None:
        into.view(flat.shape[0], -1).addmm_(flat, w_HDM)
        return into
    return (flat @ w_HDM).reshape(shape[0], 1, shape[2], -1)


def from_model(rows: Tensor, weight: Tensor) -> Tensor:
    """Make dout of some heads from dy; arguments and result as `project`."""
    return project(rows, weight, None)


def weight_gradient(
    values: Tensor, rows: Tensor, angles: Tensor | None, into: Tensor | None = None
) -> Tensor:
    """Contribution of some tokens to the gradient of a weight: values^T rows, head by head.

    Args:
        values: dq, dk, dv or out, `(B, H, S, D)`.
        rows: x or dy, `(B, 1, S, M)`.
        angles: Rotary angles that are first undone; None = none.
        into: A contiguous result to add to, in place; None = make one.

    Returns:
        `(1, H, 1, D * M)`, contiguous, in accumulator precision.
    """
    flat, shape = _flat(values, angles)
    right = _rows(rows).reshape(flat.shape[0], -1)
    if into is not None:
        into.view(flat.shape[1], -1).addmm_(flat.T, right)
        return into
    return (flat.T @ right).reshape(1, shape[1], 1, -1)


def angles_of(
    positions: Sequence[range], base: float, head_dim: int, device: torch.device
) -> Tensor:
    """Rotary angles of tokens: position times base ** (-2 i / head_dim), computed in float64.

    Args:
        positions: Global positions of the tokens, chunk by chunk.
        base: Of the geometric row of frequencies.
        head_dim: D, even.
        device: Where the result is.

    Returns:
        `(S, D / 2)` float64.

    Source: Su et al., RoFormer (arXiv:2104.09864, section 3.2.2).
    """
    span = partial(torch.arange, dtype=torch.float64, device="cpu")
    at_S = torch.cat([span(c.start, c.stop, c.step) for c in positions])
    exponents = span(0, head_dim, 2) / head_dim
    return torch.outer(at_S, base**-exponents).to(device)


def rotate(values: Tensor, angles: Tensor) -> Tensor:
    """Turn neighbouring pairs of the last axis by angles; minus the angles undo it.

    Args:
        values: `(B, H, S, D)`, in accumulator precision.
        angles: `(S, D / 2)` float64.
    """
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    even, odd = values[..., 0::2], values[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _rows(x: Tensor) -> Tensor:
    """`(B, S, M)` of a tensor without heads, contiguous, in accumulator precision."""
    return x[:, 0].to(accumulator_dtype(x.dtype)).contiguous()


def _matrices(weight: Tensor, model: int) -> Tensor:
    """`(H, D, M)` of a weight, contiguous, in accumulator precision."""
    wide = weight.to(accumulator_dtype(weight.dtype)).contiguous()
    return wide.reshape(weight.shape[1], -1, model)


def _flat(values: Tensor, angles: Tensor | None) -> tuple[Tensor, torch.Size]:
    """`(B S, H D)` of values, in accumulator precision, turned back."""
    wide = values.to(accumulator_dtype(values.dtype))
    if angles is not None:
        wide = rotate(wide, -angles)
    batch, heads, seqlen, width = values.shape
    return wide.transpose(1, 2).reshape(batch * seqlen, heads * width), values.shape


def _made(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor with a storage of its own."""
    return torch.empty(values.shape, dtype=dtype, device=values.device).copy_(values)
