"""Transformers that are trained: their shapes and how many parameters they have."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from harness.base.numbers import positive, received, whole_number
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

    def __post_init__(self) -> None:
        """Check ranges; raises ValueError with the value received and the rule."""
        for name in ("hidden", "layers", "heads_q", "heads_kv", "head_dim", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")

    @property
    def attention_parameters(self) -> int:
        """Weights of the four projections of a block."""
        return self.hidden * self.head_dim * 2 * (self.heads_q + self.heads_kv)

    @property
    def mlp_parameters(self) -> int:
        """Weights of the MLP of a block: gate, up and down."""
        return 3 * self.hidden * self.ffn

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
        return self.layers * self.block_parameters + 2 * self.table_parameters + self.hidden

    def layer(self, cp: int, seqlen: int, pattern: str = "causal") -> Problem:
        """Return one attention layer of the model over so many ranks, in bfloat16, batch 1."""
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


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        # Source: Llama 3 (arXiv:2407.21783, table 3); 8 030 261 248 parameters
        Model(
            name="llama3-8b",
            hidden=4096,
            layers=32,
            heads_q=32,
            heads_kv=8,
            head_dim=128,
            ffn=14336,
            vocab=128256,
            rotary=5e5,
        ),
        # Source: Llama 2 (arXiv:2307.09288, table 1), its model card for ffn and vocab
        Model(
            name="llama2-7b",
            hidden=4096,
            layers=32,
            heads_q=32,
            heads_kv=32,
            head_dim=128,
            ffn=11008,
            vocab=32000,
            rotary=1e4,
        ),
        # Source: Untied Ulysses (arXiv:2602.21196), released code: Llama blocks with Qwen3-32B's
        # dimensions and Llama 3's vocabulary, no norm of q and k; 32 519 623 680 parameters
        Model(
            name="qwen3-32b",
            hidden=5120,
            layers=64,
            heads_q=64,
            heads_kv=8,
            head_dim=128,
            ffn=25600,
            vocab=128256,
            rotary=1e6,
        ),
    )
}
"""The presets."""


def model(text: str) -> Model:
    """Return a preset by its name, or a model of `key=value` pairs, which may start with a name.

    `llama3-8b`, `llama3-8b,layers=16`, or
    `hidden=4096,layers=32,heads=32/8,head_dim=128,ffn=14336,vocab=128256,rotary=500000`.

    Raises:
        ValueError: Unknown name or key, or a key that lacks its value; the choices are listed.
    """
    first, *pairs = text.split(",")
    if "=" in first:
        first, pairs = "", [first, *pairs]
    elif first not in MODELS:
        raise ValueError(
            f"model ({first}) is unknown; choose from {', '.join(MODELS)}, or give all of "
            f"{', '.join(_KEYS)} as key=value"
        )
    values: dict[str, float] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key == "heads":
            query, _, kv = value.partition("/")
            values |= {"heads_q": _number(key, query), "heads_kv": _number(key, kv or query)}
        elif key in _KEYS:
            values[key] = _number(key, value)
        else:
            raise ValueError(f"model ({text}): {key} is unknown; it takes {', '.join(_KEYS)}")
    names = [field.name for field in fields(Model)][1:]
    if first:
        return replace(MODELS[first], name=text, **values)  # type: ignore[arg-type]  # by field
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"model ({text}) lacks {', '.join(missing)}; start it with a name instead")
    return Model(name=text, **values)  # type: ignore[arg-type]  # by field


_KEYS = ("hidden", "layers", "heads", "head_dim", "ffn", "vocab", "rotary")


def _number(key: str, text: str) -> float:
    try:
        return positive(text) if key == "rotary" else whole_number(text)
    except ValueError as error:
        raise ValueError(f"model: {key} ({received(text)}) {error}") from None
