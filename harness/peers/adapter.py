"""A peer's functions, adapted for one rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from harness.peers.flash_attn_standin import standing_in

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q, k, v to out, each `(batch, local tokens, heads, head_dim)`; gradients flow."""


@dataclass(frozen=True, slots=True)
class Local:
    """A peer on one rank.

    Attributes:
        positions: Which tokens of the whole sequence the rank holds, int64, in local order.
        attend: The peer's function.
    """

    positions: torch.Tensor
    attend: Attend


def kernels_for(device: torch.device) -> AbstractContextManager[None]:
    """Bracket the import of a peer: on CUDA it finds flash-attn itself, elsewhere the stand-in."""
    return nullcontext() if device.type == "cuda" else standing_in()
