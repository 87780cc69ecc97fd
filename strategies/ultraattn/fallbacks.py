"""Other strategies' plans beside the planner's own: a pair of both directions that fit together."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Tensor
from strategies.ultraattn.planner import NAME, Planned
from strategies.ultraattn.selection import fair, fastest

FALLBACKS = ("ring", "zigzag", "stripe", "ulysses", "usp", "allgather", "owner", "grid")
"""Strategies whose plans stand beside the planner's own, with `candidates`."""
RINGS = ("ring", "zigzag", "stripe")


def or_others(
    problem: Problem,
    own: Mapping[Direction, Planned],
    others: Callable[[str, Problem, Direction], Plan],
    seconds: Callable[[Plan], float],
) -> dict[Direction, Planned]:
    """Return the fastest pair of plans, own or others', that is fair to both directions.

    Both directions share the places of tokens, so not every forward plan goes with every backward
    plan; see `fit`. No direction may be slower than the fastest ring's; see `fair`.

    Args:
        problem: What is computed.
        own: The planner's plans.
        others: Plans of another strategy, by its name.
        seconds: Simulated seconds of a plan.
    """
    plans = {NAME: {direction: each.plan for direction, each in own.items()}}
    for name in FALLBACKS:
        try:
            plans[name] = {direction: others(name, problem, direction) for direction in Direction}
        except UnsupportedError:
            continue
    times = {
        direction: {name: seconds(both[direction]) for name, both in plans.items()}
        for direction in Direction
    }
    pairs = [
        (forward, backward)
        for forward, backward in product(plans, plans)
        if fit(plans[forward][Direction.FORWARD], plans[backward][Direction.BACKWARD])
    ]
    taken = [{d: times[d][name] for d, name in zip(Direction, p, strict=True)} for p in pairs]
    rings = [taken[pairs.index((name, name))] for name in RINGS if name in plans]
    allowed = fair(taken, fastest(rings or taken))
    best = pairs[min(allowed, key=lambda index: sum(taken[index].values()))]
    found = {}
    for direction, name in zip(Direction, best, strict=True):
        said = {"candidates_s": times[direction], "fallback": None if name == NAME else name}
        if name == NAME:
            mine = own[direction]
            found[direction] = replace(mine, report={**mine.report, **said})
        else:
            report = {**said, "makespan_s": times[direction][name]}
            found[direction] = Planned(plan=plans[name][direction], report=report)
    return found


def fit(forward: Plan, backward: Plan) -> bool:
    """Whether a backward plan starts from just what a forward plan leaves."""
    if (forward.q_chunks, forward.kv_chunks) != (backward.q_chunks, backward.kv_chunks):
        return False
    begins = {each for each in backward.initial if each.piece.tensor is not Tensor.DOUT}
    return begins == set(forward.saved)
