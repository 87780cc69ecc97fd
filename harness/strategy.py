"""What a strategy is: a name, a paper, and one function from a problem to a plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from harness.layer import as_layer, check_layer
from harness.plan import Plan, Scope
from harness.problem import Direction, Problem
from harness.residency import without_collection
from harness.sharding import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that a user may choose inside a strategy; each reads what it accepts.

    Attributes:
        prune: Leave out transfers that the pattern makes useless.
        placement: How tokens are dealt to ranks; None lets the strategy choose.
        ulysses: Degree of the head axis of USP; None lets it choose.
        ring: Degree of its ring axis; None is cp / ulysses.
        ring_inside: USP with the ring, not the head axis, on neighbouring ranks.
        inner: Length of the inner ring of the double ring; None takes the longest inside a node.
        rows: Rows of ranks of the grid; None takes what moves the fewest bytes.
        fused: The grid by collectives, with one tile per rank.
        stage_heads: Query heads of a stage of UPipe, over all ranks; None is the fewest it can.
        short_last: UPipe's last stage takes what is left where U does not divide the heads.
        in_order: UPipe's stages take heads in their natural order, so that keys are sent again.
        save_gathered: UPipe saves gathered q, k and v, rather than project again in backward.
        resend: UPipe with a ring sends visiting keys again in each stage, rather than keep them.
        parts: Parts of the sequence that FPDT works on one by one; None makes them 64K tokens.
    """

    prune: bool = True
    placement: Placement | None = None
    ulysses: int | None = None
    ring: int | None = None
    ring_inside: bool = False
    inner: int | None = None
    rows: int | None = None
    fused: bool = False
    stage_heads: int | None = None
    short_last: bool = False
    in_order: bool = False
    save_gathered: bool = False
    resend: bool = False
    parts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a planner may know beyond the problem.

    Attributes:
        gpus_per_node: Ranks that share fast links; neighbouring ranks share a node.
        evaluate: Simulated seconds of a plan, for planners that search.
    """

    gpus_per_node: int = 8
    evaluate: Callable[[Plan], float] | None = None


Planner = Callable[[Problem, Direction, Options, Context, str], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to spread attention over ranks.

    Attributes:
        name: What a user types.
        summary: One line for lists.
        paper: Where it was published.
        plan: (problem, direction, options, context, spelled name) -> plan; raises
            UnsupportedError with the reason and what is near and legal.
        accepts: Names of the options that it reads.
        defaults: Options that differ from the class's own defaults.
        balanced: Whether its token placement is meant to balance a causal pattern.
    """

    name: str
    summary: str
    paper: str
    plan: Planner
    accepts: frozenset[str] = frozenset()
    defaults: Options = Options()


ALIASES: Mapping[str, str] = {
    "strip": "stripe",
    "striped": "stripe",
    "a2a": "ulysses",
    "p2p": "ring",
    "dual-chunk-swap": "zigzag",
    "head-tail": "zigzag",
    "llama3": "allgather",
    "a2a+p2p": "usp",
    "ulysses_ring": "usp",
}
"""Other projects' names for the same strategies, accepted at the edge only."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A strategy with its options, as a user spelled it."""

    strategy: Strategy
    options: Options

    @property
    def text(self) -> str:
        """Canonical spelling: the name, then the options that differ from the defaults."""
        parts = []
        own = self.options
        if own.ulysses and own.ring:
            parts.append(f"{own.ulysses}x{own.ring}")
            own = replace(own, ulysses=None, ring=None)
        for item in fields(Options):
            value = getattr(own, item.name)
            if value != getattr(self.strategy.defaults, item.name):
                shown = str(value).lower() if isinstance(value, bool) else str(value)
                parts.append(f"{item.name}={shown}")
        return self.strategy.name + (":" + ",".join(parts) if parts else "")

    def plan(self, problem: Problem, direction: Direction, context: Context | None = None) -> Plan:
        """Plan a problem; see `Strategy.plan`.

        A problem with a model width is a layer: where the strategy plans attention alone, its
        projections are planned around it.
        """
        context = context or Context()
        layer = problem.hidden is not None
        with without_collection():
            if layer:
                check_layer(problem, self.text)
            plan = self.strategy.plan(problem, direction, self.options, context, self.text)
            return as_layer(plan) if layer and plan.scope is Scope.ATTENTION else plan


def choose(text: str, table: Mapping[str, Strategy]) -> Chosen:
    """Read `name[:option=value,...]`, for instance `usp:ulysses=4` or `usp:4x2`.

    Raises:
        ValueError: Unknown name, option or value; the choices are listed.
    """
    name, _, tail = text.partition(":")
    name = ALIASES.get(name, name)
    if name not in table:
        raise ValueError(f"strategy ({name}) is unknown; choose from {', '.join(sorted(table))}")
    strategy = table[name]
    options = strategy.defaults
    for part in filter(None, tail.split(",")):
        options = _with_option(options, strategy, part)
    return Chosen(strategy, options)


def _with_option(options: Options, strategy: Strategy, part: str) -> Options:
    key, _, value = part.partition("=")
    if not value and "ring" in strategy.accepts and "x" in part:
        ulysses, _, ring = part.partition("x")
        both = _with_option(options, strategy, f"ulysses={ulysses}")
        return _with_option(both, strategy, f"ring={ring}")
    key = key.replace("-", "_")
    if key not in strategy.accepts:
        known = ", ".join(sorted(strategy.accepts)) or "no options"
        raise ValueError(f"{strategy.name}: option ({key}) is unknown; it takes {known}")
    try:
        return replace(options, **{key: _READERS[key](value)})
    except ValueError as error:
        raise ValueError(f"{strategy.name}: {key} ({value}): {error}") from None


def _flag(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


def _degree(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ValueError("must be a whole number of at least 1")
    return int(value)


_READERS: Mapping[str, Callable[[str], Any]] = {
    "fused": _flag,
    "in_order": _flag,
    "inner": _degree,
    "parts": _degree,
    "placement": Placement,
    "prune": _flag,
    "resend": _flag,
    "ring": _degree,
    "ring_inside": _flag,
    "rows": _degree,
    "save_gathered": _flag,
    "short_last": _flag,
    "stage_heads": _degree,
    "ulysses": _degree,
}
"""How the value of each option is read."""
