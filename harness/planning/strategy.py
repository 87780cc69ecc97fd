"""A strategy: a name, a paper, and one function from a problem to a plan.

All else that the harness asks of a strategy is here too, as functions and facts that it may have:
its closed form, what is near where it cannot do a problem, what its released code does, and how it
is checked. So a strategy is one file, and nothing outside that file spells its name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from harness.cluster.machine import Cluster
from harness.plan.dealing import chunk_of
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.planning.closed_forms import Volume
from harness.planning.frameworks import FrameworkSetting

O = TypeVar("O")  # noqa: E741  # the dataclass of a strategy's options


def _nobody(cp: int) -> tuple[str, ...]:
    del cp
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Facts that a planner may use beyond the problem.

    Attributes:
        gpus_per_node: Ranks that share fast links; neighbouring ranks share a node.
        cluster: What the plan is made for, for planners that time their choices; None leaves it
            to them.
        evaluate: Simulated seconds of a plan, for planners that search.
        peak_bytes: What the fullest rank of a plan holds, proved, for planners that cap it.
        align: Tokens that transfers are rounded up to where a chunk is cut.
        estimate: The same without the proof that `evaluate` makes first, for plans of which most
            are thrown away; what is returned is proved before it is used, as all plans are.
        others: Plans of another strategy, by its name, for planners that may fall back on one.
        rivals: cp -> the names for `others`, with options, that are worth a try on so many ranks.
    """

    gpus_per_node: int = 8
    align: int = 1
    cluster: Cluster | None = None
    evaluate: Callable[[Plan], float] | None = None
    peak_bytes: Callable[[Plan], int] | None = None
    estimate: Callable[[Plan], float] | None = None
    others: Callable[[str, Problem, Direction], Plan] | None = None
    rivals: Callable[[int], tuple[str, ...]] = _nobody


Planner = Callable[[Problem, Direction, O, Context, str], Plan]
Resolver = Callable[[Problem, Direction, O, Context], O]
Reporter = Callable[[Problem, Direction, O, Context], Mapping[str, Any]]
ClosedForm = Callable[[Problem, Direction, O, Context], Volume | None]
Alternatives = Callable[[Problem, O], Iterable[O | str]]
Settings = Callable[[Problem, O], Iterable[FrameworkSetting]]


# Optional fields -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Memory that an implementation of attention holds beyond the needs of the algorithm.

    Attributes: As those of the same names of `counting.Counting`.
    """

    held: bool = False
    wide_sums: bool = False
    results: bool = False
    scratch: bool = False
    rotary: bool = False
    loop: bool = False


LEAN = Holding(results=True, scratch=True)
"""Results of kernels and what kernels hold inside; sums as wide as values."""

PLAIN = replace(LEAN, wide_sums=True)
"""The same with float32 sums."""

RING_LOOP = replace(PLAIN, rotary=True, loop=True)
"""The loop of yunchang and ring-flash-attention, with a float32 rotary that makes copies.

Ulysses too runs it there, for a ring of one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Generic[O]):
    """How released code runs a strategy.

    Attributes:
        holding: Memory that it holds.
        options: Its behaviour, as options here.
        extra_bytes: (problem, direction) -> bytes that each rank sends between nodes in one pass
            beyond the plan; None where it sends what is planned.
    """

    holding: Holding
    options: O
    extra_bytes: Callable[[Problem, Direction], float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Generic[O]):
    """Facts about a strategy for the estimate of a training step.

    Attributes:
        released: options -> how released code runs it; None without released code.
        on_nodes: Number of nodes -> the options that it is trained with on so many.
        grows: The option that counts parts of a fixed length, where the strategy chooses it: the
            plan grows by the same with each, so plans of few parts tell what many take.
        note: A remark on its memory beside that of others.
    """

    released: Callable[[O], Released[O]] | None = None
    on_nodes: Callable[[int], O] | None = None
    grows: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks(Generic[O]):
    """Options, heads and degrees with which `check` covers a strategy, besides its defaults.

    Attributes:
        options: Options as they are typed, such as `inner=2`: each is a row of the grid.
        layers: The same, of the grid at layer scope.
        least_heads: cp -> query heads that it needs at least: the grid gives it as many.
        divides: (query heads, cp, options); raises UnsupportedError where its stages of heads do
            not divide them. The grid leaves these out and has every degree and heads that divide.
    """

    options: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    least_heads: Callable[[int], int] | None = None
    divides: Callable[[int, int, O], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy(Generic[O]):
    """One way to spread attention over ranks.

    Attributes:
        name: The name as a user types it.
        summary: One line for lists.
        paper: Where it was published.
        plan: (problem, direction, options, context, spelled name) -> plan; raises
            UnsupportedError with the reason and what is near and legal.
        defaults: Its options where none is given; their class says what may be typed.
        aliases: Other projects' names for it, accepted at the edge only; one that stands for some
            of its options has them behind a colon, as `name:option=value`.
        mesh: Two options whose product is cp, which may be typed as `4x2` together.
        layers_only: Projections are part of it, so it plans whole layers and not attention alone.
        resolve: (problem, direction, options, context) -> options with what the strategy chooses
            filled in; raises as `plan` does. None: it leaves nothing open.
        report: (problem, direction, options, context) -> what each level of a planner that searches
            came to, for people and for JSON; None for strategies that do not search.
        weighs: options -> whether it times plans to choose between them, so that its plan depends
            on lengths and speeds; None: only where it has a `report`.
        volume: (problem, direction, options, context) -> what each rank receives by the paper's
            formula; None where it does not hold, or no formula is known.
        alternatives: (problem, options) -> options, or other strategies as they are typed, that
            may be legal at the same cp where the problem is refused; the nearest first. Other
            meshes need not be named.
        timed: Whether its choices depend on lengths and the cluster, though it has no report.
        compared: Options as they are typed that are worth a row beside its defaults where
            strategies are compared. Meshes and what `degree` names need not be named.
        degree: An option that takes divisors of cp: where strategies are compared, each has a row.
        settings: (problem, options with its choices filled in) -> what frameworks call it, with
            what each refuses; None where no framework does the same.
        training: Facts about training with its released code.
        checks: Options and shapes that `check` covers besides its defaults.
    """

    name: str
    summary: str
    paper: str
    plan: Planner[O]
    defaults: O
    aliases: tuple[str, ...] = ()
    mesh: tuple[str, str] | None = None
    layers_only: bool = False
    resolve: Resolver[O] | None = None
    report: Reporter[O] | None = None
    weighs: Callable[[O], bool] | None = None
    volume: ClosedForm[O] | None = None
    alternatives: Alternatives[O] | None = None
    timed: bool = False
    compared: tuple[str, ...] = ()
    degree: str | None = None
    settings: Settings[O] | None = None
    training: Training[O] = Training()
    checks: Checks[O] = Checks()


# What several say alike ----------------------------------------------------------------------


def divisors_of_cp(name: str, problem: Problem, options: O) -> Iterator[O]:
    """Yield a strategy's options with every divisor of cp but 1 for one of them, largest first."""
    asked: Any = options
    for degree in range(problem.cp, 1, -1):
        if problem.cp % degree == 0:
            yield replace(asked, **{name: degree})


def with_chunk(problem: Problem, direction: Direction, options: O, context: object) -> O:
    """Fill in the chunk that a placement chooses, where all ranks share the tokens; a resolver."""
    del direction, context
    return chunk_filled(problem, problem.cp, options)


def chunk_filled(problem: Problem, ranks: int, options: O) -> O:
    """Fill in the chunk that a placement chooses, where so many ranks share the tokens."""
    asked: Any = options
    chunk = chunk_of(problem.pattern, ranks, asked.placement, asked.chunk)
    return options if chunk == asked.chunk else replace(asked, chunk=chunk)


def nearest_rows(problem: Problem, options: O) -> list[O]:
    """List a grid's options with as many rows as divide cp, the nearest to those asked first."""
    asked: Any = options
    rows, cp = asked.rows or 1, problem.cp
    legal = [y for y in range(1, cp + 1) if cp % y == 0]
    return [replace(asked, rows=y) for y in sorted(legal, key=lambda y: (abs(y - rows), y))]


def ring_loop(options: O) -> Released[O]:
    """Released rings: their loop, which sends everything, needed or not."""
    sends_all: Any = options
    return Released(holding=RING_LOOP, options=replace(sends_all, prune=False))


def staged_loop(options: O) -> Released[O]:
    """Released stages of heads (untied-ulysses): no loop of a ring, and rotation in place.

    Over a ring of groups they take the loop as well, and each stage goes round by itself.
    """
    asked: Any = options
    if asked.ring == 1:
        return Released(holding=LEAN, options=options)
    extra = partial(_resent_bytes, asked.ring)
    return Released(holding=RING_LOOP, options=options, extra_bytes=extra)


def _resent_bytes(ring: int, problem: Problem, direction: Direction) -> float:
    """Count what a rank sends beyond need where each stage of heads goes round a ring by itself.

    Forward, that code passes queries around, backward keys with float32 dk and dv; a plan here
    passes the keys of a chunk around once for all stages that use them.
    """
    value, wide = problem.dtype.bytes, 4
    kv = max(problem.heads_kv, problem.cp // ring)
    again = problem.heads_q // kv - 1  # stages that use the same keys
    if direction is Direction.FORWARD:
        elements = max(0, (problem.heads_q - 2 * kv) * value * (ring - 1))
    else:
        elements = again * 2 * kv * (value * (ring - 1) + wide * ring)
    return problem.seqlen_q / problem.cp * problem.head_dim * elements
