"""One attention call on tensors, forward and backward, and the merge of partial results.

Shape suffix legend: B batch, H query heads, G key/value heads, S query tokens, T key tokens,
D head_dim of q and k, E head_dim of v. Layout everywhere: q `(B, H, S, D)`, k `(B, G, T, D)`,
v `(B, G, T, E)`, out `(B, H, S, E)`, lse `(B, H, S)`. Query head h uses KV head `h // (H // G)`.
`lse` is the natural log of the sum of exponentials of the scaled scores, float32 (float64 for
float64 inputs); -inf = this row met no key, and its `out` is 0.

The CPU path is torch's flash attention operator; CUDA kernels live in `kernels_cuda.py`. What the
operator gets wrong or refuses is settled here, before or after the call:

- an empty q or kv (the process would die of SIGFPE) is answered without a call;
- a row that a float mask empties (the operator returns lse 0) gets lse -inf;
- lse -inf in a backward (NaN in every gradient) becomes +inf, for which each weight is 0;
- D != E (refused) is padded with zeros to the larger; zeros add nothing to a dot product;
- dk and dv of grouped heads (summed over the group in the input precision, so that a bfloat16
  error grows with the group) are computed a query head at a time and summed in float32;
- a tensor whose storage does not start on 16 bytes, or whose last axis is strided, is cloned.

Nothing here differentiates: each function runs without autograd.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.errors import UnsupportedError
from harness.execute import kernels_cuda, row_blocks, scored
from harness.execute.kernels_cuda import Six, Triple
from harness.execute.scored import ScoreChange
from harness.execute.varlen import packed_backward, packed_forward
from harness.execute.varlen_cuda import varlen_kernel
from harness.plan.masks import Mask, MaskKind

__all__ = [
    "Mask",
    "MaskKind",
    "ScoreChange",
    "accumulator_dtype",
    "add",
    "attend_backward",
    "attend_backward_delta",
    "attend_call",
    "capabilities",
    "delta",
    "merge_",
]

ALIGNMENT_BYTES = 16
_BY_POSITION = frozenset({MaskKind.BAND, MaskKind.PACKED})
"""Masks that no kernel has: calls with them are cut."""
_CACHED_ELEMENTS = 1 << 17
"""Elements of a temporary that a CPU's second-level cache keeps until it is read again."""

_ACCUMULATORS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, delta and accumulated outputs: float32, or float64 for float64.

    Raises:
        UnsupportedError: Attention does not support `dtype`.
    """
    if dtype not in _ACCUMULATORS:
        msg = f"kernels: there is no attention in {dtype}"
        raise UnsupportedError(msg, tuple(str(known) for known in _ACCUMULATORS))
    return _ACCUMULATORS[dtype]


def capabilities() -> dict[str, str]:
    """Return each kernel's name and "ok" or the reason why it cannot be used here."""
    return {"torch_cpu": _cpu_status()} | kernels_cuda.capabilities()


@torch.no_grad()
def attend_call(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, change: ScoreChange | None = None
) -> tuple[Tensor, Tensor]:
    """Attend from q to k and v in one kernel call.

    Args:
        q: `(B, H, S, D)`.
        k: `(B, G, T, D)`, H a multiple of G.
        v: `(B, G, T, E)`.
        mask: Which keys a query meets; its ranges are S and T long.
        scale: Factor of the scores, usually `D ** -0.5`.
        change: What becomes of the scaled scores; None = nothing, as flash kernels have it.

    Returns:
        `(out, lse)`: out `(B, H, S, E)` in the dtype of q, lse `(B, H, S)` in the accumulator
        dtype. Both are contiguous, but for an out that is still to be converted to the accumulator
        dtype: that is strided as the kernel left it, so that one pass converts and orders it.

    Raises:
        UnsupportedError: Attention does not support the dtype or the device.
        ValueError: If shapes, dtypes, devices and mask do not fit together.
    """
    _check(q, k, v, mask)
    dtype = accumulator_dtype(q.dtype)
    batch, heads, seqlen = q.shape[:3]
    dim_v = v.shape[3]
    if 0 in (q.numel(), k.numel()):
        out = q.new_zeros((batch, heads, seqlen, dim_v))
        return out, q.new_full((batch, heads, seqlen), -torch.inf, dtype=dtype)
    if change is not None:
        return scored.forward(merge_, q, k, v, mask, scale, change)
    width = max(q.shape[3], dim_v)
    q, k, v = (_aligned(_widen(x, width)) for x in (q, k, v))
    varlen = varlen_kernel(q) if mask.kind is MaskKind.PACKED else None
    packed = None if varlen is None else packed_forward(varlen, merge_, q, k, v, mask, scale)
    if packed is not None:
        out, lse = packed
    elif mask.kind in _BY_POSITION:
        out, lse = row_blocks.forward(_forward, merge_, q, k, v, mask, scale)
    else:
        causal = mask.kind is MaskKind.CAUSAL
        out, lse = _forward(q, k, v, None, causal=causal, scale=scale)
    if out.dtype == dtype:
        return _narrowed(out, dim_v).contiguous(), lse
    return _narrowed(out, dim_v), lse


@torch.no_grad()
def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float,
    change: ScoreChange | None = None,
) -> Triple:
    """Return the contribution of this call's keys to the gradients of a larger softmax.

    `out` and `lse` belong to the whole softmax, over keys in and outside this call; the gradients
    of calls over disjoint sets of keys add up to those of the whole.

    Args:
        dout: Gradient of the whole output, `(B, H, S, E)`.
        q: `(B, H, S, D)`.
        k: `(B, G, T, D)`.
        v: `(B, G, T, E)`.
        out: The whole output, `(B, H, S, E)`.
        lse: Its log-sum-exp, `(B, H, S)`, accumulator dtype; -inf = the row met no key at all.
        mask: As in the forward call.
        scale: As in the forward call.
        change: As in the forward call.

    Returns:
        `(dq, dk, dv)` shaped and typed as q, k, v; strided as the kernel left them, which may be a
        view of a wider tensor.

    Raises:
        UnsupportedError, ValueError: As `attend`.
    """
    _check(q, k, v, mask)
    _check_rows(q, v, lse, dout=dout, out=out)
    if 0 in (q.numel(), k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if change is not None:
        by_row = (out.to(lse.dtype) * dout).sum(dim=-1)
        return scored.backward((dout, q, k, v, by_row, lse), mask, scale, change)
    dims = (q.shape[3], v.shape[3])
    dout, q, k, v, out = (_widen(x, max(dims)) for x in (dout, q, k, v, out))
    return _backward((dout, q, k, v, out, lse), mask, scale, dims=dims)


@torch.no_grad()
def attend_backward_delta(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    mask: Mask,
    scale: float,
    change: ScoreChange | None = None,
) -> Triple:
    """As `attend_backward`, given `delta = rowsum(dout * out)` instead of the output itself.

    A kernel uses `out` for that row sum and nothing else. So it is called with `out' = [0, delta]`,
    `dout' = [dout, 1]`, `v' = [v, 0]`: the row sum is delta, `dout' . v'` is unchanged, and the
    added columns of dv' are dropped. q and k get zero columns, which leave the scores as they are.
    In float32 and float64 this is exact. bfloat16 and float16 hold delta in three columns, the
    rounded value and two remainders, 24 bits in all, so that delta does not lose its float32
    precision. As float16 ends at 65504 and at 6e-8, each row of delta is divided by a power of two
    that its columns of dout' are in place of 1: exact while `2**-14 < |delta| < 2**31`, and no
    worse than 2**-38 below. A kernel may pad the width further.

    Args:
        dout: As in `attend_backward`.
        q: As in `attend_backward`.
        k: As in `attend_backward`.
        v: As in `attend_backward`.
        delta: `(B, H, S)`, accumulator dtype, of the whole softmax.
        lse: As in `attend_backward`.
        mask: As in `attend_backward`.
        scale: As in `attend_backward`.
        change: As in `attend_backward`.

    Returns:
        As `attend_backward`.

    Raises:
        UnsupportedError, ValueError: As `attend`.
    """
    _check(q, k, v, mask)
    _check_rows(q, v, lse, dout=dout)
    if delta.shape != lse.shape or delta.dtype != lse.dtype:
        msg = f"kernels: delta {_brief(delta)} must be like lse {_brief(lse)}"
        raise ValueError(msg)
    if 0 in (q.numel(), k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if change is not None:
        return scored.backward((dout, q, k, v, delta, lse), mask, scale, change)
    dims = (q.shape[3], v.shape[3])
    dim_v = dims[1]
    columns = 1 if q.dtype == delta.dtype else 3
    width = max(q.shape[3], dim_v + columns)
    out = q.new_zeros((*q.shape[:3], width))
    dout = _widen(dout, width)
    factor = _power_of_two(delta) if columns > 1 else torch.ones_like(delta)
    dout[..., dim_v : dim_v + columns] = factor.unsqueeze(-1)
    rest = delta / factor
    for column in range(dim_v, dim_v + columns):
        out[..., column] = rest
        rest = rest - out[..., column]
    q, k, v = (_widen(x, width) for x in (q, k, v))
    return _backward((dout, q, k, v, out, lse), mask, scale, dims=dims)


@torch.no_grad()
def delta(out: Tensor, dout: Tensor) -> Tensor:
    """Return `rowsum(dout * out)`, `(B, H, S)` in the accumulator dtype.

    Allocates one tensor like `out` in the accumulator dtype besides its result.
    """
    if out.shape != dout.shape or out.dtype != dout.dtype:
        msg = f"kernels: dout {_brief(dout)} must be like out {_brief(out)}"
        raise ValueError(msg)
    return out.to(accumulator_dtype(out.dtype), copy=True).mul_(dout).sum(dim=-1)


@torch.no_grad()
def add(total: Tensor, part: Tensor, into: Tensor) -> None:
    """Add two tensors `(B, H, S, D)` in the higher precision, rounded once to that of `into`.

    Args:
        total: The sum so far.
        part: The addend.
        into: Where the sum goes; may be `total`.
    """
    if total.dtype == part.dtype == into.dtype:
        torch.add(total, part, out=into)
        return
    for first, second, target in _by_heads(total, part, into):
        torch.add(first, second, out=target)


@torch.no_grad()
def merge_(
    out_acc: Tensor, lse_acc: Tensor, out: Tensor, lse: Tensor, into: Tensor | None = None
) -> None:
    """Merge a partial attention over further keys into the accumulated one, in place.

    With `w = sigmoid(lse - lse_acc)`, the new part's share of the sum of exponentials, out_acc
    becomes `(1 - w) * out_acc + w * out` and lse_acc becomes `logaddexp(lse_acc, lse)`. Neither
    form can overflow: w is in [0, 1] for any difference, and a side with lse -inf has weight 0.
    Start from zeros and -inf. Commutative and associative up to rounding. A NaN in lse stays.

    Allocates two temporaries shaped as lse (w in the accumulator dtype, one bool) and, only if out
    or out_acc is in a lower precision, copies of some heads of it in the accumulator dtype.

    Args:
        out_acc: `(B, H, S, E)`, any precision up to that of lse_acc, in which the sum is made; it
            is rounded to out_acc's at the end. Changed, if there is no `into`.
        lse_acc: `(B, H, S)`, float32 or float64; changed.
        out: `(B, H, S, E)`, any precision up to that of lse_acc.
        lse: `(B, H, S)`, dtype of lse_acc.
        into: Where the merged output goes, shaped and typed as out_acc; None = out_acc.

    Raises:
        ValueError: If shapes or dtypes do not fit.

    Source:
        Milakov & Gimelshein, arXiv:1805.02867, section 3.1, the parallel normalizer operator.
    """
    dtype = lse_acc.dtype
    fits = accumulator_dtype(out_acc.dtype) == accumulator_dtype(dtype) == dtype == lse.dtype
    if not fits:
        msg = (
            f"merge_: lse_acc {dtype} and lse {lse.dtype} must both be float32 or both float64, "
            f"and out_acc {out_acc.dtype} of that or accumulated in it"
        )
        raise ValueError(msg)
    if out_acc.shape != out.shape or not (out.shape[:-1] == lse.shape == lse_acc.shape):
        msg = (
            f"merge_: out_acc {tuple(out_acc.shape)}, lse_acc {tuple(lse_acc.shape)}, "
            f"out {tuple(out.shape)}, lse {tuple(lse.shape)} must be rows x E, rows, rows x E, rows"
        )
        raise ValueError(msg)
    weight = (lse - lse_acc).sigmoid_()
    weight.masked_fill_(lse == -torch.inf, 0.0)  # both sides empty: -inf - -inf is NaN
    torch.logaddexp(lse_acc, lse, out=lse_acc)
    into = out_acc if into is None else into
    for total, part, share, target in _by_heads(out_acc, out, weight.unsqueeze(-1), into):
        if total.dtype == dtype:
            torch.lerp(total, part.to(dtype), share, out=target)
        else:
            target.copy_(total.to(dtype).lerp_(part.to(dtype), share))


def _by_heads(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same heads of each, on a CPU so few that what is made of them stays in its cache.

    The first is as large as any.
    """
    first = tensors[0]
    heads = first.shape[1]
    if first.device.type == "cpu":
        heads = min(heads, max(1, _CACHED_ELEMENTS * heads // max(1, first.numel())))
    yield from zip(*(torch.split(x, max(1, heads), dim=1) for x in tensors), strict=True)


def _backward(six: Six, mask: Mask, scale: float, *, dims: tuple[int, int]) -> Triple:
    """Call the kernel on tensors of one width; cut the gradients to (D, E)."""
    dout, q, k, v, out = (_aligned(x) for x in six[:5])
    lse = six[5].masked_fill(six[5] == -torch.inf, torch.inf)
    run = kernels_cuda.backward if q.device.type == "cuda" else _cpu_backward
    varlen = varlen_kernel(q) if mask.kind is MaskKind.PACKED else None
    given = (dout, q, k, v, out, lse)
    packed = None if varlen is None else packed_backward(varlen, given, mask, scale)
    if packed is not None:
        dq, dk, dv = packed
    elif mask.kind in _BY_POSITION:
        dq, dk, dv = row_blocks.backward(run, given, mask, scale)
    else:
        causal = mask.kind is MaskKind.CAUSAL
        dq, dk, dv = run(given, None, causal=causal, scale=scale)
    return _narrowed(dq, dims[0]), _narrowed(dk, dims[0]), _narrowed(dv, dims[1])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Call the kernel on tensors of one width; lse of a row that `bias` empties is -inf."""
    if q.device.type == "cuda":
        out, lse = kernels_cuda.forward(q, k, v, bias, causal=causal, scale=scale)
        return out, lse.contiguous()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    lse = lse.contiguous()
    if bias is not None:
        lse.masked_fill_(bias.amax(dim=-1) == -torch.inf, -torch.inf)
    return out, lse


def _cpu_backward(six: Six, bias: Tensor | None, *, causal: bool, scale: float) -> Triple:
    """Call the CPU kernel; in low precision, sum dk and dv over a group in float32."""
    dout, q, k, v, out, lse = six
    batch, heads_kv, group = q.shape[0], k.shape[1], q.shape[1] // k.shape[1]
    apart = group > 1 and q.dtype != lse.dtype
    if apart:  # (B, H, ...) -> (B * G, H / G, ...), and k, v repeated without a copy
        dout, q, out, lse = (
            x.reshape(batch * heads_kv, group, *x.shape[2:]) for x in (dout, q, out, lse)
        )
        k, v = (
            x.reshape(batch * heads_kv, 1, *x.shape[2:]).expand(-1, group, -1, -1) for x in (k, v)
        )
        if bias is not None and len(bias) > 1:
            bias = bias.repeat_interleave(heads_kv, dim=0)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    if apart:
        dq = dq.reshape(batch, heads_kv * group, *dq.shape[2:])
        dk, dv = (
            x.sum(dim=1, dtype=lse.dtype).to(q.dtype).view(batch, heads_kv, *x.shape[2:])
            for x in (dk, dv)
        )
    return dq, dk, dv


def _power_of_two(delta: Tensor) -> Tensor:
    """Of each value, the power of two just above it, within the normal numbers of float16."""
    exponent = torch.frexp(delta).exponent
    return torch.ldexp(torch.ones_like(delta), exponent.clamp(-14, 15)).to(delta.dtype)


def _widen(x: Tensor, width: int) -> Tensor:
    """Add zero columns up to `width`; x itself if it has them."""
    return pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x


def _narrowed(x: Tensor, width: int) -> Tensor:
    """The first columns in a storage of their own, laid out alike; x itself if it has no more."""
    return x if x.shape[3] == width else x[..., :width].clone()


def _aligned(x: Tensor) -> Tensor:
    """Give x the layout that a kernel needs; x itself if it has it."""
    if x.stride(3) != 1 or x.data_ptr() % ALIGNMENT_BYTES:
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    shapes = f"q {_brief(q)}, k {_brief(k)}, v {_brief(v)}"
    accumulator_dtype(q.dtype)
    if q.device.type not in ("cpu", "cuda"):
        msg = f"kernels: there is no attention on a {q.device.type} device"
        raise UnsupportedError(msg, ("cpu", "cuda"))
    if not (q.dim() == k.dim() == v.dim() == 4):
        msg = f"kernels: {shapes}: each must be (batch, heads, tokens, head_dim)"
        raise ValueError(msg)
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        msg = f"kernels: {shapes}: dtype and device must be one"
        raise ValueError(msg)
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3]):
        msg = f"kernels: {shapes}: batch must be one, and k and v agree in heads and tokens"
        raise ValueError(msg)
    if q.shape[3] != k.shape[3] or 0 in (q.shape[3], v.shape[3]):
        msg = f"kernels: {shapes}: q and k must have one head_dim, and no head_dim may be 0"
        raise ValueError(msg)
    if q.shape[1] % max(k.shape[1], 1) or (q.shape[1] and not k.shape[1]):
        msg = (
            f"kernels: heads_q ({q.shape[1]}) must be a multiple of heads_kv ({k.shape[1]}); "
            "split the call by KV head"
        )
        raise ValueError(msg)
    if (len(mask.q), len(mask.k)) != (q.shape[2], k.shape[2]):
        msg = f"kernels: mask is {len(mask.q)} x {len(mask.k)}, tensors are {shapes}"
        raise ValueError(msg)


def _check_rows(q: Tensor, v: Tensor, lse: Tensor, **outs: Tensor) -> None:
    want = (*q.shape[:3], v.shape[3])
    for name, x in outs.items():
        if tuple(x.shape) != want or x.dtype != q.dtype:
            msg = f"kernels: {name} {_brief(x)} must be {want} in {q.dtype}"
            raise ValueError(msg)
    dtype = accumulator_dtype(q.dtype)
    if tuple(lse.shape) != want[:3] or lse.dtype != dtype:
        msg = f"kernels: lse {_brief(lse)} must be {want[:3]} in {dtype}"
        raise ValueError(msg)


def _brief(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _cpu_status() -> str:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return "ok" if hasattr(torch.ops.aten, name) else f"this torch has no aten::{name}"
