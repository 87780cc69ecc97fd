"""Checks of a user's tensors: bad ones are refused at the call, with the way out."""

from collections.abc import Iterable

import torch

from harness.errors import UnsupportedError
from harness.plan.problem import Dtype
from patterns import PATTERNS, Pattern, make_pattern

_DTYPE_OF = {getattr(torch, dtype.value): dtype for dtype in Dtype}

Named = dict[str, torch.Tensor]
"""A call's tensors by the names of its arguments."""


def check_tensors(where: str, named: Named) -> None:
    """Refuse values that are not plain tensors, and transforms that cannot follow a run.

    Raises:
        ValueError: A value is not a tensor, or is a tensor that torch itself spreads over ranks.
        UnsupportedError: A transform of torch.func is active.
    """
    for name, x in named.items():
        if not isinstance(x, torch.Tensor):
            way = f"; give {name}.weight" if isinstance(x, torch.nn.Module) else ""
            raise ValueError(  # noqa: TRY004  # callers' mistakes are ValueErrors
                f"{where}: {name} ({type(x).__name__}) must be a tensor{way}"
            )
        if hasattr(x, "to_local"):
            raise ValueError(
                f"{where}: {name} is a {type(x).__name__}, of which torch moves the parts itself; "
                f"give this rank's part, {name}.to_local(), or all of it, {name}.full_tensor()"
            )
        if x.layout is not torch.strided:
            raise ValueError(f"{where}: {name} is laid out as {x.layout}; give a dense tensor")
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            f"{where}: torch.func (grad, vjp, vmap, jvp) cannot follow a run over ranks",
            ("torch.autograd.grad", "a loop in place of vmap"),
        )


def as_autocast(named: Named) -> Named:
    """Cast tensors as torch's own attention and products do where autocast is on; gradients flow.

    float64 stays, as it does there.
    """
    device = next(iter(named.values())).device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return named
    dtype = torch.get_autocast_dtype(device)
    return {
        name: x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x
        for name, x in named.items()
    }


def check_alike(where: str, named: Named) -> None:
    """Refuse tensors of several dtypes or devices.

    Raises:
        ValueError: There are several.
    """
    if len({x.dtype for x in named.values()}) > 1 or len({x.device for x in named.values()}) > 1:
        raise ValueError(
            f"{where}: {described(named)}: dtype and device must be one; cast with .to(...), or "
            "call under torch.autocast, which casts all"
        )


def dtype_of(where: str, x: torch.Tensor) -> Dtype:
    """Return a tensor's precision.

    Raises:
        UnsupportedError: Attention does not support the dtype.
    """
    return named_dtype(where, x.dtype)


def named_dtype(where: str, dtype: torch.dtype) -> Dtype:
    """Return a precision by torch's name.

    Raises:
        UnsupportedError: There is no attention in it.
    """
    if dtype not in _DTYPE_OF:
        raise UnsupportedError(
            f"{where}: there is no attention in {dtype}", tuple(map(str, _DTYPE_OF))
        )
    return _DTYPE_OF[dtype]


def described(named: Named) -> str:
    """Shapes, dtypes and devices, for messages."""
    return ", ".join(
        f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} {x.device}"
        for name, x in named.items()
    )


def refuse_dropout(dropout_p: float) -> None:
    """Refuse dropout.

    Raises:
        UnsupportedError: It is asked for.
    """
    if dropout_p != 0.0:
        raise UnsupportedError(
            f"attention: dropout_p ({dropout_p}) must be 0: a backward pass on other ranks and in "
            "other tiles would have to repeat the random mask of each forward tile",
            ("dropout_p=0", "dropout after the output projection"),
        )


def check_name(what: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is not a text where a name is expected.

    Raises:
        ValueError: The value is not a text; the choices are listed.
    """
    if not isinstance(value, str):
        raise ValueError(  # noqa: TRY004  # callers' mistakes are ValueErrors
            f"{what} ({value!r}) must be a name: one of {', '.join(choices)}"
        )


def pattern_of(pattern: str | Pattern, seqlen: int, seqlen_kv: int) -> Pattern:
    """Read a pattern of so many query and key tokens, or take one that is made.

    Raises:
        ValueError: A name or parameter is wrong, or the lengths of one that is made are others.
    """
    if not isinstance(pattern, Pattern):
        check_name("pattern", pattern, PATTERNS)
        return make_pattern(pattern, seqlen, seqlen_kv, cross=seqlen_kv != seqlen)
    if (pattern.seqlen_q, pattern.seqlen_kv) != (seqlen, seqlen_kv):
        raise ValueError(
            f"pattern {pattern.text} is {pattern.seqlen_q} x {pattern.seqlen_kv} tokens, which "
            f"must equal seqlen ({seqlen}) x seqlen_kv ({seqlen_kv})"
        )
    return pattern
