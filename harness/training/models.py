"""Transformers that are trained: their shapes and how many parameters they have."""

from dataclasses import dataclass

from harness.errors import UnsupportedError
from harness.plan.problem import Dtype, Problem
from patterns import make_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder of equal blocks: RMSNorm, attention, RMSNorm, SwiGLU; embedding and head apart.

    Attributes:
        name: The name as a user types it.
        hidden: Width of the residual stream.
        layers: Blocks.
        heads_q: Query heads.
        heads_kv: KV heads.
        head_dim: Width of a head.
        ffn: Width inside the MLP.
        vocab: Tokens of the vocabulary.
        rotary: Base of the rotary angles.
        experts: Experts of a block's MLP; 1 is a dense MLP.
        experts_used: How many of them a token goes through.
        tied: Whether the head shares the embedding's weights.
        attention_only: Whether its blocks have other parts than these, so that only its attention
            can be asked about.
        masks: Masks of its attention layers, each with the number of layers that have it; empty:
            all are causal.
        note: What its layers have that is not modelled, or is modelled as something else.
    """

    name: str
    hidden: int
    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    ffn: int
    vocab: int
    rotary: float
    experts: int = 1
    experts_used: int = 1
    tied: bool = False
    attention_only: bool = False
    masks: tuple[tuple[str, int], ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        """Check ranges; raises ValueError with the value received and the rule."""
        sizes = ("hidden", "layers", "heads_q", "heads_kv", "head_dim", "ffn", "vocab", "experts")
        for name in (*sizes, "experts_used"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")

    @property
    def patterns(self) -> tuple[tuple[str, int], ...]:
        """Masks of its attention layers, each with the number of layers that have it."""
        return self.masks or (("causal", self.layers),)

    @property
    def attention_parameters(self) -> int:
        """Weights of the four projections of a block."""
        return self.hidden * self.head_dim * 2 * (self.heads_q + self.heads_kv)

    @property
    def mlp_parameters(self) -> int:
        """Weights of the MLP of a block: gate, up and down of each expert, and what routes."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return 3 * self.hidden * self.ffn * self.experts + router

    @property
    def mlp_parameters_used(self) -> int:
        """The same, but only what a token goes through."""
        unused = self.experts - self.experts_used
        return self.mlp_parameters - 3 * self.hidden * self.ffn * unused

    @property
    def block_parameters(self) -> int:
        """Weights of a block, with its two norms."""
        return self.attention_parameters + self.mlp_parameters + 2 * self.hidden

    @property
    def table_parameters(self) -> int:
        """Weights of the embedding, and as many of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights."""
        tables = (1 if self.tied else 2) * self.table_parameters
        return self.layers * self.block_parameters + tables + self.hidden

    def require_layers(self) -> None:
        """Refuse a model whose layers have other parts than ours.

        Raises:
            UnsupportedError: Says which.
        """
        if self.attention_only:
            raise UnsupportedError(
                f"model {self.name}: {self.note}; only its attention is modelled",
                ("recommend --scope attention",),
            )

    def layer(self, cp: int, seqlen: int, pattern: str = "causal") -> Problem:
        """Return one attention layer of the model over so many ranks, in bfloat16, batch 1.

        Raises:
            UnsupportedError: Its layers have other parts.
        """
        self.require_layers()
        return Problem(
            pattern=make_pattern(pattern, seqlen),
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            dtype=Dtype.BFLOAT16,
            cp=cp,
            hidden=self.hidden,
            rotary=self.rotary,
        )
