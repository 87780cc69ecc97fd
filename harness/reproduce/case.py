"""The configuration of a measured run, and the cluster that predicts it."""

from dataclasses import dataclass

from harness.plan.problem import Direction

FLASH_2, FLASH_3 = "flash-attn-2", "flash-attn-3"

CLUSTER_OF = {
    ("H800", FLASH_2): "h800",
    ("A800", FLASH_2): "a800",
    ("A100", FLASH_2): "a100",
    ("H100", FLASH_2): "h100-hamming",
    ("H100", FLASH_3): "h100",
}
"""The cluster that predicts runs of a GPU label and an attention kernel."""

HEAD_DIM = 128
EAGER = ("ring", "zigzag", "stripe")
"""Labels of runs in eager torch."""
DENSE = ("full", "causal")
UNREADABLE = "the row cannot be read: times, lengths, heads and GPUs must be positive and finite"
_NOISE_S = 0.3e-3  # below it measured times of UltraAttn's harness repeat only within 14 %


@dataclass(frozen=True, slots=True)
class Case:
    """The configuration that a row measures.

    Attributes:
        gpu: Label of the GPU model.
        nodes: How many.
        gpus_per_node: GPUs of a node.
        pattern: Who attends whom.
        direction: `fwd` or `bwd`.
        strategy: Label of the plan.
        heads: Query heads, of all sequences of a batch.
        seqlen_q: Query tokens.
        seqlen_kv: Key tokens.
        rows: Y of a grid, else 0.
        mode: `normal`, `nocomm` or `nocomp`.
        measured_s: The measured time.
        author_s: The authors' own prediction, if known.
        levels: Of a plan of `ultraattn`, which of its levels.
        kernel: The attention kernel.
        heads_kv: Key heads; 0 is as many as query heads.
        text: The strategy as it is typed here, where it runs as the product runs it in eager torch;
            empty where the published harness had conventions of its own.
        known: Whether the published plan is the one that is predicted, and not ours instead.
        runtime: Of a typed strategy, how it ran.
    """

    gpu: str
    nodes: int
    gpus_per_node: int
    pattern: str
    direction: str
    strategy: str
    heads: int
    seqlen_q: int
    seqlen_kv: int
    rows: int
    mode: str
    measured_s: float
    author_s: float | None
    levels: str = ""
    kernel: str = FLASH_2
    heads_kv: int = 0
    text: str = ""
    known: bool = True
    runtime: str = "eager-torch"

    @property
    def cp(self) -> int:
        """Ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def pass_(self) -> Direction:
        """Direction of the plan."""
        return Direction.FORWARD if self.direction == "fwd" else Direction.BACKWARD

    @property
    def noisy(self) -> bool:
        """Whether the time is too short to repeat."""
        return not self.is_eager and self.measured_s < _NOISE_S

    @property
    def is_eager(self) -> bool:
        """Whether eager torch ran it."""
        return bool(self.text) or self.strategy in EAGER

    @property
    def cluster(self) -> str:
        """The cluster that predicts it."""
        return CLUSTER_OF[self.gpu, self.kernel]

    @property
    def ran(self) -> str:
        """The pattern whose code ran: the measured zigzag and stripe know causal masks only."""
        return self.pattern if self.text or self.strategy not in EAGER[1:] else "causal"
