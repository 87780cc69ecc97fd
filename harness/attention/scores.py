"""Changes to scores that a call may request: a factor, a cap, slopes, sinks."""

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch

from harness.attention.inputs import check_tensors, described


class ScoreArguments(TypedDict, total=False):
    """Arguments of `ContextParallel.attend`, which tells of them."""

    dropout_p: float
    scale: float | None
    softcap: float | None
    alibi: Sequence[float] | torch.Tensor | None
    sinks: torch.Tensor | None


class ScoreOptions(NamedTuple):
    """Options of a call, as `Problem` has them; None = as usual."""

    scale: float | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None


AS_USUAL = ScoreOptions()
"""Scores scaled by `D ** -0.5`, and nothing else."""


def score_options(
    scale: float | None, softcap: float | None, alibi: Sequence[float] | torch.Tensor | None
) -> ScoreOptions:
    """Gather what a call asks of its scores.

    Raises:
        ValueError: Slopes want a gradient, or are no row of numbers.
    """
    if scale is None and softcap is None and alibi is None:
        return AS_USUAL
    if isinstance(alibi, torch.Tensor):
        if alibi.requires_grad:
            raise ValueError("attention: alibi has no gradient; give alibi.detach()")
        if alibi.dim() != 1:
            raise ValueError(f"attention: alibi {tuple(alibi.shape)} must be (heads_q,)")
        alibi = alibi.tolist()
    slopes = None if alibi is None else tuple(alibi)
    return ScoreOptions(scale=scale, softcap=softcap, alibi=slopes)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes: of n heads, n a power of two, `2 ** (-8 i / n)` for i = 1 .. n.

    Of another number the power of two below it comes first, then every second slope of the one
    above it.

    Source: arXiv:2108.12409, section 3, and for other numbers `get_slopes` of its released code.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    between = [2.0 ** (-4 * i / below) for i in range(1, 2 * below + 1, 2)]
    return tuple(slopes + between[: heads - below])


def check_sinks(sinks: torch.Tensor, heads: int, like: torch.Tensor) -> None:
    """Refuse what is no logit for each query head.

    Raises:
        ValueError: Shape, dtype or device do not fit.
    """
    check_tensors("attention", {"sinks": sinks})
    fits = tuple(sinks.shape) == (heads,) and sinks.is_floating_point()
    if not fits or sinks.device != like.device:
        raise ValueError(
            f"attention: {described({'sinks': sinks})} must be a logit for each query head, "
            f"({heads},), on {like.device}"
        )


def with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let a logit of each head take part in the softmax and bring nothing; gradients flow.

    It enters the sum of exponentials alone: out is multiplied by the share of the keys in it.

    Args:
        out: `(B, H, S, E)` without sinks.
        lse: `(B, H, S)` without sinks.
        sinks: `(H,)`.

    Returns:
        out and lse with sinks.

    Source: Xiao et al., arXiv:2309.17453, section 3.1 (a zero sink is SoftMax-off-by-One); learned
    for each head in gpt-oss (arXiv:2508.10925, section 2.2).
    """
    logit = sinks.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - logit)
    return (out * share[..., None]).to(out.dtype), torch.logaddexp(lse, logit)
