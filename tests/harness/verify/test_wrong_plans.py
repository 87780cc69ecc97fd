"""Wrong plans that were proved once, or that ended in a crash: each is refused by its rule."""

from pathlib import Path

import pytest

from harness.errors import MisfitError, PlanError
from harness.plan.reader import from_json
from harness.verify.proof import verify

FOLDER = Path(__file__).parents[2] / "fixtures" / "wrong_plans"
EXIST = "the chunks of a piece are some of the plan's, each once"
BESIDE = "a partial output and its lse stay side by side, out first"
SOME = "a task has at least one piece to work on"
RULES = {
    "chunk-99": EXIST,
    "collective-without-legs": "a collective has at least one leg",
    "finish-of-q": "a finish turns partial results into results",
    "finish-on-a-host": "a device computes; the host only stores",
    "free-chunk-twice": EXIST,
    "heads-come-home-in-other-orders": BESIDE,
    "key-chunk-99": EXIST,
    "layer-problem-attention-plan": "a plan does a layer if its problem is a layer",
    "linear-of-nothing": "a product is one of LINEAR_FORMS",
    "merge-lse-before-out": BESIDE,
    "merge-of-no-chunks": EXIST,
    "merge-of-nothing": SOME,
    "merge-out1-lse2-out2-lse1": BESIDE,
    "out-travels-with-another-lse": BESIDE,
    "out-whole-lse-in-parts": BESIDE,
    "overlapping-heads-in-a-collective": "pieces that arrive together join",
    "recomputed-key-chunk-twice": EXIST,
    "tile-of-nothing": "a tile reads and writes what its kernel does, in order",
    "transfer-of-no-chunks": EXIST,
    "weight-gradient-chunk-twice": EXIST,
}


def test_every_wrong_plan_is_listed() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == RULES.keys() | {"no-dtype"}


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_plan_is_refused_by_its_rule(name: str) -> None:
    plan = from_json((FOLDER / f"{name}.json").read_text())
    with pytest.raises(PlanError) as caught:
        verify(plan)
    assert type(caught.value) is MisfitError
    assert caught.value.rule == RULES[name]
    assert plan.strategy in caught.value.__notes__[0]  # the grid can be drawn all the same


def test_a_plan_without_a_dtype_has_the_usual_one() -> None:
    plan = from_json((FOLDER / "no-dtype.json").read_text())
    assert plan.problem.dtype == "float32"
    verify(plan)
