"""Attention whose scores are changed before the softmax: capped, or lowered by distance.

No flash operator of torch takes such scores, so these are matrix products over tiles of bounded
size, in the accumulator precision, forward and backward. Shapes and results as in `kernels.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.execute.kernels_cuda import Pair, Six, Triple
from harness.execute.row_blocks import MergeInto
from harness.plan.masks import Mask, MaskKind
from harness.plan.row_blocks import spans

_ROWS = 128
_SCORES = 1 << 21
"""Scores that are held together: 8 MiB in float32, of which a backward pass holds three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreChange:
    """Changes to the scaled scores of a call, in this order.

    Attributes:
        softcap: Scores s become `softcap * tanh(s / softcap)` (Gemma 2, arXiv:2408.00118, section
            2); None = they stay.
        slopes: `(H,)`: a score loses the slope of its head times the distance of query and key
            (ALiBi, arXiv:2108.12409, section 3); None = nothing.
        q: Positions of the queries, `(S,)` int64; None without slopes.
        k: Positions of the keys, `(T,)` int64; None without slopes.
    """

    softcap: float | None = None
    slopes: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some rows and columns of a call, and which of its pairs are hidden; None = none is."""

    rows: slice
    cols: slice
    hidden: Tensor | None


def forward(
    merge: MergeInto, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, change: ScoreChange
) -> Pair:
    """Attend; rows that meet no key get out 0 and lse -inf."""
    acc = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=acc)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=acc)
    group = q.shape[1] // k.shape[1]
    for tile in _tiles(mask, q.shape[0] * q.shape[1], q.device):
        q_part, (k_part, v_part) = q[:, :, tile.rows].to(acc), _keys((k, v), tile, group, acc)
        scores, _ = _scores(q_part, k_part, tile, scale, change)
        part_lse = torch.logsumexp(scores, dim=-1)
        weights = scores.sub_(_no_weight(part_lse)[..., None]).exp_()
        merge(out[:, :, tile.rows], lse[:, :, tile.rows], weights @ v_part, part_lse)
    return out.to(q.dtype), lse


def backward(six: Six, mask: Mask, scale: float, change: ScoreChange) -> Triple:
    """Return `(dq, dk, dv)`.

    Args:
        six: dout, q, k, v, delta = `rowsum(dout * out)` of shape `(B, H, S)` in place of out, and
            lse, -inf in a row that met no key.
        mask: As forward.
        scale: As forward.
        change: As forward.
    """
    dout, q, k, v, delta, lse = six
    acc, group = lse.dtype, q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (q, k, v))
    top = _no_weight(lse)[..., None]
    for tile in _tiles(mask, q.shape[0] * q.shape[1], q.device):
        rows = tile.rows
        q_part, dout_part = q[:, :, rows].to(acc), dout[:, :, rows].to(acc)
        k_part, v_part = _keys((k, v), tile, group, acc)
        weights, slope = _scores(q_part, k_part, tile, scale, change)
        weights.sub_(top[:, :, rows]).exp_()
        _add_keys(dv, weights.mT @ dout_part, tile, group)
        dscores = (dout_part @ v_part.mT).sub_(delta[:, :, rows, None]).mul_(weights).mul_(scale)
        if slope is not None:
            dscores.mul_(slope)
        dq[:, :, rows] += dscores @ k_part
        _add_keys(dk, dscores.mT @ q_part, tile, group)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _scores(
    q: Tensor, k: Tensor, tile: _Tile, scale: float, change: ScoreChange
) -> tuple[Tensor, Tensor | None]:
    """Return the changed scores, and what they change by with the scaled ones (None = 1)."""
    scores, slope = (q @ k.mT).mul_(scale), None
    if change.softcap is not None:
        capped = scores.div_(change.softcap).tanh_()
        slope = 1.0 - capped.square()
        scores = capped * change.softcap
    if change.slopes is not None:
        assert change.q is not None
        assert change.k is not None
        apart = (change.q[tile.rows, None] - change.k[None, tile.cols]).abs_().to(scores.dtype)
        scores = scores - change.slopes.to(scores.dtype)[:, None, None] * apart
    if tile.hidden is not None:
        scores.masked_fill_(tile.hidden, -torch.inf)
    return scores, slope


def _tiles(mask: Mask, heads: int, device: torch.device) -> Iterator[_Tile]:
    """Cut the pairs of a mask into tiles of bounded size; pairs in none are hidden."""
    first, last = _spans(mask, device)
    wide = max(_ROWS, _SCORES // (_ROWS * heads))
    for r0 in range(0, len(mask.q), _ROWS):
        rows = slice(r0, min(r0 + _ROWS, len(mask.q)))
        low, high = first[rows, None], last[rows, None]
        met = high > low
        if not met.any():
            continue
        begin, end = int(low[met].min()), int(high.max())
        for c0 in range(begin, end, wide):
            cols = slice(c0, min(c0 + wide, end))
            at = torch.arange(cols.start, cols.stop, device=device)
            hidden = (at < low) | (at >= high)
            yield _Tile(rows, cols, hidden if hidden.any() else None)


def _spans(mask: Mask, device: torch.device) -> Pair:
    """The half-open run of columns that each row meets."""
    if mask.kind not in (MaskKind.FULL, MaskKind.CAUSAL):
        first, last = (torch.from_numpy(each).to(device) for each in spans(mask))
        return first, last
    rows, cols = len(mask.q), len(mask.k)
    first = torch.zeros(rows, dtype=torch.int64, device=device)
    if mask.kind is MaskKind.FULL:
        return first, torch.full_like(first, cols)
    return first, torch.arange(1, rows + 1, device=device).clamp_(max=cols)


def _no_weight(lse: Tensor) -> Tensor:
    """A row that meets no key takes no part: each of its weights is exp(-inf)."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _keys(pair: Pair, tile: _Tile, group: int, dtype: torch.dtype) -> Pair:
    """Columns of a tile, each KV head once for each query head that uses it."""
    k, v = (x[:, :, tile.cols].to(dtype).repeat_interleave(group, dim=1) for x in pair)
    return k, v


def _add_keys(into: Tensor, grad: Tensor, tile: _Tile, group: int) -> None:
    """Add the gradients of a tile's columns, summed over the query heads of each KV head."""
    by_group = grad.view(into.shape[0], into.shape[1], group, *grad.shape[2:])
    into[:, :, tile.cols] += by_group.sum(dim=2)
