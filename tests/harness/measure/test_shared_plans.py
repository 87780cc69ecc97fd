"""Rank 0's plan is every rank's: others never plan, so searching planners need no shared folder."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.errors import UnsupportedError
from harness.measure import shared_plans
from harness.measure.cell import RankSample, Refusal, program_of_cell, rank_job
from harness.ranks.team import Member, Team, WorkerError
from harness.records.config import Config
from tests.harness.measure.test_cells import CELL

SOON_S = 60.0


def other_plans(member: Member, config: Config, fails: str) -> RankSample | Refusal:
    """Measure a cell where only rank 0 can plan, or where rank 0 fails."""
    plan = shared_plans.planned_for

    def alone(config: Config) -> object:
        if member.rank != 0:
            raise AssertionError("rank 0 alone plans")
        match fails:
            case "":
                return plan(config)
            case "refused":
                raise UnsupportedError("too few heads")
            case _:
                raise ZeroDivisionError("no bandwidth")

    shared_plans.planned_for = alone  # type: ignore[assignment]
    try:
        return rank_job(member, config, 1, 2)
    finally:
        shared_plans.planned_for = plan


@pytest.fixture
def team() -> Iterator[Team]:
    with Team(3) as ours:
        yield ours


def test_all_ranks_run_the_plan_that_rank_0_made(team: Team) -> None:
    config = replace(CELL, cp=3, strategy="ultraattn:seconds=0.2")
    first, *others = team.run(other_plans, SOON_S, config, "")
    assert isinstance(first, RankSample)
    assert all(isinstance(rank, RankSample) and rank.plans == "" for rank in others)
    assert program_of_cell(config, first).plan.problem.cp == 3


def test_what_rank_0_refuses_all_refuse_and_its_failure_is_told_by_all(team: Team) -> None:
    config = replace(CELL, cp=3)
    assert team.run(other_plans, SOON_S, config, "refused") == [Refusal("too few heads")] * 3
    with pytest.raises(WorkerError, match="ZeroDivisionError: no bandwidth"):
        team.run(other_plans, SOON_S, config, "broken")
