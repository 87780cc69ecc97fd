"""Context parallelism for a user's own model."""

from harness.attention.layer import attention_layer
from harness.attention.parallel import ContextParallel, attention, context_parallel

__all__ = ["ContextParallel", "attention", "attention_layer", "context_parallel"]
