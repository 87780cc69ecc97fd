"""Context parallelism for a user's own model."""

from harness.attention.all_ranks import Everything, run_all
from harness.attention.functional import attention
from harness.attention.layer import attention_layer
from harness.attention.parallel import ContextParallel, context_parallel

__all__ = [
    "ContextParallel",
    "Everything",
    "attention",
    "attention_layer",
    "context_parallel",
    "run_all",
]
