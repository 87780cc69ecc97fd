"""A stand-in for the few functions of flash-attn that peers import, for ranks without CUDA.

It is backed by the kernel that our own strategies run on, so that of a comparison only the
distributed algorithm is left. Signatures follow flash-attn 2.7 and later, `(batch, tokens, heads,
head_dim)` and packed `(tokens, heads, head_dim)`; causal masks of unequal lengths end at the same
corner. What the kernel lacks (dropout, windows, softcap, ALiBi) raises.

flash-attn writes gradients into buffers of the caller. The CPU kernel cannot, so they are copied:
one pass over dq, dk and dv of a call that a CUDA machine does not pay.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from harness.errors import UnsupportedError
from harness.execute import kernels
from harness.plan.masks import Mask, MaskKind

VERSION = "2.7.4"
"""The flash-attn whose signatures these are."""

_NAMES = ("flash_attn", "flash_attn.flash_attn_interface")


@contextmanager
def standing_in() -> Iterator[None]:
    """Let imports inside find the stand-in as `flash_attn`; afterwards all is as it was."""
    kept = {name: sys.modules.pop(name, None) for name in _NAMES}
    package, interface = (ModuleType(name) for name in _NAMES)
    for module in (package, interface):
        module.__dict__.update(
            __version__=VERSION,
            flash_attn_func=flash_attn_func,
            _flash_attn_forward=forward,
            _flash_attn_backward=backward,
            _flash_attn_varlen_forward=varlen_forward,
            _flash_attn_varlen_backward=varlen_backward,
        )
    package.__dict__.update(__path__=[], flash_attn_interface=interface)
    sys.modules.update(zip(_NAMES, (package, interface), strict=True))
    try:
        yield
    finally:
        for name, own in kept.items():
            sys.modules.pop(name)
            if own is not None:
                sys.modules[name] = own


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """As `_flash_attn_forward`: out, lse `(batch, heads, tokens)`, no scores, no random state."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes, return_softmax)
    out, lse = _attend(_heads_first(q, k, v), softmax_scale, causal=causal)
    return out.transpose(1, 2), lse, None, None


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """As `_flash_attn_backward`: fills dq, dk and dv."""
    del deterministic, rng_state  # the CPU kernel is deterministic, and nothing is random
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    given = _heads_first(dout, q, k, v, out)
    grads = _attend_backward(given, softmax_lse, softmax_scale, causal=causal)
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad.transpose(1, 2))


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """As `_flash_attn_varlen_forward`: out `(tokens, heads, head_dim)`, lse `(heads, tokens)`."""
    del max_seqlen_q, max_seqlen_k
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes, return_softmax)
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=kernels.accumulator_dtype(q.dtype))
    for rows, cols in _documents(cu_seqlens_q, cu_seqlens_k):
        given = _heads_first(q[None, rows], k[None, cols], v[None, cols])
        part, part_lse = _attend(given, softmax_scale, causal=causal)
        out[rows], lse[:, rows] = part[0].transpose(0, 1), part_lse[0]
    return out, lse, None, None


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """As `_flash_attn_varlen_backward`: fills dq, dk and dv."""
    del max_seqlen_q, max_seqlen_k, deterministic, rng_state
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    for rows, cols in _documents(cu_seqlens_q, cu_seqlens_k):
        do, qi, oi = (x[None, rows] for x in (dout, q, out))
        given = _heads_first(do, qi, k[None, cols], v[None, cols], oi)
        lse = softmax_lse[None, :, rows]
        grads = _attend_backward(given, lse, softmax_scale, causal=causal)
        for target, grad in zip((dq[rows], dk[cols], dv[cols]), grads, strict=True):
            target.copy_(grad[0].transpose(0, 1))


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """As `flash_attn_func`: attention with gradients."""
    del deterministic
    _refuse(dropout_p, window_size, softcap, alibi_slopes, return_attn_probs)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out: Tensor = _Attention.apply(q, k, v, scale, causal)  # type: ignore[no-untyped-call]  # torch: no annotations
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch gives a context without a type that has its attributes
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        causal: bool,
    ) -> Tensor:
        out, lse, _, _ = forward(q, k, v, 0.0, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  # as above
        dout: Tensor,
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        given = _heads_first(dout, q, k, v, out)
        grads = _attend_backward(given, lse, ctx.scale, causal=ctx.causal)
        return (*(grad.transpose(1, 2) for grad in grads), None, None)


def _refuse(
    dropout_p: float,
    window: tuple[int, int],
    softcap: float | None,
    alibi_slopes: Tensor | None,
    return_softmax: bool = False,
) -> None:
    asked = {
        "dropout_p": dropout_p != 0,
        "window_size": tuple(window) != (-1, -1),
        "softcap": bool(softcap),
        "alibi_slopes": alibi_slopes is not None,
        "return_softmax": return_softmax,
    }
    for name, given in asked.items():
        if given:
            raise UnsupportedError(f"stand-in for flash-attn: {name} is not supported", ())


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for at in range(len(q) - 1):
        yield slice(q[at], q[at + 1]), slice(k[at], k[at + 1])


def _parts(q: Tensor, k: Tensor, *, causal: bool) -> list[tuple[slice, Mask]]:
    """Key columns and masks of the calls of a causal mask that ends at the lower right corner."""
    rows, cols = q.shape[2], k.shape[2]
    if not causal:
        return [(slice(0, cols), _mask(MaskKind.FULL, rows, cols))]
    before = cols - rows
    if before < 0:
        raise UnsupportedError(
            f"stand-in for flash-attn: causal attention of {rows} queries to fewer ({cols}) keys"
        )
    last = (slice(before, cols), _mask(MaskKind.CAUSAL, rows, rows))
    first = (slice(0, before), _mask(MaskKind.FULL, rows, before))
    return [first, last] if before else [last]


def _mask(kind: MaskKind, rows: int, cols: int) -> Mask:
    return Mask(kind=kind, q=range(rows), k=range(cols))


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _attend(given: tuple[Tensor, ...], scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = given
    calls = [
        kernels.attend_call(q, k[:, :, cols], v[:, :, cols], mask, scale)
        for cols, mask in _parts(q, k, causal=causal)
    ]
    out, lse = calls[0]
    if len(calls) == 1:
        return out, lse
    whole = out.to(lse.dtype)
    kernels.merge_(whole, lse, *calls[1])
    return whole.to(q.dtype), lse


def _attend_backward(
    given: tuple[Tensor, ...], lse: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = given
    calls = [
        kernels.attend_backward(dout, q, k[:, :, cols], v[:, :, cols], out, lse, mask, scale)
        for cols, mask in _parts(q, k, causal=causal)
    ]
    if len(calls) == 1:
        return calls[0]
    dq = calls[0][0].to(lse.dtype)
    for call in calls[1:]:
        dq += call[0]
    dk, dv = (torch.cat([call[at] for call in calls], dim=2) for at in (1, 2))
    return dq.to(q.dtype), dk, dv
