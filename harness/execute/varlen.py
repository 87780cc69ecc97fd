"""Packed documents by varlen kernels: one call for the causal squares, one for what is full.

Shapes as in `kernels.py`. A varlen kernel takes rows of all segments behind one another,
`(rows, H, D)`, and where each begins (`cu_seqlens`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from harness.execute.kernels_cuda import Pair, Six, Triple
from harness.execute.row_blocks import MergeInto
from harness.execute.varlen_segments import Segments, varlen_of
from harness.plan.masks import Mask
from patterns.areas import Ints


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where segments begin, int32 on the device, and the longest on either side."""

    q: Tensor
    k: Tensor
    most_q: int
    most_k: int


class VarlenForward(Protocol):
    """A kernel: `(out (rows, H, E), lse (H, rows))` of packed q, k and v."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, at: Lengths, *, causal: bool, scale: float
    ) -> Pair:
        """Attend."""


class VarlenBackward(Protocol):
    """A kernel: `(dq, dk, dv)` of packed dout, q, k, v, out and lse `(H, rows)`."""

    def __call__(self, six: Six, at: Lengths, *, causal: bool, scale: float) -> Triple:
        """Return the gradients."""


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """One varlen kernel."""

    forward: VarlenForward
    backward: VarlenBackward


def packed_forward(
    kernel: VarlenKernel,
    merge: MergeInto,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
) -> Pair | None:
    """Attend as `kernels.attend_call` does; None where the mask is no set of segments.

    Args:
        kernel: Called at most twice.
        merge: Merges (out, lse) of further keys into the first two; see `kernels.merge_`.
        q: `(B, H, S, D)`.
        k: `(B, G, T, D)`.
        v: `(B, G, T, D)`.
        mask: PACKED.
        scale: Factor of the scores.
    """
    parts = varlen_of(mask)
    if parts is None:
        return None
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype)
    for call, causal in _calls(parts, q):
        own = (call.rows_of(q), call.columns_of(k), call.columns_of(v))
        part, part_lse = kernel.forward(*own, call.lengths, causal=causal, scale=scale)
        part, part_lse = (
            call.apart(part),
            part_lse.reshape(part_lse.shape[0], len(q), -1).transpose(0, 1),
        )
        before, before_lse = out[:, :, call.rows], lse[:, :, call.rows]
        merge(before, before_lse, part, part_lse.to(lse_dtype).contiguous())
        out[:, :, call.rows], lse[:, :, call.rows] = before, before_lse
    return out, lse


def packed_backward(kernel: VarlenKernel, six: Six, mask: Mask, scale: float) -> Triple | None:
    """Return gradients as `kernels.attend_backward` does; None where the mask is no segments.

    lse is that of the whole softmax, +inf in rows that met no key. dk and dv of both calls are
    summed in the accumulator dtype.
    """
    parts = varlen_of(mask)
    if parts is None:
        return None
    dout, q, k, v, out, lse = six
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for call, causal in _calls(parts, q):
        given = (
            *(call.rows_of(dout), call.rows_of(q), call.columns_of(k), call.columns_of(v)),
            call.rows_of(out),
            lse[:, :, call.rows].transpose(0, 1).flatten(1).contiguous(),
        )
        grads = kernel.backward(given, call.lengths, causal=causal, scale=scale)
        for total, grad, at in zip(
            (dq, dk, dv), grads, (call.rows, call.columns, call.columns), strict=True
        ):
            total.index_add_(2, at, call.apart(grad, batch=len(q)).to(total.dtype))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Call:
    """Segments of one kind: their rows and columns, and the lengths for every batch."""

    rows: Tensor
    columns: Tensor
    lengths: Lengths
    batch: int

    def rows_of(self, x: Tensor) -> Tensor:
        """(B, H, S, D) -> (B * rows, H, D), contiguous."""
        return x.index_select(2, self.rows).transpose(1, 2).flatten(0, 1).contiguous()

    def columns_of(self, x: Tensor) -> Tensor:
        """(B, G, T, D) -> (B * columns, G, D), contiguous."""
        return x.index_select(2, self.columns).transpose(1, 2).flatten(0, 1).contiguous()

    def apart(self, x: Tensor, batch: int | None = None) -> Tensor:
        """(B * rows, H, D) -> (B, H, rows, D)."""
        return x.reshape(batch or self.batch, -1, *x.shape[1:]).transpose(1, 2)


def _calls(parts: tuple[Segments, Segments], like: Tensor) -> Iterator[tuple[_Call, bool]]:
    for segments, causal in zip(parts, (True, False), strict=True):
        if len(segments.r0):
            yield _call(segments, like), causal


def _call(segments: Segments, like: Tensor) -> _Call:
    r0, r1, c0, c1 = segments
    device, batch = like.device, len(like)
    lengths = Lengths(
        _begins(r1 - r0, batch, device),
        _begins(c1 - c0, batch, device),
        int((r1 - r0).max()),
        int((c1 - c0).max()),
    )
    return _Call(_all(r0, r1, device), _all(c0, c1, device), lengths, batch)


def _all(start: Ints, stop: Ints, device: torch.device) -> Tensor:
    """Every offset of half-open ranges, one range behind the other."""
    sizes = stop - start
    before = np.cumsum(sizes) - sizes
    offsets = np.arange(sizes.sum()) + np.repeat(start - before, sizes)
    return torch.as_tensor(offsets, device=device)


def _begins(sizes: Ints, batch: int, device: torch.device) -> Tensor:
    ends = np.concatenate([[0], np.cumsum(np.tile(sizes, batch))])
    return torch.as_tensor(ends.astype(np.int32), device=device)
