"""Kernel calls with a mask of positions, cut into batches of blocks of rows.

Shapes as in `kernels.py`, with N blocks of L rows and W columns in a batch: q becomes
`(B * N, H, L, D)`, k `(B * N, G, W, D)`, and the mask `(B * N or 1, 1, L, W)`. How rows and columns
are cut is said once, in `harness.plan.row_blocks`; what is here moves tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.execute.kernels_cuda import Pair, Six, Triple
from harness.plan.masks import Mask
from harness.plan.row_blocks import Batch, Columns, batches


class Forward(Protocol):
    """A kernel: `(out, lse)`, lse -inf in rows that the bias empties."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
    ) -> Pair:
        """Attend."""


class Backward(Protocol):
    """A kernel: `(dq, dk, dv)` of dout, q, k, v, out and lse."""

    def __call__(self, six: Six, bias: Tensor | None, *, causal: bool, scale: float) -> Triple:
        """Return the gradients."""


MergeInto = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Merges (out, lse) of further keys into the first two; see `kernels.merge_`."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a batch: all of its blocks', the last one again where a block has none left."""

    index: Tensor
    real: Tensor | None  # which of them are no repetition; None = all

    @classmethod
    def of(cls, batch: Batch, size: int, device: torch.device) -> "_Rows":
        length = batch.seen.shape[1]
        index = torch.as_tensor(batch.rows, device=device)[:, None]
        index = (index + torch.arange(length, device=device)).reshape(-1)
        if int(batch.rows[-1]) + length <= size:
            return cls(index, None)
        return cls(index.clamp(max=size - 1), (index < size).nonzero().squeeze(1))

    def take(self, x: Tensor, blocks: int) -> Tensor:
        return _blocked(x.index_select(2, self.index), blocks)

    def put(self, x: Tensor, into: Tensor) -> None:
        x = _by_batch(x, into.shape[0]).transpose(1, 2).flatten(2, 3)
        if self.real is None:
            into.index_copy_(2, self.index, x)
        else:
            into.index_copy_(2, self.index[self.real], x.index_select(2, self.real))


def forward(
    run: Forward, merge: MergeInto, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> Pair:
    """Attend as `mask` says; rows that meet no key get out 0 and lse -inf.

    Returns:
        `(out, lse)`, out laid out as a kernel does: all heads of a token side by side.
    """
    size, acc = q.shape[2], torch.promote_types(q.dtype, torch.float32)
    out = _token_major(q, size, v.shape[3]).zero_()
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=acc)
    for batch in batches(mask):
        rows, blocks = _Rows.of(batch, size, q.device), len(batch.rows)
        q_part = rows.take(q, blocks)
        found: Pair | None = None
        for columns, bias in _calls(batch, q):
            k_part, v_part = (_columns(x, columns) for x in (k, v))
            part = run(q_part, k_part, v_part, bias, causal=False, scale=scale)
            if found is None:
                found = part
            else:
                found = found[0].to(acc), found[1]
                merge(*found, *part)
        assert found is not None  # a batch has columns
        rows.put(found[0].to(q.dtype), out)
        rows.put(found[1], lse)
    return out, lse


def backward(run: Backward, six: Six, mask: Mask, scale: float) -> Triple:
    """Return `(dq, dk, dv)` as `mask` says, laid out as a kernel does; lse as a kernel takes it."""
    dout, q, k, v, out, lse = six
    size, acc = q.shape[2], lse.dtype
    dq = _token_major(q, size, q.shape[3]).zero_()
    dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (k, v))
    for batch in batches(mask):
        rows, blocks = _Rows.of(batch, size, q.device), len(batch.rows)
        dout_part, q_part, out_part = (rows.take(x, blocks) for x in (dout, q, out))
        lse_part = rows.take(lse, blocks)
        if rows.real is not None:  # repeated columns have no weight
            gone = torch.ones(len(rows.index), dtype=torch.bool, device=q.device)
            gone[rows.real] = False
            hidden = gone.view(-1, 1, batch.seen.shape[1]).repeat(q.shape[0], 1, 1)
            lse_part = lse_part.masked_fill(hidden, torch.inf)
        sums: Tensor | None = None
        for columns, bias in _calls(batch, q):
            k_part, v_part = (_columns(x, columns) for x in (k, v))
            part = run(
                (dout_part, q_part, k_part, v_part, out_part, lse_part),
                bias,
                causal=False,
                scale=scale,
            )
            sums = part[0].to(acc) if sums is None else sums.add_(part[0])
            _add_columns(part[1], columns, dk)
            _add_columns(part[2], columns, dv)
        assert sums is not None  # as above
        rows.put(sums.to(q.dtype), dq)
    return dq, _as_kernel(dk, q.dtype), _as_kernel(dv, q.dtype)


def _calls(batch: Batch, like: Tensor) -> Iterator[tuple[Columns, Tensor | None]]:
    """The kernel calls of a batch: its edges, masked, and what all rows meet."""
    if batch.edges:
        seen = torch.as_tensor(batch.seen, device=like.device)[:, None]
        bias = like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        yield batch.edges, bias if len(bias) == 1 else bias.repeat(like.shape[0], 1, 1, 1)
    if batch.common is not None:
        yield (batch.common,), None


def _blocked(x: Tensor, blocks: int) -> Tensor:
    """(B, H, N * L, ...) -> (B * N, H, L, ...)."""
    batch, heads, rows, *rest = x.shape
    x = x.reshape(batch, heads, blocks, rows // blocks, *rest).transpose(1, 2)
    return x.reshape(batch * blocks, heads, rows // blocks, *rest)


def _by_batch(x: Tensor, batch: int) -> Tensor:
    """(B * N, H, L, ...) -> (B, N, H, L, ...)."""
    return x.reshape(batch, len(x) // batch, *x.shape[1:])


def _columns(x: Tensor, columns: Columns) -> Tensor:
    """Copy runs of columns of each block; columns outside of x belong to tokens that are masked."""
    blocks = len(columns[0][0])
    index = torch.cat(
        [
            torch.as_tensor(first, device=x.device)[:, None] + torch.arange(count, device=x.device)
            for first, count in columns
        ],
        dim=1,
    )
    return _blocked(x.index_select(2, index.clamp_(0, x.shape[2] - 1).reshape(-1)), blocks)


def _add_columns(part: Tensor, columns: Columns, into: Tensor) -> None:
    """Add what blocks give to their columns, block by block: they overlap."""
    part = _by_batch(part, into.shape[0])
    at = 0
    for firsts, count in columns:
        for block, first in enumerate(firsts.tolist()):
            low, high = max(first, 0), min(first + count, into.shape[2])
            if low < high:
                inside = part[:, block, :, at + low - first : at + high - first]
                into[:, :, low:high].add_(inside)
        at += count


def _token_major(like: Tensor, size: int, width: int) -> Tensor:
    return like.new_empty((like.shape[0], size, like.shape[1], width)).transpose(1, 2)


def _as_kernel(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a sum into the precision and the layout of a kernel's result."""
    into = torch.empty(x.transpose(1, 2).shape, dtype=dtype, device=x.device).transpose(1, 2)
    return into.copy_(x)
