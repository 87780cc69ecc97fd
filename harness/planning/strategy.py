"""What a strategy is: a name, a paper, and one function from a problem to a plan.

All else that the harness asks of a strategy is here too, as functions and facts that it may have:
its closed form, what is near where it cannot do a problem, what its released code does, and how it
is checked. So a strategy is one file, and nothing outside that file spells its name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from harness.cluster.machine import Cluster
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.planning.closed_forms import Volume
from harness.planning.released import Training

O = TypeVar("O")  # noqa: E741  # the dataclass of a strategy's options


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


Planner = Callable[[Problem, Direction, O, Context, str], Plan]
Resolver = Callable[[Problem, Direction, O, Context], O]
Reporter = Callable[[Problem, Direction, O, Context], Mapping[str, Any]]
ClosedForm = Callable[[Problem, Direction, O, Context], Volume | None]
Alternatives = Callable[[Problem, O], Iterable[O | str]]


def divisors_of_cp(name: str, problem: Problem, options: O) -> Iterator[O]:
    """Yield a strategy's options with every divisor of cp but 1 for one of them, largest first."""
    asked: Any = options
    for degree in range(problem.cp, 1, -1):
        if problem.cp % degree == 0:
            yield replace(asked, **{name: degree})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks(Generic[O]):
    """What the default grid of `check` asks of a strategy besides its defaults.

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
        name: What a user types.
        summary: One line for lists.
        paper: Where it was published.
        plan: (problem, direction, options, context, spelled name) -> plan; raises
            UnsupportedError with the reason and what is near and legal.
        defaults: Its options where none is given; their class says what may be typed.
        aliases: Other projects' names for it, accepted at the edge only.
        mesh: Two options whose product is cp, which may be typed as `4x2` together.
        layers_only: Projections are part of it, so it plans whole layers and not attention alone.
        resolve: (problem, direction, options, context) -> options with what the strategy chooses
            filled in; raises as `plan` does. None: it leaves nothing open.
        report: (problem, direction, options, context) -> what each level of a planner that searches
            came to, for people and for JSON; None for strategies that do not search.
        volume: (problem, direction, options, context) -> what each rank receives by the paper's
            formula; None where it does not hold, or no formula is known.
        alternatives: (problem, options) -> options, or other strategies as they are typed, that
            may be legal at the same cp where the problem is refused; the nearest first. Other
            meshes need not be named.
        training: What training with its released code is like.
        checks: What `check` asks of it besides its defaults.
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
    volume: ClosedForm[O] | None = None
    alternatives: Alternatives[O] | None = None
    training: Training[O] = Training()
    checks: Checks[O] = Checks()
