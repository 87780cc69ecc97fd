"""The problem that every verb means where nothing else is said, and what names one in a heading."""

from harness.plan.problem import Dtype, Problem
from patterns import make_pattern

PATTERN = "causal"
CP = 8
SEQLEN = 128 * 1024
HEADS_Q, HEADS_KV = 32, 8  # as Llama3-8B has them
HEAD_DIM = 128
DTYPE = Dtype.BFLOAT16


def heads_of(heads_q: int | None, heads_kv: int | None) -> tuple[int, int]:
    """Query and KV heads where some are not given: with query heads given, as many KV heads."""
    if heads_q is None:
        return HEADS_Q, heads_kv or HEADS_KV
    return heads_q, heads_kv or heads_q


def usual(pattern: str, cp: int, seqlen: int, heads_q: int, heads_kv: int = 0) -> Problem:
    """The problem of these sizes with the usual width, precision and batch.

    Args:
        pattern: By name, as `make_pattern` takes it.
        cp: Ranks.
        seqlen: Queries, and keys.
        heads_q: Query heads.
        heads_kv: KV heads; 0 for as many as query heads.
    """
    return Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=heads_q,
        heads_kv=heads_kv or heads_q,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        cp=cp,
    )
