"""What is asked: a problem, a cluster, and what may be chosen."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import require
from harness.plan.problem import Direction, Dtype
from harness.plan.tasks import Scope
from harness.records.config import Config, Where
from strategies import DIRECT, EVERY_STRATEGY, STRATEGIES, comparable, comparable_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One problem on one cluster.

    Attributes:
        machine: The cluster.
        named: What a user calls it: a preset, or a calibration file.
        cp: Ranks.
        seqlen: Tokens, over all ranks.
        heads_q: Query heads.
        heads_kv: KV heads.
        head_dim: Width of q, k and v.
        patterns: Masks, each with the number of layers that have it.
        batch: Sequences side by side.
        dtype: Precision.
        directions: Those whose times are summed.
        scope: Attention, or a whole layer.
        hidden: Model width of a layer; None is as wide as all query heads.
        rotary: Base of a layer's rotary angles; None is without.
        runtime: How work reaches the GPUs.
        memory_bytes: What a rank may hold.
        search_s: Seconds that planners may search for each tiling; None leaves such planners out.
        framework: The only framework that counts, see `frameworks`; None asks for no framework.
    """

    machine: Cluster
    named: str
    cp: int
    seqlen: int
    heads_q: int
    heads_kv: int
    head_dim: int
    patterns: tuple[tuple[str, int], ...]
    batch: int = 1
    dtype: Dtype = Dtype.BFLOAT16
    directions: tuple[Direction, ...] = tuple(Direction)
    scope: Scope = Scope.ATTENTION
    hidden: int | None = None
    rotary: float | None = None
    runtime: Runtime = Runtime.GRAPH
    memory_bytes: int
    search_s: float | None = None
    framework: str | None = None

    def __post_init__(self) -> None:
        """Refuse what no strategy could be asked.

        Raises:
            ValueError: A value contradicts another.
            UnsupportedError: The cluster has fewer GPUs.
        """
        require(self.machine, self.cp)
        for config, _ in self.cells(next(iter(STRATEGIES))):
            config.problem  # noqa: B018  # it judges its values

    @property
    def layers(self) -> int:
        """How many layers the patterns are of."""
        return sum(count for _, count in self.patterns)

    def candidates(self) -> tuple[str, ...]:
        """Spell every candidate: that one list of `strategies`, at this scope."""
        every = STRATEGIES if self.scope is Scope.ATTENTION else EVERY_STRATEGY
        rules = {name: each for name, each in every.items() if name in DIRECT}
        spelled = comparable if self.scope is Scope.ATTENTION else comparable_layers
        names = spelled(self.cp, rules)
        if self.search_s is None:
            return names
        searches = [name for name in every if name not in DIRECT]
        return (*names, *(f"{name}:seconds={self.search_s:g}" for name in searches))

    def cells(self, strategy: str) -> Iterator[tuple[Config, int]]:
        """Yield the cells that a strategy is priced by, each with the number of its layers."""
        layer = self.scope is Scope.LAYER
        for pattern, count in self.patterns:
            for direction in self.directions:
                yield (
                    Config(
                        strategy=strategy,
                        pattern=pattern,
                        cp=self.cp,
                        seqlen_q=self.seqlen,
                        seqlen_kv=self.seqlen,
                        heads_q=self.heads_q,
                        heads_kv=self.heads_kv,
                        head_dim=self.head_dim,
                        batch=self.batch,
                        dtype=self.dtype,
                        direction=direction,
                        transport=Where.SIMULATED,
                        scope=self.scope,
                        cluster=self.named,
                        hidden=self.hidden if layer else None,
                        rotary=self.rotary if layer else None,
                        runtime=self.runtime,
                    ),
                    count,
                )

    def at(self, *, seqlen: int | None = None, cp: int | None = None) -> "Asked":
        """Ask the same of another length or number of ranks.

        Raises:
            ValueError, UnsupportedError: As for any question.
        """
        return replace(self, seqlen=seqlen or self.seqlen, cp=cp or self.cp)
