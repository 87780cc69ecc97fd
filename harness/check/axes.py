"""The default grid of `check`: coverings of all pairs, and the whole product."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

from harness.check.pairwise import Together, covering
from harness.errors import UnsupportedError
from harness.plan.problem import Dtype
from harness.plan.tasks import Scope
from harness.planning.peers import is_peer
from harness.records.config import Config
from patterns import PATTERNS, sampled
from strategies import EVERY_STRATEGY, STRATEGIES, quick, strategy

CPS = (1, 2, 3, 4, 7, 8, 16)
DTYPES = (Dtype.FLOAT64, Dtype.FLOAT32, Dtype.BFLOAT16)
HEADS = ((5, 5), (6, 2), (7, 1))
BATCHES = (1, 2)
LENGTHS = (1, 5, 64, 97, 1020)
HEAD_DIMS = (4, 5, 64, 256)
_CROSS = "_cross"
GRID_PATTERNS = (
    *(name for name, kind in PATTERNS.items() if kind.sample is not None),
    *(f"{name}{_CROSS}" for name, kind in PATTERNS.items() if kind.sample_cross is not None),
)
"""Every pattern that can be checked without a file, and those that also cross."""
LAYER_CPS = (1, 2, 4, 8)
LAYER_HEADS = ((32, 8), (64, 8), (16, 4), (32, 16), (40, 8), (28, 4), (8, 8), (8, 1))
LAYER_LENGTHS = (1, 29, 97)
LAYER_HEAD_DIMS = (4, 6)
LAYER_PATTERNS = ("full", "causal", "window", "documents")
ROTARIES = (None, 1e4)
HIDDEN = 26
"""Model width of layers here: it divides nothing and is not a multiple of a head's width."""
COVERINGS = 2
LAYER_COVERINGS = 1
_EXTRA_KEYS = 13


def rows(scope: Scope) -> tuple[str, ...]:
    """Every strategy of a scope, and the options that it asks to be checked with."""
    every = STRATEGIES if scope is Scope.ATTENTION else EVERY_STRATEGY
    asked = [f"{name}:{text}" for name, each in every.items() for text in each.checks.options]
    if scope is Scope.LAYER:
        asked += [f"{name}:{text}" for name, each in every.items() for text in each.checks.layers]
    return (*map(quick, every), *asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values that a grid is made of."""

    strategies: tuple[str, ...] = field(default_factory=lambda: rows(Scope.ATTENTION))
    patterns: tuple[str, ...] = GRID_PATTERNS
    cps: tuple[int, ...] = CPS
    dtypes: tuple[Dtype, ...] = DTYPES
    heads: tuple[tuple[int, int], ...] = HEADS
    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] = LENGTHS
    head_dims: tuple[int, ...] = HEAD_DIMS
    rotaries: tuple[float | None, ...] = (None,)
    scope: Scope = Scope.ATTENTION
    coverings: int = COVERINGS

    @classmethod
    def of(cls, scope: Scope) -> "Axes":
        """The default axes of a scope."""
        if scope is Scope.ATTENTION:
            return cls()
        return cls(
            strategies=rows(scope),
            patterns=LAYER_PATTERNS,
            cps=LAYER_CPS,
            heads=LAYER_HEADS,
            lengths=LAYER_LENGTHS,
            head_dims=LAYER_HEAD_DIMS,
            rotaries=ROTARIES,
            scope=scope,
            coverings=LAYER_COVERINGS,
        )

    def values(self) -> list[Sequence[object]]:
        """The axes in the order of `_config`'s arguments."""
        return [
            self.strategies,
            self.patterns,
            self.cps,
            self.dtypes,
            self.heads,
            self.batches,
            self.lengths,
            self.head_dims,
            self.rotaries,
            (self.scope,),
        ]


def pairwise(axes: Axes, coverings: int | None = None) -> Iterator[Config]:
    """Yield configurations such that every two values of different axes meet in each covering.

    Each covering starts from another fixed shuffle of the values, so together they cover most
    triples too. A configuration appears once. Stages of heads, if there are any, also run for
    every degree and heads that they divide.
    """
    seen: set[Config] = set()
    for seed in range(coverings or axes.coverings):
        for row in covering(axes.values(), _affordable, seed=seed, also=_stages(axes)):
            config = _config(row)
            if config not in seen:
                seen.add(config)
                yield config


def _stages(axes: Axes) -> Iterator[Together]:
    """The stages of heads of every degree."""
    strategies, _, cps, _, heads, *_ = axes.values()
    for text, cp, both in product(strategies, cps, heads):
        if _is_staged(str(text)):
            yield (0, text), (2, cp), (4, both)


def whole_product(axes: Axes) -> Iterator[Config]:
    """Yield the whole product of the axes, those of one problem together: they share an oracle."""
    strategies, patterns, cps, *rest = (list(dict.fromkeys(axis)) for axis in axes.values())
    for *others, pattern in product(*rest, patterns):
        rows = ((name, pattern, cp, *others) for name in strategies for cp in cps)
        # Those that need more heads are other problems.
        yield from sorted(map(_config, rows), key=lambda config: config.heads_q)


def size(axes: Axes) -> int:
    """How many configurations the whole product has."""
    return prod(len(set(axis)) for axis in axes.values())


def _affordable(row: Sequence[object]) -> bool:
    """Keep the largest tensors of a covering to batch 1; every pair still occurs.

    Stages of heads that do not divide are left out: a covering is to run, not to be refused.
    """
    if len(row) >= 5:
        text, _, cp, _, heads = row[:5]
        assert isinstance(text, str) and isinstance(cp, int) and isinstance(heads, tuple)
        if not _divides(text, cp, heads):
            return False
    if len(row) < len(Axes().values()):
        return True
    batch, seqlen, head_dim = row[5:8]
    return not (seqlen == max(LENGTHS) and head_dim == max(HEAD_DIMS) and batch != 1)


def _is_staged(text: str) -> bool:
    """Whether a strategy works in stages of heads."""
    return not is_peer(text) and strategy(text).strategy.checks.divides is not None


@lru_cache(maxsize=4096)
def _divides(text: str, cp: int, heads: tuple[int, int]) -> bool:
    """Whether the stages of a strategy, if it has any, divide ranks and heads."""
    chosen = None if is_peer(text) else strategy(text)
    if chosen is None or chosen.strategy.checks.divides is None:
        return True
    try:
        chosen.strategy.checks.divides(heads[0], cp, chosen.options)
    except UnsupportedError:
        return False
    return True


def _config(row: Sequence[object]) -> Config:
    name, pattern, cp, dtype, heads, batch, seqlen, head_dim, rotary, scope = row
    assert isinstance(name, str) and isinstance(pattern, str) and isinstance(dtype, Dtype)
    assert isinstance(cp, int) and isinstance(seqlen, int) and isinstance(heads, tuple)
    assert isinstance(batch, int) and isinstance(head_dim, int) and isinstance(scope, Scope)
    assert rotary is None or isinstance(rotary, float)
    text, seqlen_kv = spelled_pattern(pattern, seqlen)
    # Some need a head for every rank: take the same geometry several times over.
    least = None if is_peer(name) else strategy(name).strategy.checks.least_heads
    times = 1 if least is None else -(-least(cp) // heads[0])
    return Config(
        strategy=name,
        pattern=text,
        cp=cp,
        seqlen_q=seqlen,
        seqlen_kv=seqlen_kv,
        heads_q=heads[0] * times,
        heads_kv=heads[1] * times,
        head_dim=head_dim,
        batch=batch,
        dtype=dtype,
        scope=scope,
        hidden=HIDDEN if scope is Scope.LAYER else None,
        rotary=rotary,
    )


def spelled_pattern(pattern: str, seqlen: int) -> tuple[str, int]:
    """Spell a pattern of the grid for a length: its text and the number of keys."""
    crossing = PATTERNS.get(pattern.removesuffix(_CROSS)) if pattern.endswith(_CROSS) else None
    if crossing is None or crossing.sample_cross is None:
        return sampled(pattern, seqlen), seqlen
    name, parameters = pattern.removesuffix(_CROSS), crossing.sample_cross
    return f"{name}:{parameters}" if parameters else name, seqlen + _EXTRA_KEYS
