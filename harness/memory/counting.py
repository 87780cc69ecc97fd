"""Rules by which memory is counted, and the uses that it is counted under."""

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    """Purpose for which memory is held."""

    WEIGHTS = "weights"
    """Weights of a layer, and sums that become their gradients."""
    INPUT = "input"
    """Inputs of a plan, held by its caller."""
    SAVED = "saved"
    """Tensors that forward saves for backward."""
    RESULT = "result"
    """Outputs that backward does not need."""
    LOCAL = "local"
    """Values of the own tokens, made here."""
    GATHERED = "gathered"
    """Values that a collective brought, such as traded heads."""
    RECEIVED = "received"
    """Values and partial results on a visit, or come home and not yet folded in."""
    ACCUMULATOR = "accumulator"
    """Partial results."""
    WORKSPACE = "workspace"
    """Results of kernels on their way, and what kernels hold while they run."""
    STAGING = "staging"
    """Copies that are sent or join pieces, and what has landed for a larger piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """Flags of one way to count memory; the same for every strategy.

    Attributes:
        held: Inputs stay throughout, as their caller holds them; else each goes after its last use.
        wide_sums: Partial out, dq, dk and dv have accumulator precision; else that of values.
        wide_rows: Likewise y and dx, which grow stage by stage.
        results: What a kernel returns is there beside the accumulators until it is in them.
        staging: Copies to send from, to land in, and to join pieces.
        scratch: What a backward kernel holds inside: dq in float32, and dk and dv too where query
            heads share keys. Source: FlashAttention 3, hopper/flash_api.cpp, mha_bwd.
        rotary: Rotating makes a copy in accumulator precision; else it is done in place.
        loop: The loop of released ring code, which runs for a ring of one as well: kernels return
            into buffers that stay, as does what they read; sums are cast beside themselves, all at
            the end; there are buffers to receive dk and dv in.
            Source: zhuzilin/ring-flash-attention, zigzag_ring_flash_attn.py, backward.
        narrow: Sums that are rounded once have the precision of values; see `Program.narrow`.
        apart: Uses that somebody else counts, as FSDP the weights.
    """

    held: bool = False
    wide_sums: bool = False
    wide_rows: bool = False
    results: bool = False
    staging: bool = False
    scratch: bool = False
    rotary: bool = False
    loop: bool = False
    narrow: bool = False
    apart: frozenset[Use] = frozenset()


ALGORITHM = Counting()
"""Only what the algorithm itself needs: values, each until its last use, and sums as wide."""

EXECUTOR = Counting(
    held=True, wide_sums=True, wide_rows=True, results=True, staging=True, narrow=True
)
"""Memory that `execute` holds on the CPU: equal to the allocator's account to the byte."""
