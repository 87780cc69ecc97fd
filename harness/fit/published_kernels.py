"""Fit kernel models to published speeds of single kernels, where no table of times is at hand.

Few points of few shapes fix few parameters: what they do not show is taken from `like`, the kernels
of the same GPU that a table of times was fitted to.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np

from harness.cluster.kernel_model import BackwardKernel, ForwardKernel, Kernels
from harness.fit.minimise import Reals, least_squares, robust
from harness.plan.problem import Direction

_HEAD_DIM = 128
_FORWARD = (6.5e14, 1e-6, 1.0, 20.0)
_BACKWARD = (5.8e14, 3e-6, 5.0, 20.0)


@dataclass(frozen=True, slots=True)
class PublishedSpeed:
    """A published speed of one call on a square of tokens.

    Attributes:
        tokens: Queries, and keys.
        heads: Heads times batch.
        causal: Whether the mask is causal.
        seconds: What the published rate makes of it, flops counted as its source does.
    """

    tokens: int
    heads: int
    causal: bool
    seconds: float


def published_speeds(kernel: str, direction: Direction) -> list[PublishedSpeed]:
    """All published speeds of a kernel."""
    text = files("harness.fit").joinpath("published_kernels.toml").read_text(encoding="utf-8")
    found = []
    for table in tomllib.loads(text)["table"]:
        if (table["kernel"], table["direction"]) == (kernel, direction.value):
            for tokens, heads, rate in table["rows"]:
                flops = 4 * tokens**2 * heads * _HEAD_DIM * (0.5 if table["causal"] else 1)
                flops *= 2.5 if direction is Direction.BACKWARD else 1
                seconds = flops / (rate * 1e12)
                found.append(PublishedSpeed(tokens, heads, table["causal"], seconds))
    return found


def kernel_gaps(kernels: Kernels, direction: Direction, speeds: Sequence[PublishedSpeed]) -> Reals:
    """Shares by which a model misses published speeds."""
    times = [
        kernels.seconds(direction, s.tokens, s.tokens, s.heads, causal=s.causal) / s.seconds
        for s in speeds
    ]
    return np.array(times) - 1


def fit_published(kernel: str, like: Kernels) -> Kernels:
    """Fit a kernel whose thread blocks have an SM each, and which splits no keys.

    Args:
        kernel: As the table of published speeds names it.
        like: Kernels of the same GPU: launches, delta and the datasheet's values are theirs.
    """
    like = replace(like, name=kernel, uneven=1.0)

    def forward(x: Sequence[float]) -> Kernels:
        made = ForwardKernel(
            launch_s=like.forward.launch_s,
            flops_per_s=x[0],
            alone=1.0,
            block_s=x[1],
            split_efficiency=1.0,
            combine_s=0.0,
            causal=x[2],
            diagonal_keys=x[3],
            splits=False,
            longest_first=True,
        )
        return replace(like, forward=made)

    def backward(x: Sequence[float]) -> Kernels:
        made = BackwardKernel(
            launch_s=like.backward.launch_s,
            flops_per_s=x[0],
            block_s=x[1],
            passes=x[2],
            delta_passes=like.backward.delta_passes,
            causal=1.0,
            diagonal_rows=x[3],
        )
        return replace(like, backward=made)

    ways = ((Direction.FORWARD, forward, _FORWARD), (Direction.BACKWARD, backward, _BACKWARD))
    for direction, made, start in ways:
        speeds = published_speeds(kernel, direction)

        def residuals(
            x: Reals,
            made: Callable[[Sequence[float]], Kernels] = made,
            direction: Direction = direction,
            speeds: Sequence[PublishedSpeed] = tuple(speeds),
        ) -> Reals:
            return robust(np.log1p(kernel_gaps(made(x.tolist()), direction, speeds)))

        like = made(least_squares(residuals, start).tolist())
    return like
