"""Plan and prove: the one way from a strategy and a problem to a plan that may be used."""

from harness.base.remembered import remembered
from harness.errors import PlanError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.sharding import Sharding
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.verify.pair import check_pair
from harness.verify.proof import verify

Owners = tuple[Sharding, Sharding]
"""Who owns which query tokens, and which key tokens."""


def proved(
    chosen: Chosen,
    problem: Problem,
    direction: Direction,
    context: Context | None = None,
    owners: Owners | None = None,
) -> Program:
    """Plan one direction and prove it; nothing is kept.

    Args:
        chosen: The strategy.
        problem: The problem.
        direction: Forward or backward.
        context: Facts for the planner beyond the problem.
        owners: Who must end with what; None takes the plan's outputs at their word.

    Raises:
        UnsupportedError: The strategy cannot do this problem.
        PlanError: The plan is wrong, or its tokens lie elsewhere than their owners have them.
    """
    return proved_plan(chosen.plan(problem, direction, context), owners)


def proved_plan(plan: Plan, owners: Owners | None = None) -> Program:
    """Prove a plan that is there, such as one that a pass has changed.

    Raises:
        PlanError: As `proved`.
    """
    if owners is None:
        return verify(plan)
    _check_cut(plan, owners)
    return verify(plan, tuple(sharding.owned for sharding in owners))


def proved_once(
    chosen: Chosen,
    problem: Problem,
    direction: Direction,
    context: Context | None = None,
    owners: Owners | None = None,
) -> Program:
    """As `proved`, once for each problem; a backward plan must follow its forward plan.

    Raises:
        UnsupportedError: As `proved`.
        PlanError: As `proved`, or the forward plan leaves less than the backward plan starts from.
    """
    return _kept(chosen, problem, direction, context or Context(), owners)


@remembered
def _kept(
    chosen: Chosen,
    problem: Problem,
    direction: Direction,
    context: Context,
    owners: Owners | None,
) -> Program:
    program = proved(chosen, problem, direction, context, owners)
    if direction is Direction.BACKWARD:
        forward = _kept(chosen, problem, Direction.FORWARD, context, owners)
        check_pair(forward.plan, program.plan)
    return program


def _check_cut(plan: Plan, owners: Owners) -> None:
    if (plan.q_chunks, plan.kv_chunks) != tuple(sharding.chunks for sharding in owners):
        raise PlanError(
            "the plan's chunk boundaries match the sharding of the inputs",
            rank=None,
            task=None,
            detail=f"{plan.strategy} {plan.direction.value} of {plan.problem} has other chunks",
        )
