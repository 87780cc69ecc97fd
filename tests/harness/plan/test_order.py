"""Schedules: the plan's own order always runs; every other mistake raises its own error."""

from dataclasses import replace
from itertools import pairwise

import pytest

from harness.errors import CycleError, MisfitError, OrderError, PlanError, UnorderedError
from harness.plan.order import (
    ScheduledPlan,
    in_plan_order,
    schedule_from_json,
    schedule_to_json,
    verify_schedule,
)
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import contiguous
from harness.plan.tasks import Leg, Piece, Place, Resident, Tensor, Transfer, legs_of, ranks_of
from patterns import make_pattern
from strategies import STRATEGIES, quick, strategy

PROBLEM = Problem(
    pattern=make_pattern("causal", 29), heads_q=6, heads_kv=3, head_dim=8, head_dim_v=6, cp=4
)
every_plan = pytest.mark.parametrize(
    "plan",
    [
        pytest.param(strategy(name).plan(PROBLEM, direction), id=f"{name}-{direction}")
        for name in map(quick, STRATEGIES)
        for direction in Direction
    ],
)


def swapped(scheduled: ScheduledPlan, rank: int, first: int, second: int) -> ScheduledPlan:
    exchange = {first: second, second: first}
    order = tuple(exchange.get(task, task) for task in scheduled.order[rank])
    return replaced(scheduled, rank, order)


def replaced(scheduled: ScheduledPlan, rank: int, order: tuple[int, ...]) -> ScheduledPlan:
    return replace(scheduled, order=(*scheduled.order[:rank], order, *scheduled.order[rank + 1 :]))


def breaks(scheduled: ScheduledPlan, kind: type[PlanError]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        verify_schedule(scheduled)
    assert type(caught.value) is kind, caught.value
    assert f"rank {caught.value.rank}, task {caught.value.task}" in str(caught.value)
    assert "<< ERROR" in caught.value.__notes__[0]
    return caught.value


def reached(plan: Plan, task: int, rank: int) -> set[int]:
    """Other ranks that a rank sends to in a task."""
    return {leg.dst.rank for leg in legs_of(plan.tasks[task]) if leg.src.rank == rank} - {rank}


def bare(transfers: list[tuple[int, int]], cp: int = 3) -> Plan:
    """A plan of nothing but unrelated transfers, each of another chunk of k."""
    sharding = contiguous(29, 7)
    problem = replace(PROBLEM, cp=cp)
    pieces = [Piece(Tensor.K, (chunk,), 7) for chunk in range(len(transfers))]
    return Plan(
        problem=problem,
        strategy="bare",
        direction=Direction.FORWARD,
        q_chunks=sharding.chunks,
        kv_chunks=sharding.chunks,
        initial=tuple(
            Resident(Place(src), piece) for (src, _), piece in zip(transfers, pieces, strict=True)
        ),
        tasks=tuple(
            Transfer(Leg(Place(src), Place(dst), (piece,)))
            for (src, dst), piece in zip(transfers, pieces, strict=True)
        ),
        outputs=(),
    )


@every_plan
def test_the_plans_own_order_runs_and_names_every_task_at_every_rank(plan: Plan) -> None:
    scheduled = in_plan_order(plan)
    verify_schedule(scheduled)

    for index, task in enumerate(plan.tasks):
        ranks = tuple(rank for rank, order in enumerate(scheduled.order) if index in order)
        assert ranks_of(task) == ranks


@every_plan
def test_a_schedule_comes_back_from_json(plan: Plan) -> None:
    scheduled = in_plan_order(plan)
    back = schedule_from_json(schedule_to_json(scheduled))

    assert scheduled == back
    assert schedule_to_json(scheduled) == schedule_to_json(back)
    with pytest.raises(ValueError, match="schema"):
        schedule_from_json('{"schema": 2}')


@every_plan
def test_a_task_missing_twice_or_at_a_foreign_rank_does_not_fit(plan: Plan) -> None:
    scheduled = in_plan_order(plan)
    for rank, order in enumerate(scheduled.order):
        foreign = next((t for t, task in enumerate(plan.tasks) if rank not in ranks_of(task)), None)
        wrong = [order[:-1], (*order, order[0])]
        wrong += [] if foreign is None else [(*order, foreign)]
        for new in wrong:
            error = breaks(replaced(scheduled, rank, new), MisfitError)
            assert error.rank == rank


def test_there_is_one_order_per_rank() -> None:
    scheduled = in_plan_order(bare([(0, 1)]))
    with pytest.raises(MisfitError, match="2 orders for 3 ranks"):
        verify_schedule(replace(scheduled, order=scheduled.order[:2]))


@every_plan
def test_a_rank_that_does_not_wait_is_unordered(plan: Plan) -> None:
    scheduled = in_plan_order(plan)
    tried = 0
    for index, task in enumerate(plan.tasks):
        for edge in task.after:
            for rank in set(ranks_of(task)) & set(ranks_of(plan.tasks[edge])):
                error = breaks(swapped(scheduled, rank, edge, index), UnorderedError)
                assert error.rank == rank
                tried += 1
    assert tried


@every_plan
def test_crossing_two_sends_breaks_the_order(plan: Plan) -> None:
    scheduled = in_plan_order(plan)
    tried = 0
    for rank in range(plan.problem.cp):
        order = scheduled.order[rank]
        sends = [task for task in order if reached(plan, task, rank)]
        for first, second in pairwise(sends):
            common = reached(plan, first, rank) & reached(plan, second, rank)
            at, to = order.index(first), order.index(second)
            if not common or set(order[at:to]) & set(plan.tasks[second].after):
                continue
            early = (*order[:at], second, *(t for t in order[at:] if t != second))
            error = breaks(replaced(scheduled, rank, early), OrderError)
            assert error.task in (first, second)
            tried += 1
    name = plan.strategy
    assert tried or name not in ("ulysses", "usp")


def test_two_ranks_that_send_first_what_the_other_wants_last_do_not_cross() -> None:
    """Opposite directions are free of each other's order, until they make a cycle."""
    scheduled = in_plan_order(bare([(0, 1), (1, 0), (0, 1)]))
    verify_schedule(scheduled)
    error = breaks(swapped(scheduled, 0, 0, 2), OrderError)
    assert error.rank == 1
    assert "rank 0 sends task 2 where rank 1 receives task 0" in str(error)
    error = breaks(swapped(scheduled, 0, 0, 1), CycleError)
    assert error.task == 0


def test_a_cycle_through_three_ranks_is_found_and_told() -> None:
    scheduled = in_plan_order(bare([(0, 1), (1, 2), (2, 0)]))
    verify_schedule(scheduled)
    circle = replace(scheduled, order=((0, 2), (1, 0), (2, 1)))
    error = breaks(circle, CycleError)
    assert "task 0 waits for task 1 waits for task 2 waits for task 0" in str(error)


def test_a_cycle_through_an_edge_is_found() -> None:
    plan = bare([(0, 1), (2, 1)])
    waiting = replace(plan, tasks=(plan.tasks[0], replace(plan.tasks[1], after=(0,))))
    scheduled = in_plan_order(waiting)
    verify_schedule(scheduled)
    breaks(swapped(scheduled, 1, 0, 1), UnorderedError)
    apart = bare([(0, 1), (2, 1), (0, 2)])
    tasks = (apart.tasks[0], apart.tasks[1], replace(apart.tasks[2], after=(1,)))
    scheduled = in_plan_order(replace(apart, tasks=tasks))
    verify_schedule(scheduled)
    crossed = replace(scheduled, order=((2, 0), (0, 1), (1, 2)))
    breaks(crossed, CycleError)
