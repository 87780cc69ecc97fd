"""Context parallelism for a user's own model."""

from harness.attention.all_ranks import AllRanks, run_all
from harness.attention.documents import documents_of
from harness.attention.functional import attention
from harness.attention.layer import attention_layer
from harness.attention.parallel import ContextParallel, context_parallel
from harness.attention.scores import alibi_slopes
from harness.execute.rope_parameters import rotary_of
from harness.execute.rotary import LinearScaling, Llama3Scaling, Pairs, Rotary, YarnScaling

__all__ = [
    "AllRanks",
    "ContextParallel",
    "LinearScaling",
    "Llama3Scaling",
    "Pairs",
    "Rotary",
    "YarnScaling",
    "alibi_slopes",
    "attention",
    "attention_layer",
    "context_parallel",
    "documents_of",
    "rotary_of",
    "run_all",
]
