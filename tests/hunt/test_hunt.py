"""The verifier against thousands of changed plans; `scripts/hunt_plans.py` runs many more."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from harness.plan.reader import from_json
from harness.verify.proof import verify
from tests.hunt.campaign import Outcome, bases, hunt, off
from tests.hunt.provenance import verdict

FOLDER = Path(__file__).parents[1] / "fixtures" / "wrong_plans"
MEANT_RIGHT = ("no-dtype", "heads-come-home-in-other-orders", "out-whole-lse-in-parts")
"""Nothing is lost in these, but the last two part an output from its lse on the way home."""
ENOUGH = 400
"""Changed plans that are accepted and so must have run, of 2,000."""


def test_changed_plans_are_refused_by_a_rule_or_run_and_are_right() -> None:
    tally = hunt(2000, seed=3, kinds=60, both=False)
    assert not tally.faults, tally.faults[0]
    assert tally.outcomes[Outcome.RIGHT] >= ENOUGH
    assert len(tally.rules) > 25  # most rules of the verifier


def test_plans_of_strategies_are_right_by_both_proofs() -> None:
    for plan in islice(bases(Random(8)), 20):
        assert not verdict(plan)
        assert not off(verify(plan))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_second_proof_sees_what_is_wrong_with_a_plan(path: Path) -> None:
    assert bool(verdict(from_json(path.read_text()))) is (path.stem not in MEANT_RIGHT)
