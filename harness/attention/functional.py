"""Attention over shards in one call, for a model that makes no `ContextParallel`."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import strategies
from harness.attention.agreement import lengths, telling
from harness.attention.compiling import outside_graphs
from harness.attention.group import seat
from harness.attention.inputs import check_tensors, refuse_dropout
from harness.attention.parallel import context_parallel
from patterns import Pattern


@outside_graphs
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    strategy: str = strategies.DEFAULT_STRATEGY,
    pattern: str | Pattern = "causal",
    seqlen: int | None = None,
    seqlen_kv: int | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Sequence[float] | torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over a sequence whose tokens are spread over ranks as `context_parallel` spreads them.

    Args:
        q: This rank's queries, `(B, heads_q, local tokens, D)`.
        k: This rank's keys, `(B, heads_kv, local tokens, D)`.
        v: This rank's values, `(B, heads_kv, local tokens, E)`.
        strategy: As in `context_parallel`.
        pattern: As in `context_parallel`.
        seqlen: Tokens of the whole sequence. Shards may be uneven, so a rank does not know it by
            itself: None sums the ranks' lengths, one small collective in every call.
        seqlen_kv: Key tokens of the whole sequence, if not `seqlen`.
        group: As in `context_parallel`.
        dropout_p: Must be 0.
        scale: As in `ContextParallel.attend`, which also returns lse.
        softcap: As there.
        alibi: As there.
        sinks: As there.

    Returns:
        `(B, heads_q, local tokens, E)`, in the dtype of q.

    Raises:
        UnsupportedError, ValueError, PlanError: As `context_parallel` and `ContextParallel.attend`.
    """
    found, _, _ = seat(group)
    with telling(found):
        refuse_dropout(dropout_p)
        if strategy == strategies.AUTO:
            raise ValueError(
                f"attention: strategy ({strategy}) says how tokens are cut, and these are cut "
                "already; make context_parallel(strategy='auto') first, and shard with it"
            )
        check_tensors("attention", {"q": q, "k": k, "v": v})
        if not (q.dim() == k.dim() == v.dim() == 4):
            raise ValueError(
                f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: each must "
                "be (B, heads, local tokens, D)"
            )
    if seqlen is None:
        seqlen, seqlen_kv = lengths(found, q.shape[2], k.shape[2])
    with telling(found):
        cp = context_parallel(
            seqlen=seqlen,
            heads_q=q.shape[1],
            heads_kv=k.shape[1],
            strategy=strategy,
            pattern=pattern,
            seqlen_kv=seqlen_kv,
            group=found,
        )
    return cp.attend(q, k, v, scale=scale, softcap=softcap, alibi=alibi, sinks=sinks)
