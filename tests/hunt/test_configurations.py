"""Random configurations beside a reference from scratch, few; a script in `scripts` runs more.

Each seed is another draw, so that what CI judges is fixed.
"""

from random import Random

import numpy as np
import pytest
import torch

from patterns import make_pattern
from tests.hunt import rendezvous
from tests.hunt.configurations import Verdict, hunt_configurations
from tests.hunt.definitions import self_attention


@pytest.mark.parametrize("synchronous", [False, True])
def test_random_configurations_are_right_or_refused(synchronous: bool) -> None:
    tally = hunt_configurations(70, seed=7, synchronous=synchronous)
    assert not tally.faults, tally.faults[0]
    assert tally.verdicts[Verdict.RIGHT] >= 50


def test_a_pattern_is_what_its_definition_says_position_by_position() -> None:
    draw = Random(3)
    for _ in range(120):
        seqlen = draw.randint(2, 41)
        drawn = self_attention(draw, seqlen)
        at = np.arange(seqlen)
        mask = make_pattern(drawn.text, seqlen).allowed(at, at)
        assert np.array_equal(mask, drawn.dense(seqlen, seqlen)), drawn.text


def test_a_plan_that_waits_for_its_own_message_first_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks that each send, wait, and only then receive: buffered sends would let it pass."""
    monkeypatch.setattr(rendezvous, "STUCK_S", 0.2)
    meeting = rendezvous.Meeting()
    one = rendezvous.SynchronousTransport(0, meeting)
    handle = one.send(torch.ones(3), 0, 1, tag=5)
    with pytest.raises(rendezvous.StuckError, match="message 5"):
        handle.wait()
