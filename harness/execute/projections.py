"""The products of a layer on tensors: projections, rotary positions, and their gradients.

Shape suffix legend: B batch, H heads, S tokens, D head width, M model width.

A weight is `(1, H, 1, D * M)`, a slab like any other: per head a `(D, M)` matrix, stored by rows.
So q = x W^T and y = sum over heads of out W; w_o is stored as its transpose, head by head.

Every product takes its factors in accumulator precision and rounds once, at its end: to the dtype
of the inputs where the result is a value (q, k, v, dout), not at all where it is part of a sum.
"""

import torch
from torch import Tensor

from harness.execute.kernels import accumulator_dtype
from harness.execute.rotary import Turns, rotate


def project_tensors(x: Tensor, weight: Tensor, turns: Turns | None) -> Tensor:
    """Make q, k or v of some heads from x.

    Args:
        x: `(B, 1, S, M)`.
        weight: `(1, H, 1, D * M)`.
        turns: Rotary turns of the tokens, by which the result is turned; None = not turned.

    Returns:
        `(B, H, S, D)`, contiguous, in the dtype of x.
    """
    x_BSM, w_HDM = _rows(x), _matrices(weight, x.shape[3])
    batch, seqlen, heads, width = *x_BSM.shape[:2], *w_HDM.shape[:2]
    flat = x_BSM.reshape(batch * seqlen, -1) @ w_HDM.reshape(heads * width, -1).T
    made = flat.reshape(batch, seqlen, heads, width).transpose(1, 2)
    if turns is not None:
        made = rotate(made, turns)
    return _made(made, x.dtype)


def to_model(
    values: Tensor, weight: Tensor, turns: Turns | None, into: Tensor | None = None
) -> Tensor:
    """Multiply values of some heads back to the model's width, summed over those heads.

    This is y from out, and what dq, dk or dv add to dx.

    Args:
        values: `(B, H, S, D)`.
        weight: `(1, H, 1, D * M)`.
        turns: Rotary turns, by whose transposes they are turned first; None = not turned.
        into: A contiguous result to add to, in place; None = make one.

    Returns:
        `(B, 1, S, M)`, contiguous, in accumulator precision.
    """
    flat, shape = _flat(values, turns)
    w_HDM = weight.to(flat.dtype).reshape(flat.shape[1], -1)
    if into is not None:
        into.view(flat.shape[0], -1).addmm_(flat, w_HDM)
        return into
    return (flat @ w_HDM).reshape(shape[0], 1, shape[2], -1)


def from_model(rows: Tensor, weight: Tensor) -> Tensor:
    """Make dout of some heads from dy; arguments and result as `project`."""
    return project_tensors(rows, weight, None)


def weight_gradient(
    values: Tensor, rows: Tensor, turns: Turns | None, into: Tensor | None = None
) -> Tensor:
    """Contribution of some tokens to the gradient of a weight: values^T rows, head by head.

    Args:
        values: dq, dk, dv or out, `(B, H, S, D)`.
        rows: x or dy, `(B, 1, S, M)`.
        turns: Rotary turns, by whose transposes they are turned first; None = not turned.
        into: A contiguous result to add to, in place; None = make one.

    Returns:
        `(1, H, 1, D * M)`, contiguous, in accumulator precision.
    """
    flat, shape = _flat(values, turns)
    right = _rows(rows).reshape(flat.shape[0], -1)
    if into is not None:
        into.view(flat.shape[1], -1).addmm_(flat.T, right)
        return into
    return (flat.T @ right).reshape(1, shape[1], 1, -1)


def _rows(x: Tensor) -> Tensor:
    """`(B, S, M)` of a tensor without heads, contiguous, in accumulator precision."""
    return x[:, 0].to(accumulator_dtype(x.dtype)).contiguous()


def _matrices(weight: Tensor, model: int) -> Tensor:
    """`(H, D, M)` of a weight, contiguous, in accumulator precision."""
    wide = weight.to(accumulator_dtype(weight.dtype)).contiguous()
    return wide.reshape(weight.shape[1], -1, model)


def _flat(values: Tensor, turns: Turns | None) -> tuple[Tensor, torch.Size]:
    """`(B S, H D)` of values, in accumulator precision, turned back."""
    wide = values.to(accumulator_dtype(values.dtype))
    if turns is not None:
        wide = rotate(wide, turns.transposed())
    batch, heads, seqlen, width = values.shape
    return wide.transpose(1, 2).reshape(batch * seqlen, heads * width), values.shape


def _made(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor with a storage of its own."""
    return torch.empty(values.shape, dtype=dtype, device=values.device).copy_(values)
