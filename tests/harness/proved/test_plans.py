from dataclasses import replace

import pytest

from harness.errors import AbsentPieceError, PlanError, UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import zigzag
from harness.planning.chosen import Chosen
from harness.planning.options import NoOptions
from harness.planning.strategy import Context, Strategy
from harness.prepare.verified_plans import planned
from harness.proved.plans import proved, proved_once
from strategies import strategy
from tests.support import problem

P = problem("causal", 29, (6, 2), cp=3)


def forgetful(name: str) -> Chosen:
    """A strategy that saves no keys, but starts its backward from them."""
    honest = strategy(name)

    def plan(p: Problem, way: Direction, _: NoOptions, context: Context, __: str) -> Plan:
        made = honest.plan(p, way, context)
        return replace(made, saved=tuple(r for r in made.saved if r.piece.tensor.value != "k"))

    text, none = f"forgetful {name}", NoOptions()
    return Chosen(Strategy(name=text, summary="", paper="", plan=plan, defaults=none), none)


@pytest.mark.parametrize("name", ["ring", "zigzag", "ulysses"])
def test_a_backward_plan_must_start_from_what_its_forward_plan_saves(name: str) -> None:
    chosen = forgetful(name)
    proved_once(chosen, P, Direction.FORWARD)
    with pytest.raises(AbsentPieceError, match="is read on device"):
        proved_once(chosen, P, Direction.BACKWARD)


def test_a_plan_is_made_once() -> None:
    both = planned(P, "zigzag")
    assert planned(P, "zigzag").backward is both.backward
    assert proved_once(strategy("zigzag"), P, Direction.FORWARD) is both.forward
    assert proved(strategy("zigzag"), P, Direction.FORWARD) is not both.forward


def test_a_plan_for_other_owners_is_refused() -> None:
    own, other = zigzag(29, 3), zigzag(29, 6)
    proved(strategy("zigzag"), P, Direction.FORWARD, owners=(own, own))
    with pytest.raises(PlanError, match="match the sharding of the inputs"):
        proved(strategy("zigzag"), P, Direction.FORWARD, owners=(own, other))
    turned = replace(own, owned=own.owned[::-1])
    with pytest.raises(PlanError, match="another's rank"):
        proved(strategy("zigzag"), P, Direction.FORWARD, owners=(turned, turned))


def test_what_a_strategy_cannot_do_is_not_remembered() -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError):
            proved_once(strategy("ulysses"), replace(P, cp=8), Direction.FORWARD)
