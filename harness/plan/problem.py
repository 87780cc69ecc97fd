"""One attention problem: the pattern, the shapes, the precision and the number of ranks."""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from patterns import is_spelled_out
from patterns.kind import integer, real
from patterns.pattern import Pattern

MOST_RANKS = 1024
"""The largest context-parallel degree that is asked for: a plan lists the tasks of every rank."""

MOST_HEADS = 1024
"""The most query heads that are asked for: plans name each of them, and no model has as many."""


class Direction(StrEnum):
    """Which pass a plan computes."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Dtype(StrEnum):
    """Precision of inputs and outputs; partial results are kept in `accumulator_bytes`."""

    __hash__ = str.__hash__  # an enum's own hash is a python function, and sizes are asked a lot

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def bytes(self) -> int:
        """Bytes per element of inputs and outputs."""
        return _BYTES[self]

    @property
    def accumulator_bytes(self) -> int:
        """Bytes per element of partial results: float64 for float64, else float32."""
        return 8 if self is Dtype.FLOAT64 else 4


_BYTES = {Dtype.FLOAT64: 8, Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An attention problem, or a layer around one; every strategy plans the same value.

    Attributes:
        pattern: Who attends whom; carries seqlen_q and seqlen_kv (tokens).
        heads_q: Query heads.
        heads_kv: Key/value heads; divides heads_q. Query head h uses KV head h // group.
        head_dim: Width of q and k (elements).
        head_dim_v: Width of v and out; 0 means equal to head_dim.
        batch: Sequences side by side, >= 1.
        dtype: Precision of inputs and outputs.
        cp: Context-parallel degree, >= 1.
        hidden: Model width, for plans of whole layers; None = attention only.
        rotary: Base of the rotary angles of q and k, for plans of whole layers; None = not rotated.
        round_sent: Partial dq, dk and dv cross between ranks in `dtype`, not as they are kept.
        scale: Factor of the scores, above 0; None = head_dim ** -0.5, and what equals that is None.
        softcap: Scores s become softcap * tanh(s / softcap); None = they stay as they are.
        alibi: Of each query head, what a score loses for each position between query and key; None
            = nothing.
    """

    pattern: Pattern
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int = 0
    batch: int = 1
    dtype: Dtype = Dtype.FLOAT32
    cp: int = 1
    hidden: int | None = None
    rotary: float | None = None
    round_sent: bool = False
    scale: float | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Take numbers of any kind and check them; raises ValueError with value and rule."""
        for name in ("heads_q", "heads_kv", "head_dim", "head_dim_v", "batch", "cp", "hidden"):
            value = getattr(self, name)
            if type(value) is not int and (name, value) != ("hidden", None):
                object.__setattr__(self, name, integer(name, value))
        for name in ("heads_q", "heads_kv", "head_dim", "batch", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.heads_q > MOST_HEADS:
            raise ValueError(f"heads_q ({self.heads_q}) must be at most {MOST_HEADS}")
        if self.head_dim_v < 0:
            raise ValueError(f"head_dim_v ({self.head_dim_v}) must be at least 0 (0: as head_dim)")
        if self.hidden is not None and self.hidden < 1:
            raise ValueError(f"hidden ({self.hidden}) must be at least 1")
        self._check_rotary()
        if self.heads_q % self.heads_kv:
            divisors = [h for h in range(1, self.heads_q + 1) if self.heads_q % h == 0]
            raise ValueError(
                f"heads_kv ({self.heads_kv}) must divide heads_q ({self.heads_q}); "
                f"try one of {divisors}"
            )
        self._check_scores()
        if self.head_dim_v == 0:
            object.__setattr__(self, "head_dim_v", self.head_dim)

    def _check_rotary(self) -> None:
        if self.rotary is None:
            return
        if type(self.rotary) is not float:
            object.__setattr__(self, "rotary", float(self.rotary))
        if self.hidden is None:
            raise ValueError(
                f"rotary ({self.rotary}) only applies to whole layers; set hidden as well"
            )
        if not 1 < self.rotary < math.inf:  # false of NaN as well
            raise ValueError(f"rotary ({self.rotary}) must be a base above 1, such as 500000")
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be even to be rotated in pairs; "
                f"try {self.head_dim + 1}"
            )

    def _check_scores(self) -> None:
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is None:
                continue
            if type(value) is not float:
                object.__setattr__(self, name, real(name, value))
            if not 0 < getattr(self, name) < math.inf:  # false of NaN as well
                raise ValueError(
                    f"{name} ({value}) must be finite and above 0"
                    + ("; turn the sign of q for a negative one" if name == "scale" else "")
                )
        if self.scale == float(self.head_dim) ** -0.5:
            object.__setattr__(self, "scale", None)
        if self.alibi is not None:
            slopes = tuple(real("alibi", slope) for slope in self.alibi)
            object.__setattr__(self, "alibi", slopes)
            if len(slopes) != self.heads_q or not all(map(math.isfinite, slopes)):
                raise ValueError(
                    f"alibi ({slopes}) must be one finite slope for each of {self.heads_q} heads"
                )

    @property
    def seqlen_q(self) -> int:
        """Query tokens, over all ranks."""
        return self.pattern.seqlen_q

    @property
    def seqlen_kv(self) -> int:
        """Key tokens, over all ranks."""
        return self.pattern.seqlen_kv

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_kv

    @property
    def all_heads(self) -> int:
        """Bit set of all query heads."""
        return (1 << self.heads_q) - 1

    def kv_heads(self, heads: int) -> int:
        """Bit set of the KV heads that the query heads in the bit set `heads` use."""
        return _kv_heads(self.group, heads)

    def query_heads(self, kv_heads: int) -> int:
        """Bit set of all query heads that use the KV heads in the bit set `kv_heads`."""
        whole, heads = (1 << self.group) - 1, 0
        for head in range(kv_heads.bit_length()):
            if kv_heads >> head & 1:
                heads |= whole << head * self.group
        return heads

    @property
    def width(self) -> int:
        """Model width, which plans of whole layers need.

        Raises:
            ValueError: The problem has none.
        """
        if self.hidden is None:
            raise ValueError("hidden (None) must be the model width to plan a layer; set it")
        return self.hidden

    @property
    def softmax_scale(self) -> float:
        """Factor on q.k before the softmax: head_dim ** -0.5 (arXiv:1706.03762, section 3.2.1)."""
        scale: float = float(self.head_dim) ** -0.5 if self.scale is None else self.scale
        return scale


def spelled(problem: Problem) -> dict[str, object]:
    """Return the fields of a problem for JSON, without `round_sent` and the rare fields not set.

    Where the text of a pattern does not say what it allows, as that of a file, its content does.
    """
    pattern = problem.pattern
    beyond = {} if is_spelled_out(pattern) else {"pattern_content": pattern.content}
    return {
        "pattern": pattern.text,
        **beyond,
        "seqlen_q": problem.seqlen_q,
        "seqlen_kv": problem.seqlen_kv,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "batch": problem.batch,
        "dtype": problem.dtype.value,
        "cp": problem.cp,
        "hidden": problem.hidden,
        "rotary": problem.rotary,
        **{name: value for name in _SELDOM if (value := getattr(problem, name)) is not None},
    }


_SELDOM = ("scale", "softcap", "alibi")
"""Rare fields: problems in which they are None are spelled, and hashed, without them."""


@lru_cache(maxsize=65536)
def _kv_heads(group: int, heads: int) -> int:
    kv, mask = 0, (1 << group) - 1
    for head in range(-(-heads.bit_length() // group)):
        if heads >> (head * group) & mask:
            kv |= 1 << head
    return kv
