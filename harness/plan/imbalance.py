"""How evenly a plan's attention is spread over ranks, by exact areas of its tiles.

The work of a tile is its unmasked (query, key) pairs times its query heads. Kernels' efficiency,
transfers and merges are left out; the simulator has them.
"""

from harness.plan.grid import steps_of
from harness.plan.plan import Plan
from harness.plan.tasks import Tile


def work_by_rank(plan: Plan) -> tuple[int, ...]:
    """Sum each rank's work: unmasked (query, key, head) triples of one sequence of the batch."""
    work = [0] * plan.problem.cp
    for task in plan.tasks:
        if isinstance(task, Tile):
            work[task.place.rank] += task.area * task.heads.bit_count()
    return tuple(work)


def imbalance_total(plan: Plan) -> float:
    """Return the busiest rank's work over the mean of all ranks, >= 1.

    It bounds the speed-up when ranks wait for one another only at the end. 1 if there is no work.

    A contiguous ring under a causal pattern on 4 ranks has blocks of work 0.5, 1.5, 2.5 and 3.5:
    3.5 / 2 = 1.75, where a diagonal block counts one half. With c tokens to a block the diagonal
    has c (c + 1) / 2 pairs, and the value is (3.5 + 0.5 / c) / (2 + 0.5 / c).
    """
    work = work_by_rank(plan)
    total = sum(work)
    return max(work) * len(work) / total if total else 1.0


def imbalance_lockstep(plan: Plan) -> float:
    """Return the sum over steps of the busiest rank's work, over the mean of all ranks, >= 1.

    It bounds the speed-up when ranks wait for one another after every step, as in a ring without
    slack. A rank's n-th tile is its step n (`plan.steps_of`). Never below `imbalance_total`: no
    rank does more in a step than the busiest one. 1 if there is no work.
    """
    busiest: dict[int, int] = {}
    for task, step in zip(plan.tasks, steps_of(plan), strict=True):
        if isinstance(task, Tile):
            work = task.area * task.heads.bit_count()
            busiest[step] = max(busiest.get(step, 0), work)
    total = sum(work_by_rank(plan))
    return sum(busiest.values()) * plan.problem.cp / total if total else 1.0
