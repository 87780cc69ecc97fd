"""Dynamic groups: what moves stays inside them, and every choice computes attention."""

import pytest

from harness.check.cell import check
from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import legs_of
from harness.planning.strategy import Context
from harness.records.check_record import Outcome
from harness.records.config import Config
from patterns import make_pattern
from strategies import strategy

PACK = "documents:lengths=31+2+11+1+8,window=19"
LENGTH = 53


def cell(text: str, cp: int) -> Config:
    return Config(
        strategy=text,
        pattern=PACK,
        cp=cp,
        seqlen_q=LENGTH,
        seqlen_kv=LENGTH,
        heads_q=6,
        heads_kv=2,
        head_dim=5,
        batch=2,
        dtype=Dtype.FLOAT64,
    )


def problem(pattern: str = PACK, cp: int = 5) -> Problem:
    return Problem(pattern=make_pattern(pattern, LENGTH), heads_q=6, heads_kv=2, head_dim=5, cp=cp)


@pytest.mark.parametrize("inner", ["allgather", "ring"])
@pytest.mark.parametrize("direction", Direction)
def test_what_moves_stays_inside_a_group(inner: str, direction: Direction) -> None:
    plan = strategy(f"dynamic:groups=3+1+1,inner={inner}").plan(problem(), direction)
    moved = {(leg.src.rank, leg.dst.rank) for task in plan.tasks for leg in legs_of(task)}

    assert {pair for pair in moved if pair[0] != pair[1]} <= {
        (a, b) for a in range(3) for b in range(3)
    }
    assert (0, 1) in moved


@pytest.mark.parametrize(
    ("text", "cp"),
    [
        ("dynamic:inner=ring", 4),
        ("dynamic:rule=megatron,most=7", 7),
        ("dynamic:groups=2+1,inner=ring", 3),
        ("dynamic:most=60", 2),
    ],
)
def test_every_choice_computes_attention(text: str, cp: int) -> None:
    for judged in check(cell(text, cp)):
        assert judged.status is Outcome.PASSED, judged.reason
        assert max(judged.max_rel_error.values()) <= 1e-12


def test_the_clock_of_the_planner_decides() -> None:
    """Who likes moves gets a plan with more of them than who dislikes them."""
    asked = strategy("dynamic:most=53")
    two = problem("documents:lengths=31+22", 2)

    def moves(plan: Plan) -> float:
        return float(sum(len(legs_of(task)) for task in plan.tasks))

    def fewer(plan: Plan) -> float:
        return -moves(plan)

    least, most = (
        asked.plan(two, Direction.FORWARD, Context(evaluate=clock)) for clock in (moves, fewer)
    )
    assert moves(least) < moves(most)


def test_one_document_is_shared_by_all_ranks_or_by_the_group_that_is_asked_for() -> None:
    for text, busy in (("dynamic", 5), ("dynamic:groups=3+2", 3)):
        plan = strategy(text).plan(problem("causal"), Direction.FORWARD)
        assert len({place.rank for place, _ in plan.outputs}) == busy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynamic:groups=1+1+1+1+1+1", r"groups \(1\+1.*\) must have the 5 ranks .* have 6; try"),
        ("dynamic:groups=4", r"must have the 5 ranks of cp together, and have 4; try groups=1\+1"),
        ("dynamic:groups=5,rule=megatron", r"groups \(5\) only apply to rule=predicted; try"),
        ("dynamic:most=9", r"most \(9\) must leave room on 5 ranks for 53 tokens.*; try most=22"),
        ("dynamic:most=2,rule=megatron", r"must let 5 ranks hold a document of 31 .*; try most=7"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        strategy(text).plan(problem(), Direction.FORWARD)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", ["0", "2+-1", "2++1", "x"])
def test_sizes_are_whole_numbers(sizes: str) -> None:
    with pytest.raises(ValueError, match=r"groups \(.*\): must be a whole number of at least 1"):
        strategy(f"dynamic:groups={sizes}")
