"""The one list of candidates: what a comparison of strategies on some ranks is made of."""

import pytest

from harness.errors import UnsupportedError
from harness.plan.problem import Direction
from harness.prepare.planner_context import context_for
from harness.records.config import Where
from harness.sweep.suite import Mode, Part
from strategies import DIRECT, EVERY_STRATEGY, STRATEGIES, comparable, strategy
from tests.support import problem


@pytest.mark.parametrize("cp", [1, 2, 7, 8, 12])
def test_every_strategy_is_there_with_its_options_and_meshes_once(cp: int) -> None:
    names = comparable(cp, EVERY_STRATEGY)
    inner = [u for u in range(2, cp) if cp % u == 0]

    assert names[: len(EVERY_STRATEGY)] == tuple(EVERY_STRATEGY)
    assert {name for name in names if name.startswith("usp:") and "=" not in name} == {
        f"usp:{u}x{cp // u}" for u in inner
    }
    assert {name for name in names if name.startswith("double_ring:inner")} == {
        f"double_ring:inner={u}" for u in inner
    }
    assert "usp:ring_inside=true" in names
    assert "allgather:placement=zigzag" in names
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("cp", [4, 6])
def test_each_candidate_is_a_plan_or_refused_with_a_reason(cp: int) -> None:
    p = problem("causal", 83, cp=cp)
    planned = 0
    for name in comparable(cp, {name: STRATEGIES[name] for name in DIRECT if name in STRATEGIES}):
        try:
            plan = strategy(name).plan(p, Direction.FORWARD)
        except UnsupportedError:
            continue
        planned += 1
        assert plan.problem == p
    assert planned >= len(DIRECT) - 2


def test_searches_and_sweeps_have_the_same_candidates() -> None:
    context = context_for(Where.LOCAL)
    assert context is not None
    cells = Part(mode=Mode.SIMULATE, cp=(4, 8)).cells()
    swept: dict[int, list[str]] = {cp: [] for cp in (4, 8)}
    for cell in cells:
        if cell.direction is Direction.FORWARD:
            swept[cell.cp].append(cell.strategy)

    for cp, names in swept.items():
        searched = [strategy(name).text for name in context.rivals(cp)]
        assert [name for name in names if name.partition(":")[0] in DIRECT] == searched
        assert {"allgather:placement=zigzag", f"usp:2x{cp // 2}"} <= set(names)
