"""CUDA attention kernels behind one signature, found by looking and never by version.

A kernel is usable if its function exists and its parameters can all be given; what it lacks is the
reason that `capabilities` reports. Flash kernels take bfloat16 and float16, head_dim up to 256 and
no mask tensor; the rest (masks of positions, float32, float64, wider heads) goes to plain matrix
products, which hold the whole score matrix. Shapes as in `kernels.py`; q, k and v come here with
one head_dim.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from harness.errors import UnsupportedError

Pair: TypeAlias = tuple[Tensor, Tensor]
Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]
Six: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # dout, q, k, v, out, lse

MAX_HEAD_DIM = 256  # of every flash kernel here
HEAD_DIM_STEP = 8  # they read rows 16 bytes at a time

# Arguments of flash_attn 2 and 3 that switch a feature off. Given even where they have a default,
# because a default may change from one release to the next.
OFF: Mapping[str, object] = {
    "alibi_slopes": None,
    "deterministic": False,
    "dropout_p": 0.0,
    "return_softmax": False,
    "rng_state": None,
    "softcap": 0.0,
    "window_size": (-1, -1),
    "window_size_left": -1,
    "window_size_right": -1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flash:
    """One flash kernel. `causal` is only ever asked for where S = T: alignments differ there."""

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], Pair]
    backward: Callable[[Six, bool, float], Triple]


def capabilities() -> dict[str, str]:
    """Return each CUDA kernel's name and "ok" or why it cannot be used."""
    if not torch.cuda.is_available():
        return dict.fromkeys(FINDERS, "no CUDA device")
    return {name: found if isinstance(found, str) else "ok" for name, found in _found().items()}


_ONLY: ContextVar[str | None] = ContextVar("only", default=None)


@contextmanager
def only(name: str) -> Iterator[None]:
    """Inside, take this flash kernel and no other, to check or time it by itself.

    Raises:
        UnsupportedError: It cannot be used here; the reason is told.
    """
    status = capabilities().get(name, "no kernel has this name")
    if status != "ok":
        raise UnsupportedError(f"kernel {name}: {status}", tuple(FINDERS))
    token = _ONLY.set(name)
    try:
        yield
    finally:
        _ONLY.reset(token)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
) -> Pair:
    """Return `(out, lse)`; lse of a row that `bias`, (B or 1, 1, S, T), empties is -inf."""
    flash = _flash_for(q, bias)
    if flash is None:
        return math_forward(q, k, v, bias, causal=causal, scale=scale)
    rows, cols, dim = q.shape[2], k.shape[2], q.shape[3]
    q, k, v = (_step(x) for x in (q, k, v))
    if causal and rows > cols:
        top = flash.forward(q[:, :, :cols], k, v, True, scale)
        rest = flash.forward(q[:, :, cols:], k, v, False, scale)
        out, lse = (torch.cat(parts, dim=2) for parts in zip(top, rest, strict=True))
    elif causal:
        out, lse = flash.forward(q, k[:, :, :rows], v[:, :, :rows], True, scale)
    else:
        out, lse = flash.forward(q, k, v, False, scale)
    return out[..., :dim], lse


def backward(six: Six, bias: Tensor | None, *, causal: bool, scale: float) -> Triple:
    """Return `(dq, dk, dv)`; lse is +inf in a row that met no key."""
    flash = _flash_for(six[1], bias)
    if flash is None:
        return math_backward(six, bias, causal=causal, scale=scale)
    rows, cols, dim = six[1].shape[2], six[2].shape[2], six[1].shape[3]
    dout, q, k, v, out = (_step(x) for x in six[:5])
    lse = six[5]
    if causal and rows > cols:

        def part(rows: slice, *, causal: bool) -> Triple:
            dout_part, q_part, out_part = (x[:, :, rows] for x in (dout, q, out))
            lse_part = lse[:, :, rows].contiguous()
            return flash.backward((dout_part, q_part, k, v, out_part, lse_part), causal, scale)

        dq, dk, dv = part(slice(cols), causal=True)
        dq_rest, dk_rest, dv_rest = part(slice(cols, rows), causal=False)
        dq, dk, dv = torch.cat((dq, dq_rest), dim=2), dk + dk_rest, dv + dv_rest
    elif causal:
        k, v = k[:, :, :rows], v[:, :, :rows]
        dq, dk, dv = flash.backward((dout, q, k, v, out, lse), True, scale)
        dk, dv = (pad(x, (0, 0, 0, cols - rows)) for x in (dk, dv))
    else:
        dq, dk, dv = flash.backward((dout, q, k, v, out, lse), False, scale)
    return dq[..., :dim], dk[..., :dim], dv[..., :dim]


def math_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float
) -> Pair:
    """Attend by two matrix products in float32 (float64); holds all H x S x T scores."""
    scores = _scores(q, k, bias, causal=causal, scale=scale)  # (B, G, H/G, S, T)
    lse = torch.logsumexp(scores, dim=-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp_()
    out = weights @ v.to(weights.dtype)[:, :, None]
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def math_backward(six: Six, bias: Tensor | None, *, causal: bool, scale: float) -> Triple:
    """Differentiate `math_forward` for an outside out and lse."""
    dout, q, k, v, out, lse = six
    q5, out5, dout5 = (_grouped(x.to(lse.dtype), k) for x in (q, out, dout))
    k5, v5 = (x.to(lse.dtype)[:, :, None] for x in (k, v))
    scores = _scores(q, k, bias, causal=causal, scale=scale)
    weights = (scores - _grouped(lse, k)[..., None]).exp_()
    dv = (weights.mT @ dout5).sum(dim=2)
    dscores = weights * (dout5 @ v5.mT - (dout5 * out5).sum(dim=-1, keepdim=True)) * scale
    dq = (dscores @ k5).flatten(1, 2)
    dk = (dscores.mT @ q5).sum(dim=2)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """(B, H, ...) -> (B, G, H / G, ...)."""
    return x.reshape(x.shape[0], k.shape[1], x.shape[1] // k.shape[1], *x.shape[2:])


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, *, causal: bool, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores: Tensor = (_grouped(q.to(dtype), k) @ k.to(dtype)[:, :, None].mT).mul_(scale)
    if bias is not None:
        scores += bias[:, None]  # (B or 1, 1, S, T): the same for all heads
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _flash_for(q: Tensor, bias: Tensor | None) -> Flash | None:
    """Return the first usable flash kernel that can take this call."""
    if bias is not None or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    if q.shape[3] > MAX_HEAD_DIM:
        return None
    only = _ONLY.get()
    usable = (
        found
        for name, found in _found().items()
        if isinstance(found, Flash) and only in (None, name)
    )
    return next(usable, None)


def _step(x: Tensor) -> Tensor:
    return pad(x, (0, -x.shape[3] % HEAD_DIM_STEP)) if x.shape[3] % HEAD_DIM_STEP else x


@functools.cache
def _found() -> dict[str, Flash | str]:
    """Each kernel, or why it cannot be used; in order of preference."""
    found: dict[str, Flash | str] = {}
    for name, find in FINDERS.items():
        try:
            found[name] = find()
        except (ImportError, OSError, UnsupportedError) as error:
            found[name] = str(error)
    return found


def bind(function: Callable[..., Any], given: Mapping[str, object]) -> dict[str, object]:
    """Return keyword arguments for `function`: `given`, and every feature of `OFF` switched off.

    Args:
        function: A kernel's Python entry; a torch custom op is read through.
        given: What the call is about. One of `causal` and `is_causal` must be a parameter, and
            so must all the others.

    Raises:
        UnsupportedError: If a parameter has neither a value nor a default, or one is missing.
    """
    inner = getattr(function, "_init_fn", function)
    parameters = inspect.signature(inner).parameters
    name = getattr(inner, "__name__", repr(inner))
    unknown = [
        p.name
        for p in parameters.values()
        if p.name not in given and p.name not in OFF and p.default is inspect.Parameter.empty
    ]
    missing = [n for n in given if n not in parameters and n not in ("causal", "is_causal")]
    if not {"causal", "is_causal"} & set(parameters):
        missing.append("causal")
    if unknown or missing:
        msg = f"{name}: cannot give {unknown}, has no {missing}"
        raise UnsupportedError(msg)
    return {n: given[n] if n in given else OFF[n] for n in parameters if n in given or n in OFF}


def flash_attn_adapter(module: str) -> Flash:
    """Adapt flash_attn 2 or 3: tensors `(B, S, H, D)`, gradients written where it is told.

    Args:
        module: The module that has `_flash_attn_forward` and `_flash_attn_backward`.

    Raises:
        ImportError: If it is not installed.
        UnsupportedError: If a parameter is not known here.
    """
    library = import_module(module)
    try:
        run_forward, run_backward = library._flash_attn_forward, library._flash_attn_backward
    except AttributeError as error:
        raise UnsupportedError(str(error)) from error
    bind(run_forward, dict.fromkeys(("q", "k", "v", "softmax_scale", "causal", "is_causal")))
    names = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "softmax_scale")
    bind(run_backward, dict.fromkeys((*names, "causal", "is_causal")))

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
        given: dict[str, object] = {x: t.transpose(1, 2) for x, t in (("q", q), ("k", k), ("v", v))}
        flags: dict[str, object] = {"softmax_scale": scale, "causal": causal, "is_causal": causal}
        out, *rest = run_forward(**bind(run_forward, given | flags))
        for x in rest:  # lse is the second of four results, or the sixth of eight
            if x is not None and x.dtype == torch.float32 and x.shape == q.shape[:3]:
                return out.transpose(1, 2), x
        msg = f"{module}: no lse of shape {tuple(q.shape[:3])} among the results"
        raise UnsupportedError(msg)

    def backward(six: Six, causal: bool, scale: float) -> Triple:
        dout, q, k, v, out, lse = six
        sides = {"dout": dout, "q": q, "k": k, "v": v, "out": out}
        given = {name: x.transpose(1, 2) for name, x in sides.items()}
        grads = {
            f"d{n}": given[n].new_empty(given[n].shape)  # contiguous, as the kernel wants
            for n in ("q", "k", "v")
        }
        flags = {"softmax_lse": lse, "softmax_scale": scale, "causal": causal, "is_causal": causal}
        run_backward(**bind(run_backward, {**given, **grads, **flags}))
        dq, dk, dv = (x.transpose(1, 2) for x in grads.values())
        return dq, dk, dv

    return Flash(forward=forward, backward=backward)


def _torch_op(name: str) -> Any:  # noqa: ANN401  # torch types its own operators so
    if not hasattr(torch.ops.aten, name):
        msg = f"this torch has no aten::{name}"
        raise UnsupportedError(msg)
    return getattr(torch.ops.aten, name)


def _torch_flash() -> Flash:
    run_forward = _torch_op("_scaled_dot_product_flash_attention")
    run_backward = _torch_op("_scaled_dot_product_flash_attention_backward")

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
        out, lse, *_ = run_forward(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(six: Six, causal: bool, scale: float) -> Triple:
        dout, q, k, v, out, lse = six
        rng = torch.zeros(2, dtype=torch.uint64, device=q.device)  # read by dropout only
        lengths = (None, None, q.shape[2], k.shape[2])  # None: not a packed batch
        dq, dk, dv = run_backward(
            dout, q, k, v, out, lse, *lengths, 0.0, causal, rng, rng, scale=scale
        )
        return dq, dk, dv

    return Flash(forward=forward, backward=backward)


def _torch_cudnn() -> Flash:
    run_forward = _torch_op("_scaled_dot_product_cudnn_attention")
    run_backward = _torch_op("_scaled_dot_product_cudnn_attention_backward")

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Pair:
        out, lse, *_ = run_forward(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(q.shape[:3])  # cuDNN keeps a last axis of one

    def backward(six: Six, causal: bool, scale: float) -> Triple:
        dout, q, k, v, out, lse = six
        rng = torch.zeros((), dtype=torch.int64, device=q.device)  # read by dropout only
        lengths = (None, None, None, q.shape[2], k.shape[2])  # no bias, not a packed batch
        dq, dk, dv = run_backward(
            dout, q, k, v, out, lse[..., None], rng, rng, *lengths, 0.0, causal, scale=scale
        )
        return dq, dk, dv

    return Flash(forward=forward, backward=backward)


FINDERS: Mapping[str, Callable[[], Flash]] = {
    "flash_attn_3": functools.partial(flash_attn_adapter, "flash_attn_interface"),
    "flash_attn_2": functools.partial(flash_attn_adapter, "flash_attn.flash_attn_interface"),
    "torch_flash": _torch_flash,
    "torch_cudnn": _torch_cudnn,
}
