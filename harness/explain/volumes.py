"""How many bytes each rank receives, moves to its host, and projects again: counted in a plan."""

from harness.plan.plan import Plan
from harness.plan.sizes import leg_bytes, linear_flops, traffic
from harness.plan.tasks import Linear, LinearOp, legs_of


def received_bytes(plan: Plan) -> tuple[int, ...]:
    """Count what each rank receives from other ranks, in bytes, from the plan's own transfers."""
    return tuple(traffic(plan)[1])


def host_bytes(plan: Plan) -> tuple[int, ...]:
    """Count what moves between each rank's device and its own host, both ways, in bytes."""
    moved = [0] * plan.problem.cp
    for task in plan.tasks:
        for leg in legs_of(task):
            if leg.src.rank == leg.dst.rank:
                moved[leg.dst.rank] += leg_bytes(plan, leg)
    return tuple(moved)


def project_flops(plan: Plan) -> tuple[int, ...]:
    """Count what each rank spends on projections of q, k and v, the first time and again."""
    spent = [0] * plan.problem.cp
    for task in plan.tasks:
        if isinstance(task, Linear) and task.op is LinearOp.PROJECT:
            spent[task.place.rank] += linear_flops(plan, task)
    return tuple(spent)
