"""Whose plans are taken, and which go together."""

import pytest

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from strategies import strategy
from strategies.ultraattn.fallbacks import fit, or_others
from strategies.ultraattn.finish import ReportedPlan
from strategies.ultraattn.selection import fair, is_fair
from tests.harness.numeric import wrong
from tests.support import problem

F, B = Direction


def planned(name: str, p: Problem, direction: Direction) -> Plan:
    return strategy(name).plan(p, direction)


def taken(times: dict[str, tuple[float, float]], own: str = "owner:placement=zigzag") -> list[str]:
    """The strategies of the plans taken, where plans last so long; 9 s where nothing is said."""
    p = problem("causal", 83, cp=2)

    def others(name: str, asked: Problem, direction: Direction) -> Plan:
        assert asked == p
        if name not in times:
            raise UnsupportedError("not here", ())
        return planned(name, p, direction)

    def seconds(plan: Plan) -> float:
        name = "ultraattn" if plan.strategy == own else plan.strategy
        return times.get(name, (9.0, 9.0))[plan.direction is B]

    mine = {d: ReportedPlan(plan=planned(own, p, d), report={"levels": 5}) for d in Direction}
    found = or_others(p, mine, ("ring", "zigzag", "stripe", "owner"), others, seconds)
    for each in found.values():
        name = each.report["fallback"] or "ultraattn"
        assert each.report["candidates_s"][name] == seconds(each.plan)
        assert ("levels" in each.report) == (name == "ultraattn")
    assert fit(found[F].plan, found[B].plan)
    return [found[d].report["fallback"] or "own" for d in (F, B)]


def test_the_fastest_in_all_is_taken_that_no_ring_beats_in_either_direction() -> None:
    assert taken({"ultraattn": (1.0, 3.0), "zigzag": (1.1, 3.1)}) == ["own", "own"]
    assert taken({"ultraattn": (1.0, 3.0), "zigzag": (0.9, 2.9)}) == ["zigzag", "zigzag"]
    # 2 % slower forward is not made up for by a faster backward
    assert taken({"ultraattn": (1.02, 2.0), "stripe": (1.0, 3.0)}) == ["stripe", "stripe"]
    assert taken({"ultraattn": (1.005, 2.0), "stripe": (1.0, 3.0)}) == ["own", "own"]
    # no pair keeps up with both rings: the one that is the least slower in its worse direction
    assert taken({"ultraattn": (1.1, 1.1), "ring": (1.0, 2.0), "stripe": (2.0, 1.0)}) == [
        "own",
        "own",
    ]


def test_directions_of_two_strategies_are_taken_where_tokens_lie_alike() -> None:
    assert taken({"ring": (1.0, 3.0), "owner": (2.0, 2.0)}) == ["ring", "owner"]
    # a zigzag's backward needs a zigzag's forward, and that may be the planner's own
    assert taken({"ring": (1.0, 9.0), "zigzag": (3.0, 1.0), "ultraattn": (2.0, 2.0)}) == [
        "own",
        "zigzag",
    ]


@pytest.mark.parametrize("backward", ["owner", "ring", "grid:rows=2", "stripe"])
def test_plans_that_fit_run_one_after_the_other(backward: str) -> None:
    p = problem("causal", 83, cp=4)
    forward, after = planned("ring", p, F), planned(backward, p, B)
    assert fit(forward, after) == (backward != "stripe")
    if backward != "stripe":
        assert not wrong(forward, after)


def test_fair_is_what_is_close_in_both_directions_or_else_the_nearest() -> None:
    simple = {F: 1.0, B: 2.0}
    pairs = [{F: 1.02, B: 1.0}, {F: 1.01, B: 2.02}, {F: 0.5, B: 2.03}]
    assert fair(pairs, simple) == [1]
    assert [is_fair(each, simple) for each in pairs] == [False, True, False]
    assert fair([pairs[0], {F: 1.0, B: 2.2}], simple) == [0]
    assert fair([{F: 0.0, B: 0.0}], {F: 0.0, B: 0.0}) == [0]
