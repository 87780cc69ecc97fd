"""A whole attention layer over a sequence that is spread over ranks, for a user's own model.

    cp = context_parallel(strategy="upipe", seqlen=4099, heads_q=32, heads_kv=8)
    x = cp.shard(x, dim=1)                                     # this rank's tokens
    y = attention_layer(cp, x, w_q, w_k, w_v, w_o, rotary=5e5)  # gradients flow, to weights too

The weights are those of four `torch.nn.Linear` and are whole on every rank. Their gradients are
what this rank's tokens add: the caller sums them over ranks, as those of every other parameter.
With the option `sum_gradients` the plan adds them, and each rank has the whole of some heads and 0
of the others: the caller's sum stays right.

Any strategy will do; those that are layers only (`upipe`, `fpdt`) and the options `checkpoint`,
`offload` and `sum_gradients` work here and not in `attend`. They do not with norms of q and k.
"""

import torch

from harness.attention.agreement import telling
from harness.attention.compiling import outside_graphs
from harness.attention.layers.given import LayerInputs
from harness.attention.layers.normed import normed_layer
from harness.attention.layers.planned import plan_call, run_layer
from harness.attention.parallel import ContextParallel
from harness.execute.rotary import Rotary


@outside_graphs
def attention_layer(
    cp: ContextParallel,
    x: torch.Tensor,
    w_q: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    w_o: torch.Tensor,
    *,
    b_q: torch.Tensor | None = None,
    b_k: torch.Tensor | None = None,
    b_v: torch.Tensor | None = None,
    b_o: torch.Tensor | None = None,
    norm_q: torch.Tensor | None = None,
    norm_k: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    rotary: Rotary | float | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Project, norm, turn by rotary positions, attend and project back. A collective, both ways.

    Args:
        cp: Who has which tokens; of self-attention.
        x: This rank's tokens, `(B, local tokens, M)`.
        w_q: `(heads_q * D, M)`.
        w_k: `(heads_kv * D, M)`.
        w_v: `(heads_kv * E, M)`.
        w_o: `(M, heads_q * E)`.
        b_q: Bias of q, `(heads_q * D)`; None = none.
        b_k: Bias of k, `(heads_kv * D)`.
        b_v: Bias of v, `(heads_kv * E)`.
        b_o: Bias of y, `(M)`.
        norm_q: Weight of an RMSNorm of each head of q, before it is turned, `(D)`; None = none.
        norm_k: The same of k.
        norm_eps: What the norms add to the mean of squares.
        rotary: How q and k are turned; a number is the base of the angles of neighbouring pairs;
            None = not turned. Hugging Face's models turn `Pairs.HALVES`.
        positions: By what this rank's tokens are turned, `(local tokens)` or `(B, local tokens)`
            whole numbers, such as positions in packed documents; None = by positions in the whole
            sequence. They say nothing of who attends whom: the pattern does.

    Returns:
        `(B, local tokens, M)`, in the dtype of x; under autocast in autocast's, to which x, weights
        and biases are cast, as for torch's own products.

    Raises:
        UnsupportedError: There is no attention in this dtype or no transport of this device, or the
            strategy cannot do this; from backward, a gradient of the gradient is asked for.
        ValueError: A shape, dtype or number does not fit the others or `cp`.
        PlanError: The ranks make different calls.

    Sources: the layers of Llama 3 (arXiv:2407.21783), Qwen 2 with biases (arXiv:2407.10671,
    section 2.2) and Qwen 3 with norms (arXiv:2505.09388, section 2).
    """
    with telling(cp.group):
        given = LayerInputs(
            x=x,
            weights=(w_q, w_k, w_v, w_o),
            biases=(b_q, b_k, b_v, b_o),
            norms=(norm_q, norm_k),
            norm_eps=norm_eps,
            rotary=rotary if isinstance(rotary, Rotary | None) else Rotary(base=rotary),
            positions=positions,
        ).in_autocast()
        planned = None if given.is_normed else plan_call(cp, given)
    y = normed_layer(cp, given) if planned is None else run_layer(given, *planned)
    return y if given.biases[3] is None else y + given.biases[3]
