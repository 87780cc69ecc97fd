"""Nearest supported configurations of a refused problem; every alternative is planned."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from harness.errors import UnsupportedError
from harness.plan import imbalance
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.planning.chosen import Chosen
from harness.planning.options import placement_of
from harness.planning.strategy import Context
from strategies import EVERY_STRATEGY, STRATEGIES, comparable, strategy

_MOST_NEAR = 6  # alternatives of one kind: more would not be read, and each is planned
_MANY_CHUNKS = (Placement.DOCUMENTS, Placement.PTRR)  # slow to plan; `--placements` shows them
_EVEN = 1.01  # a hundredth over the mean costs less than any change of placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A legal alternative: the flags that ask for it, and how evenly it spreads the work."""

    flags: str
    imbalance_total: float


def near(
    chosen: Chosen, problem: Problem, context: Context, flags: str = ""
) -> tuple[Alternative, ...]:
    """Find legal alternatives: the same degree first, then others, then other strategies."""
    if problem.hidden is None and chosen.needs_layer:
        layer = replace(problem, hidden=problem.heads_q * problem.head_dim)
        as_asked = _legal([(chosen, layer)], context, " --scope layer")
        return tuple(as_asked) or near(chosen, layer, context, " --scope layer")
    found: list[Alternative] = []
    for candidates in (_other_options(chosen, problem), _other_cps(chosen, problem)):
        found += _legal(candidates, context, flags)
    if not found:
        every = STRATEGIES if problem.hidden is None else EVERY_STRATEGY
        others = (strategy(text) for text in comparable(problem.cp, every))
        found += _legal(((other, problem) for other in others), context, flags)
    return tuple(found)


def evener(
    chosen: Chosen, problem: Problem, context: Context, imbalance_total: float
) -> tuple[Alternative, ...]:
    """Find the placements of tokens that spread the work more evenly; the most even first.

    Those that cut a sequence into very many chunks are left out.

    Args:
        chosen: A strategy that can do the problem.
        problem: The problem.
        context: Facts for its planner.
        imbalance_total: Of its forward plan; nothing is looked for where that is even.
    """
    had = placement_of(chosen.options)
    if had is None or imbalance_total < _EVEN:
        return ()
    others = (
        (replace(chosen, options=replace(chosen.options, placement=placement)), problem)
        for placement in Placement
        if placement is not had and placement not in _MANY_CHUNKS
    )
    better = (
        near for near in _legal(others, context, "") if near.imbalance_total < imbalance_total
    )
    return tuple(sorted(better, key=lambda near: near.imbalance_total))


def _legal(
    candidates: Iterable[tuple[Chosen, Problem]], context: Context, flags: str
) -> Iterator[Alternative]:
    found = 0
    for chosen, problem in candidates:
        try:
            forward, _ = (chosen.plan(problem, direction, context) for direction in Direction)
        except UnsupportedError:
            continue
        words = f"--strategy {_spelled(chosen, problem)} --cp {problem.cp}{flags}"
        yield Alternative(flags=words, imbalance_total=imbalance.imbalance_total(forward))
        found += 1
        if found == _MOST_NEAR:
            return


def _other_options(chosen: Chosen, problem: Problem) -> Iterator[tuple[Chosen, Problem]]:
    """The same cp otherwise: as another mesh, or as the strategy itself proposes."""
    asked, mesh = chosen.strategy.alternatives, chosen.strategy.mesh
    if mesh is not None:
        degrees = (d for d in range(problem.cp, 1, -1) if problem.cp % d == 0)
        for first in degrees:
            both = dict(zip(mesh, (first, problem.cp // first), strict=True))
            yield replace(chosen, options=replace(chosen.options, **both)), problem
    for other in () if asked is None else asked(problem, chosen.options):
        own = not isinstance(other, str)
        yield replace(chosen, options=other) if own else strategy(other), problem


def _other_cps(chosen: Chosen, problem: Problem) -> Iterator[tuple[Chosen, Problem]]:
    """The same strategy on fewer ranks: divisors of cp, query heads and KV heads, nearest first."""
    counts = (problem.cp, problem.heads_q, problem.heads_kv)
    degrees = {d for n in counts for d in range(1, min(n, problem.cp - 1) + 1) if n % d == 0}
    for cp in sorted(degrees, reverse=True):
        yield chosen, replace(problem, cp=cp)


def _spelled(chosen: Chosen, problem: Problem) -> str:
    """As a user would type it; a mesh as U x R."""
    mesh = chosen.strategy.mesh
    first = None if mesh is None else getattr(chosen.options, mesh[0])
    if mesh is None or first is None:
        return chosen.text
    return chosen.text.replace(f"{mesh[0]}={first}", f"{first}x{problem.cp // first}")
