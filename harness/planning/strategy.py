"""What a strategy is: a name, a paper, and one function from a problem to a plan."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from harness.base.numbers import received
from harness.cluster.machine import Cluster
from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.residency import without_collection
from harness.plan.sharding import Placement
from harness.plan.tasks import Scope
from harness.planning.checkpoint import Checkpoint, checkpointed, fetching, offloaded, recomputing
from harness.planning.layer import as_layer, check_layer, with_summed_gradients
from harness.planning.options import COMMON_OPTIONS, LAYER_OPTIONS, OPTIONS, read_option
from harness.planning.peers import is_peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that a user may choose inside a strategy; each reads what it accepts.

    How each is typed is in `options.OPTIONS`.

    Attributes:
        prune: Leave out transfers that the pattern makes useless.
        placement: How tokens are dealt to ranks.
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
        checkpoint: What a layer saves for backward; see `keeping`. Any strategy takes it.
        offload: What a layer saves rests on the host. Any strategy takes it.
        sum_gradients: A layer's weight gradients are summed over ranks. Any strategy takes it.
        round_sent: Partial dq, dk and dv are sent in the problem's dtype. Any strategy takes it.
        levels: Levels of UltraAttn's planner that are on: `all`, `none` or names joined by `+`.
        seconds: CPU seconds that UltraAttn's planner spends on each distinct tiling.
        prove: UltraAttn's planner goes for proofs, whatever they take up to a minute each.
        candidates: UltraAttn may fall back on another strategy's plan that is faster.
    """

    prune: bool = True
    placement: Placement = Placement.CONTIGUOUS
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
    checkpoint: Checkpoint = Checkpoint.NONE
    offload: bool = False
    sum_gradients: bool = False
    round_sent: bool = False
    levels: str = "all"
    seconds: float = 2.0
    prove: bool = False
    candidates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a planner may know beyond the problem.

    Attributes:
        gpus_per_node: Ranks that share fast links; neighbouring ranks share a node.
        cluster: What the plan is made for, for planners that time their choices; None leaves it
            to them.
        evaluate: Simulated seconds of a plan, for planners that search.
        others: Plans of another strategy, by its name, for planners that may fall back on one.
    """

    gpus_per_node: int = 8
    cluster: Cluster | None = None
    evaluate: Callable[[Plan], float] | None = None
    others: Callable[[str, Problem, Direction], Plan] | None = None


Planner = Callable[[Problem, Direction, Options, Context, str], Plan]
Resolver = Callable[[Problem, Direction, Options, Context], Options]
Reporter = Callable[[Problem, Direction, Options, Context], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to spread attention over ranks.

    Attributes:
        name: What a user types.
        summary: One line for lists.
        paper: Where it was published.
        plan: (problem, direction, options, context, spelled name) -> plan; raises
            UnsupportedError with the reason and what is near and legal.
        report: (problem, direction, options, context) -> what each level of a planner that searches
            came to, for people and for JSON; None for strategies that do not search.
        accepts: Names of the options that it reads.
        defaults: Options that differ from the class's own defaults.
        resolve: (problem, direction, options, context) -> options with what the strategy chooses
            filled in; raises as `plan` does. None: it leaves nothing open.
    """

    name: str
    summary: str
    paper: str
    plan: Planner
    report: Reporter | None = None
    accepts: frozenset[str] = frozenset()
    defaults: Options = Options()
    resolve: Resolver | None = None


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
                parts.append(f"{item.name}={_shown(value)}")
        return self.strategy.name + (":" + ",".join(parts) if parts else "")

    def resolved(
        self, problem: Problem, direction: Direction, context: Context | None = None
    ) -> "Chosen":
        """Fill in the options that are left to the strategy, as its plan does.

        Raises:
            UnsupportedError: The strategy cannot do this problem.
        """
        resolve = self.strategy.resolve
        if resolve is None:
            return self
        filled = resolve(problem, direction, self.options, context or Context())
        return Chosen(self.strategy, filled)

    @property
    def of_layers(self) -> bool:
        """Whether an option is set that only layers have."""
        return any(getattr(self.options, n) != getattr(Options(), n) for n in LAYER_OPTIONS)

    def plan(self, problem: Problem, direction: Direction, context: Context | None = None) -> Plan:
        """Plan a problem; see `Strategy.plan`.

        A problem with a model width is a layer: where the strategy plans attention alone, its
        projections are planned around it.
        """
        context = context or Context()
        options, layer = self.options, problem.hidden is not None
        problem = replace(problem, round_sent=options.round_sent)
        if self.of_layers and not layer:
            raise UnsupportedError(
                f"{self.text}: {', '.join(sorted(LAYER_OPTIONS))} are of whole layers",
                ("--scope layer",),
            )
        with without_collection():
            if not layer:
                return self.strategy.plan(problem, direction, options, context, self.text)
            check_layer(problem, self.text)
            if direction is Direction.FORWARD:
                return self._forward(problem, context)
            return self._backward(problem, context)

    def _layer(self, problem: Problem, direction: Direction, context: Context) -> Plan:
        plan = self.strategy.plan(problem, direction, self.options, context, self.text)
        return as_layer(plan) if plan.scope is Scope.ATTENTION else plan

    def _forward(self, problem: Problem, context: Context) -> Plan:
        """Plan a layer that saves what the options say, where they say."""
        plan = self._layer(problem, Direction.FORWARD, context)
        plan = checkpointed(plan, self.options.checkpoint)
        return offloaded(plan) if self.options.offload else plan

    def _backward(self, problem: Problem, context: Context) -> Plan:
        """Plan the backward of a layer from what was saved, and sum what is to be summed."""
        options, plan = self.options, self._layer(problem, Direction.BACKWARD, context)
        if options.checkpoint is not Checkpoint.NONE:
            forward = self._layer(problem, Direction.FORWARD, context)
            plan = recomputing(forward, plan, options.checkpoint)
        if options.offload:
            plan = fetching(plan)
        return with_summed_gradients(plan) if options.sum_gradients else plan


def choose(text: str, table: Mapping[str, Strategy]) -> Chosen:
    """Read `name[:option=value,...]`, for instance `usp:ulysses=4` or `usp:4x2`.

    Raises:
        ValueError: Unknown name, option or value; the choices are listed.
        UnsupportedError: It is another project's code, which has no plan.
    """
    if is_peer(text):
        raise UnsupportedError(
            f"{text}: it is another project's code and has no plan; measure or check it",
            ("sweep --mode measure", "check"),
        )
    name, _, tail = text.partition(":")
    name = ALIASES.get(name, name)
    if name not in table:
        raise ValueError(f"strategy ({name}) is unknown; choose from {', '.join(sorted(table))}")
    strategy = table[name]
    options = strategy.defaults
    parts = [part for typed in filter(None, tail.split(",")) for part in _spelled(typed, strategy)]
    keys = [part.partition("=")[0].replace("-", "_") for part in parts]
    if again := next((key for at, key in enumerate(keys) if key in keys[:at]), None):
        raise ValueError(
            f"{strategy.name}: option ({again}) must be given once; {text} has it twice"
        )
    for part in parts:
        options = _with_option(options, strategy, part)
    return Chosen(strategy, options)


_EVERYBODY = (*sorted(COMMON_OPTIONS), *sorted(LAYER_OPTIONS))
"""Options that no strategy lists, because all take them."""


def _spelled(part: str, strategy: Strategy) -> tuple[str, ...]:
    """Spell a mesh, `4x2`, as the two options that it is."""
    mesh = re.fullmatch(r"(\d*)x(\d*)", part) if "ulysses" in strategy.accepts else None
    return (part,) if mesh is None else (f"ulysses={mesh[1]}", f"ring={mesh[2]}")


def _with_option(options: Options, strategy: Strategy, part: str) -> Options:
    key, _, value = part.partition("=")
    key = key.replace("-", "_")
    if key not in strategy.accepts and key not in _EVERYBODY:
        known = ", ".join(f"{name}=" for name in sorted(strategy.accepts)) or "no options"
        mesh_hint = (
            f"{part}x2 (Ulysses x ring) or ulysses={part}, or "
            if re.fullmatch("[0-9]+", part)
            else ""
        )
        raise ValueError(
            f"{strategy.name}: option ({key}) is unknown; "
            f"it takes {mesh_hint if 'ulysses' in strategy.accepts else ''}{known}, and as all do "
            f"{', '.join(f'{name}=' for name in _EVERYBODY)}; `list` has their values"
        )
    try:
        return replace(options, **{key: read_option(key, value)})  # type: ignore[arg-type]  # read by key
    except ValueError as error:
        raise ValueError(f"{strategy.name}: {key} ({received(value)}): {error}") from None


def accepted(strategy: Strategy) -> Mapping[str, str]:
    """Options that a strategy accepts, with the value each has if not given, as text.

    Returns:
        By name; the text is empty where the strategy chooses by the problem.
    """
    values = {name: getattr(strategy.defaults, name) for name in OPTIONS}
    return {
        name: "" if value is None else _shown(value)
        for name, value in values.items()
        if name in strategy.accepts
    }


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
