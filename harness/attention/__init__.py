"""Context parallelism for a user's own model."""

from harness.attention.all_ranks import Everything, run_all
from harness.attention.documents import documents_of
from harness.attention.functional import attention
from harness.attention.layer import attention_layer
from harness.attention.parallel import ContextParallel, context_parallel
from harness.attention.scores import alibi_slopes

__all__ = [
    "ContextParallel",
    "Everything",
    "alibi_slopes",
    "attention",
    "attention_layer",
    "context_parallel",
    "documents_of",
    "run_all",
]
