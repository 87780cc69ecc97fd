"""The varlen kernel of flash-attn, found by looking, bound by its signature and tried before use.

**No varlen kernel has run here**: without a card, its signature is bound against a stand-in. On a
card the first packed call tries it on a small problem beside matrix products; a kernel whose result
differs, or that fails, is not used again, and masked blocks take its place.
"""

import functools
from importlib import import_module
from itertools import pairwise

import torch
from torch import Tensor

from harness.errors import UnsupportedError
from harness.execute.kernels_cuda import (
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    Pair,
    Six,
    Triple,
    bind,
    math_forward,
)
from harness.execute.varlen import Lengths, VarlenKernel

_MODULE = "flash_attn.flash_attn_interface"
_NEAR = 0.05
"""Of results near 1 in bfloat16: another mask or layout is off by far more."""


def varlen_kernel(q: Tensor) -> VarlenKernel | None:
    """Return the kernel for packed documents shaped as q; None where there is none to rely on."""
    takes = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if not takes or q.shape[3] > MAX_HEAD_DIM or q.shape[3] % HEAD_DIM_STEP:
        return None
    return _tried(q.device.index or 0)


@functools.cache
def _tried(device: int) -> VarlenKernel | None:
    try:
        kernel = varlen_adapter(_MODULE)
        return kernel if is_right(kernel, torch.device("cuda", device)) else None
    except (ImportError, OSError, UnsupportedError, RuntimeError):
        return None


def is_right(kernel: VarlenKernel, device: torch.device) -> bool:
    """Whether a kernel attends two short segments as matrix products do, causal and full."""
    rng = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, heads, 24, 16, generator=rng).to(device, torch.bfloat16)
        for heads in (4, 2, 2)
    )
    edges = (0, 9, 24)
    begins = torch.tensor(edges, dtype=torch.int32, device=device)
    at = Lengths(begins, begins, 15, 15)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    for causal in (True, False):
        out, lse = kernel.forward(packed[0], packed[1], packed[2], at, causal=causal, scale=0.25)
        for start, stop in pairwise(edges):
            q_part, k_part, v_part = (x[:, :, start:stop] for x in (q, k, v))
            right, right_lse = math_forward(q_part, k_part, v_part, None, causal=causal, scale=0.25)
            gap = (out[start:stop].transpose(0, 1) - right[0]).abs().max()
            lse_gap = (lse[:, start:stop] - right_lse[0]).abs().max()
            if not (gap <= _NEAR and lse_gap <= _NEAR):
                return False
    return True


def varlen_adapter(module: str) -> VarlenKernel:
    """Adapt the varlen kernels of flash_attn 2, which take documents behind one another.

    Args:
        module: The module that has `_flash_attn_varlen_forward` and its backward.

    Raises:
        ImportError: If it is not installed.
        UnsupportedError: If a parameter is not known here.
    """
    library = import_module(module)
    try:
        run_forward = library._flash_attn_varlen_forward
        run_backward = library._flash_attn_varlen_backward
    except AttributeError as error:
        raise UnsupportedError(str(error)) from error
    places = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    flags = ("softmax_scale", "causal", "is_causal")
    sides = ("dout", "q", "k", "v", "out", "softmax_lse")
    bind(run_forward, dict.fromkeys((*sides[1:4], *places, *flags)))
    bind(run_backward, dict.fromkeys((*sides, "dq", "dk", "dv", *places, *flags)))

    def given(at: Lengths, causal: bool, scale: float) -> dict[str, object]:
        where = dict(zip(places, (at.q, at.k, at.most_q, at.most_k), strict=True))
        return {**where, "softmax_scale": scale, "causal": causal, "is_causal": causal}

    def forward(
        q: Tensor, k: Tensor, v: Tensor, at: Lengths, *, causal: bool, scale: float
    ) -> Pair:
        own: dict[str, object] = {"q": q, "k": k, "v": v}
        out, *rest = run_forward(**bind(run_forward, own | given(at, causal, scale)))
        for x in rest:
            if x is not None and x.dtype == torch.float32 and x.shape == (q.shape[1], len(q)):
                return out, x
        msg = f"{module}: no lse of shape {(q.shape[1], len(q))} among the results"
        raise UnsupportedError(msg)

    def backward(six: Six, at: Lengths, *, causal: bool, scale: float) -> Triple:
        own: dict[str, object] = dict(zip(sides, six, strict=True))
        dq, dk, dv = (torch.empty_like(x) for x in six[1:4])
        grads = {"dq": dq, "dk": dk, "dv": dv}
        run_backward(**bind(run_backward, {**own, **grads, **given(at, causal, scale)}))
        return dq, dk, dv

    return VarlenKernel(forward, backward)
