"""Rotary positions: which pairs turn, how fast, and the turn itself, forward and transposed.

Shape suffix legend: B batch, H heads, S tokens, D head width.

Frequencies and angles are computed in float64, whatever the dtype of what is turned.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(StrEnum):
    """Which elements of a head turn together.

    NEIGHBOURS are (0, 1), (2, 3), …, as in the paper and in Meta's Llama; HALVES are (0, D/2),
    (1, D/2 + 1), …, as in Hugging Face's `rotate_half`. Weights of one form give other results in
    the other, unless the rows of each head are put into the other order.
    """

    NEIGHBOURS = "neighbours"
    HALVES = "halves"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All turn slower by a factor (Chen et al., arXiv:2306.15595)."""

    factor: float

    def slowed(self, frequencies: Tensor) -> Tensor:
        """Frequencies divided by the factor."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Slow turns slower by a factor, fast ones as they are, and those between in between.

    Attributes:
        factor: Of those that turn fewer than `low_turns` times within `original` tokens.
        low_turns: `low_freq_factor` of published configurations.
        high_turns: `high_freq_factor`; what turns more often stays as it is.
        original: Tokens that the model was first trained on.

    Source: `apply_scaling` of Meta's llama-models, models/llama3/model.py (factors 8, 1, 4; 8192).
    """

    factor: float
    low_turns: float
    high_turns: float
    original: int

    def slowed(self, frequencies: Tensor) -> Tensor:
        """Frequencies as Llama 3.1 has them."""
        turns = self.original * frequencies / (2 * math.pi)
        stays = ((turns - self.low_turns) / (self.high_turns - self.low_turns)).clamp(0, 1)
        return frequencies * (stays + (1 - stays) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """As Llama 3's, but by the index of the pair, and q and k also grow (arXiv:2309.00071).

    Attributes:
        factor: How much longer contexts become.
        original: Tokens that the model was first trained on.
        fast: Turns within `original` from which a pair stays as it is; beta of the paper.
        slow: Turns within `original` up to which it is slowed by all of the factor; alpha there.
        growth: Factor of q and k, each; None = 0.1 ln(factor) + 1 (section 3.4).
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    growth: float | None = None

    @property
    def grown(self) -> float:
        """Factor of q and k."""
        if self.growth is not None:
            return self.growth
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0

    def slowed(self, frequencies: Tensor, base: float) -> Tensor:
        """Frequencies by a ramp over indices of pairs, whose ends are whole indices."""
        pairs = len(frequencies)

        def index(turns: float) -> float:
            return pairs * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)

        low = max(math.floor(index(self.fast)), 0)
        high = min(math.ceil(index(self.slow)), 2 * pairs - 1)
        at = torch.arange(pairs, dtype=torch.float64, device="cpu")
        slow = ((at - low) / (high - low if high > low else 1e-3)).clamp(0, 1)
        return frequencies * (1 - slow + slow / self.factor)


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """How q and k are turned by their positions.

    Attributes:
        base: Of the geometric row of frequencies, `rope_theta` of published configurations.
        pairs: Which elements turn together.
        scaling: How longer contexts are reached; None = not.
    """

    base: float
    pairs: Pairs = Pairs.NEIGHBOURS
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        """Check the numbers; raises ValueError with value and rule."""
        object.__setattr__(self, "pairs", Pairs(self.pairs))
        s = self.scaling
        if s is None:
            return
        if not 0 < s.factor < math.inf:
            raise ValueError(f"rotary: factor ({s.factor}) must be a number above 0, such as 8")
        if not isinstance(s, LinearScaling) and s.original < 1:
            raise ValueError(f"rotary: original ({s.original}) must be at least 1 token")
        if isinstance(s, Llama3Scaling) and not 0 < s.low_turns < s.high_turns:
            raise ValueError(
                f"rotary: low_turns ({s.low_turns}) must be above 0 and below high_turns "
                f"({s.high_turns})"
            )
        if isinstance(s, YarnScaling) and not 0 < s.slow < s.fast:
            raise ValueError(f"rotary: slow ({s.slow}) must be above 0 and below fast ({s.fast})")

    def frequencies(self, head_dim: int) -> Tensor:
        """Angle of each pair per position, `(D / 2)` float64 on the CPU: base ** (-2 i / D).

        Args:
            head_dim: D, even.

        Source: Su et al., RoFormer (arXiv:2104.09864, section 3.2.2).
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        plain: Tensor = self.base**-exponents
        match self.scaling:
            case None:
                return plain
            case YarnScaling() as yarn:
                return yarn.slowed(plain, self.base)
            case scaling:
                return scaling.slowed(plain)

    def turns(self, positions: Tensor, head_dim: int, device: torch.device) -> "Turns":
        """Return the turns of tokens.

        Args:
            positions: `(S)`, or `(B, 1, S)` where they differ by sequence.
            head_dim: D, even.
            device: Where the result is.
        """
        frequencies = self.frequencies(head_dim).to(positions.device)
        angles = (positions.to(torch.float64)[..., None] * frequencies).to(device)
        growth = self.scaling.grown if isinstance(self.scaling, YarnScaling) else 1.0
        return Turns(angles.cos() * growth, angles.sin() * growth, self.pairs)


class Turns(NamedTuple):
    """Turns of tokens, one per pair.

    Attributes:
        cos: `(S, D / 2)` or `(B, 1, S, D / 2)`, float64.
        sin: As `cos`.
        pairs: Which elements turn together.
    """

    cos: Tensor
    sin: Tensor
    pairs: Pairs

    def transposed(self) -> "Turns":
        """Return what gradients are turned by; it undoes a turn that does not grow."""
        return self._replace(sin=-self.sin)


TurnsOf = Callable[[Sequence[range]], Turns]
"""From global positions of tokens, chunk by chunk, to their turns."""


def rotate(values: Tensor, turns: Turns) -> Tensor:
    """Turn pairs of the last axis; differentiable.

    Args:
        values: `(B, H, S, D)`, in accumulator precision.
        turns: Of its tokens.
    """
    cos, sin = turns.cos.to(values.dtype), turns.sin.to(values.dtype)
    if turns.pairs is Pairs.HALVES:
        first, second = values.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    first, second = values[..., 0::2], values[..., 1::2]
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(turned, dim=-1).flatten(-2)
