"""A layer whose q or k is normed by heads: its projections run outside the plan of attention.

The gradient of a norm needs what was normed, which no plan of a layer saves. So q, k and v are made
here by torch, whose autograd has their gradients, and the plan is that of attention alone.
"""

import torch
from torch.nn.functional import linear, rms_norm

from harness.attention.agreement import Word, compare_calls, digest_of, telling
from harness.attention.layers.given import LayerInputs, Maybe, layer_problem, turns_of
from harness.attention.parallel import ContextParallel
from harness.errors import UnsupportedError
from harness.execute.kernels import accumulator_dtype
from harness.execute.rotary import Turns, rotate


def normed_layer(cp: ContextParallel, given: LayerInputs) -> torch.Tensor:
    """Run the layer but for the bias of y. A collective, both ways.

    Raises:
        UnsupportedError: The strategy, or an option of it, is of layers only.
        ValueError: A shape, dtype or number does not fit the others or `cp`.
        PlanError: The ranks make different calls.
    """
    with telling(cp.group):
        problem = layer_problem(cp, given)
        _refuse_layers_only(cp)
        turns = turns_of(given, problem, cp.queries, cp.rank)
    compare_calls(cp.group, Word.RUN, given.beside, digest_of(given.beside))
    with torch.autocast(given.x.device.type, enabled=False):
        turned = None if turns is None else turns(_own_chunks(cp))
        q, k, v = (
            _made(given.x, weight, bias, problem.head_dim if at < 2 else problem.head_dim_v)
            for at, (weight, bias) in enumerate(
                zip(given.weights[:3], given.biases[:3], strict=True)
            )
        )
        q = _normed(q, given.norms[0], given.norm_eps, turned)
        k = _normed(k, given.norms[1], given.norm_eps, turned)
        out = cp.attend(q, k, v)
        return linear(out.transpose(1, 2).flatten(2), given.weights[3])


def _refuse_layers_only(cp: ContextParallel) -> None:
    if cp.strategy.needs_layer:
        raise UnsupportedError(
            f"attention_layer: {cp.strategy.text} plans projections as part of the layer, which "
            "norm_q and norm_k are not",
            ("a strategy of attention alone, such as ulysses", "torch.utils.checkpoint around it"),
        )


def _own_chunks(cp: ContextParallel) -> list[range]:
    return [cp.queries.chunks[chunk] for chunk in cp.queries.owned[cp.rank]]


def _made(x: torch.Tensor, weight: torch.Tensor, bias: Maybe, width: int) -> torch.Tensor:
    """Heads of q, k or v: `(B, H, S, D)`."""
    batch, tokens = x.shape[:2]
    return linear(x, weight, bias).reshape(batch, tokens, -1, width).transpose(1, 2)


def _normed(heads: torch.Tensor, norm: Maybe, eps: float, turns: Turns | None) -> torch.Tensor:
    """Norm each head of each token by itself, then turn it; rounded once, at the end."""
    wide = heads.to(accumulator_dtype(heads.dtype))
    if norm is not None:
        wide = rms_norm(wide, norm.shape, norm.to(wide.dtype), eps)
    if turns is not None:
        wide = rotate(wide, turns)
    return wide.to(heads.dtype)
