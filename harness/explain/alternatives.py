"""What is near and legal where a strategy cannot do a problem; every alternative is planned."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.errors import UnsupportedError
from harness.plan import imbalance
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.planning.options import LAYER_OPTIONS
from harness.planning.strategy import Chosen, Context, Options
from strategies import EVERY_STRATEGY, LAYER_STRATEGIES, STRATEGIES

_MOST_NEAR = 6  # alternatives of one kind: more would not be read, and each is planned
_EVEN = 1.01  # a hundredth over the mean costs less than any change of placement
_USP = STRATEGIES["usp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A legal alternative: the flags that ask for it, and how evenly it spreads the work."""

    flags: str
    imbalance_total: float


def near(chosen: Chosen, problem: Problem, context: Context, flags: str = "") -> tuple[Near, ...]:
    """Find legal alternatives: the same degree first, then others, then other strategies."""
    if problem.hidden is None and _is_of_layers(chosen):
        layer = replace(problem, hidden=problem.heads_q * problem.head_dim)
        as_asked = _legal([(chosen, layer)], context, " --scope layer")
        return tuple(as_asked) or near(chosen, layer, context, " --scope layer")
    found: list[Near] = []
    for candidates in (_other_degrees(chosen, problem), _other_cps(chosen, problem)):
        found += _legal(candidates, context, flags)
    if not found:
        every = STRATEGIES if problem.hidden is None else EVERY_STRATEGY
        others = [Chosen(other, other.defaults) for other in every.values()]
        found += _legal(((other, problem) for other in others), context, flags)
    return tuple(found)


def _is_of_layers(chosen: Chosen) -> bool:
    """Whether a strategy, or an option that it was given, plans whole layers only."""
    given = any(getattr(chosen.options, name) != getattr(Options(), name) for name in LAYER_OPTIONS)
    return given or chosen.strategy.name in LAYER_STRATEGIES


def evener(
    chosen: Chosen, problem: Problem, context: Context, imbalance_total: float
) -> tuple[Near, ...]:
    """Find the placements of tokens that spread the work more evenly; the most even first.

    Args:
        chosen: A strategy that can do the problem.
        problem: The problem.
        context: What its planner may know.
        imbalance_total: Of its forward plan; nothing is looked for where that is even.
    """
    if "placement" not in chosen.strategy.accepts or imbalance_total < _EVEN:
        return ()
    others = (
        (Chosen(chosen.strategy, replace(chosen.options, placement=placement)), problem)
        for placement in Placement
        if placement is not chosen.options.placement
    )
    better = (
        near for near in _legal(others, context, "") if near.imbalance_total < imbalance_total
    )
    return tuple(sorted(better, key=lambda near: near.imbalance_total))


def _legal(
    candidates: Iterable[tuple[Chosen, Problem]], context: Context, flags: str
) -> Iterator[Near]:
    found = 0
    for chosen, problem in candidates:
        try:
            forward, _ = (chosen.plan(problem, direction, context) for direction in Direction)
        except UnsupportedError:
            continue
        words = f"--strategy {_spelled(chosen, problem)} --cp {problem.cp}{flags}"
        yield Near(flags=words, imbalance_total=imbalance.imbalance_total(forward))
        found += 1
        if found == _MOST_NEAR:
            return


def _other_degrees(chosen: Chosen, problem: Problem) -> Iterator[tuple[Chosen, Problem]]:
    """The same cp otherwise: as a mesh, with another inner ring, or in other stages of heads."""
    degrees = [d for d in range(problem.cp, 1, -1) if problem.cp % d == 0]
    accepts = chosen.strategy.accepts
    if "ulysses" in accepts:
        yield from _with(
            chosen,
            problem,
            [replace(chosen.options, ulysses=u, ring=problem.cp // u) for u in degrees],
        )
    elif "inner" in accepts:
        yield from _with(chosen, problem, [replace(chosen.options, inner=w) for w in degrees])
    elif "rows" in accepts:
        yield from _with(chosen, problem, _other_rows(chosen.options, problem))
    elif "stage_heads" in accepts:
        yield from _with(chosen, problem, _other_stages(chosen.options, problem, degrees))
    elif chosen.strategy is STRATEGIES["ulysses"]:
        # USP is Ulysses over fewer ranks, with a ring between the groups.
        mesh = Chosen(_USP, replace(_USP.defaults, prune=chosen.options.prune))
        yield from _with(
            mesh, problem, [replace(mesh.options, ulysses=u, ring=problem.cp // u) for u in degrees]
        )


def _other_rows(options: Options, problem: Problem) -> list[Options]:
    """As many rows as divide cp, those nearest to what was asked first."""
    cp, asked = problem.cp, options.rows or 1
    legal = [rows for rows in range(1, cp + 1) if cp % rows == 0]
    return [replace(options, rows=y) for y in sorted(legal, key=lambda y: (abs(y - asked), y))]


def _other_stages(options: Options, problem: Problem, degrees: Sequence[int]) -> Iterator[Options]:
    """A short last stage, stages of nearly so many heads, and rings of smaller groups."""
    asked = options.stage_heads
    if asked is not None:
        yield replace(options, short_last=True)
        for u in sorted(range(1, problem.heads_q + 1), key=lambda u: (abs(u - asked), u)):
            yield replace(options, stage_heads=u)
    for ring in reversed(degrees):
        yield replace(options, ring=ring, stage_heads=None)


def _with(
    chosen: Chosen, problem: Problem, options: Iterable[Options]
) -> Iterator[tuple[Chosen, Problem]]:
    for option in options:
        yield Chosen(chosen.strategy, option), problem


def _other_cps(chosen: Chosen, problem: Problem) -> Iterator[tuple[Chosen, Problem]]:
    """The same strategy on fewer ranks: divisors of cp, query heads and KV heads, nearest first."""
    counts = (problem.cp, problem.heads_q, problem.heads_kv)
    degrees = {d for n in counts for d in range(1, min(n, problem.cp - 1) + 1) if n % d == 0}
    for cp in sorted(degrees, reverse=True):
        yield chosen, replace(problem, cp=cp)


def _spelled(chosen: Chosen, problem: Problem) -> str:
    """As a user would type it; a mesh as U x R."""
    u = chosen.options.ulysses
    if chosen.strategy is _USP and u is not None:
        return chosen.text.replace(f"ulysses={u}", f"{u}x{problem.cp // u}")
    return chosen.text
