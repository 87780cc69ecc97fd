"""Other strategies' plans beside the planner's own: a pair of both directions that fit together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Tensor
from strategies.ultraattn.finish import Plans, ReportedPlan
from strategies.ultraattn.planning import NAME
from strategies.ultraattn.selection import best_fair, fastest

RINGS = ("ring", "zigzag", "stripe")


def or_others(
    problem: Problem,
    own: Plans,
    names: Sequence[str],
    others: Callable[[str, Problem, Direction], Plan],
    seconds: Callable[[Plan], float],
) -> Plans:
    """Return the fastest pair of plans, own or others', that is fair to both directions.

    Both directions share the places of tokens, so not every forward plan goes with every backward
    plan; see `fit`. No direction may be slower than the fastest ring's; see `selection.fair`.

    Args:
        problem: The problem.
        own: The planner's plans.
        names: Other strategies, with options, whose plans stand beside them.
        others: Plans of another strategy, by its name.
        seconds: Simulated seconds of a plan.
    """
    plans = {NAME: {direction: each.plan for direction, each in own.items()}}
    plans |= _plans_of_others(problem, names, others)
    times = {
        direction: {name: seconds(both[direction]) for name, both in plans.items()}
        for direction in Direction
    }
    chosen = _chosen(plans, times)
    found: dict[Direction, ReportedPlan] = {}
    for direction, name in chosen.items():
        said = {"candidates_s": times[direction], "fallback": None if name == NAME else name}
        if name == NAME:
            mine = own[direction]
            found[direction] = replace(mine, report={**mine.report, **said})
        else:
            report = {**said, "makespan_s": times[direction][name]}
            found[direction] = ReportedPlan(plan=plans[name][direction], report=report)
    return found


def _plans_of_others(
    problem: Problem, names: Sequence[str], others: Callable[[str, Problem, Direction], Plan]
) -> dict[str, dict[Direction, Plan]]:
    """Return the plans of the strategies that can do the problem."""
    plans = {}
    for name in names:
        try:
            plans[name] = {direction: others(name, problem, direction) for direction in Direction}
        except UnsupportedError:
            continue
    return plans


def _chosen(
    plans: Mapping[str, Mapping[Direction, Plan]],
    times: Mapping[Direction, Mapping[str, float]],
) -> dict[Direction, str]:
    """Return whose plan is taken in each direction."""
    pairs = [
        dict(zip(Direction, names, strict=True))
        for names in product(plans, repeat=2)
        if fit(plans[names[0]][Direction.FORWARD], plans[names[1]][Direction.BACKWARD])
    ]
    taken = [{d: times[d][name] for d, name in pair.items()} for pair in pairs]
    rings = [taken[pairs.index(dict.fromkeys(Direction, n))] for n in RINGS if n in plans]
    return pairs[best_fair(taken, fastest(rings or taken))]


def fit(forward: Plan, backward: Plan) -> bool:
    """Whether a backward plan starts from just what a forward plan leaves."""
    if (forward.q_chunks, forward.kv_chunks) != (backward.q_chunks, backward.kv_chunks):
        return False
    begins = {each for each in backward.initial if each.piece.tensor is not Tensor.DOUT}
    return begins == set(forward.saved)
