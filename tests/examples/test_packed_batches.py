"""The example: a new packing every step, over ranks, loses what one process does."""

import pytest
import torch

from examples import packed_batches
from examples.packed_batches import LIMIT, STRATEGIES, Trained, train
from harness.attention import context_parallel, documents_of
from tests.support import ranks


def as_one_document(strategy: str) -> Trained:
    """Train with tokens that see those of other documents."""
    original = packed_batches.documents_of

    def one(**asked: int) -> object:
        return original(lengths=[asked["seqlen"]])

    packed_batches.documents_of = one  # type: ignore[assignment]  # what a mistake would pass
    try:
        return train(strategy, 2)
    finally:
        packed_batches.documents_of = original


def test_it_learns_and_packings_differ() -> None:
    alone = train(None, 20)
    assert alone.losses[-1] < alone.losses[0] - 0.3
    assert len({batch.lengths for batch in packed_batches.batches(6)}) == 6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_lose_what_one_does_and_by_the_same_gradients(strategy: str) -> None:
    alone = train(None, 4)
    for trained in ranks(2).run(train, strategy, 4):
        assert trained.off(alone) <= LIMIT


def test_documents_that_see_one_another_are_seen_in_the_losses() -> None:
    alone = train(None, 2)
    for trained in ranks(2).run(as_one_document, "zigzag"):
        assert trained.off(alone) > 1e-3


def test_a_process_alone_is_one_rank() -> None:
    assert train("dynamic", 2).off(train(None, 2)) <= LIMIT
    assert all(each.dtype is torch.float64 for each in train(None, 1).gradients)


def test_the_next_pattern_has_the_same_lengths() -> None:
    cp = context_parallel(seqlen=53, heads_q=6, heads_kv=2, strategy="dynamic")
    with pytest.raises(ValueError, match=r"is 54 x 54 tokens, which must equal seqlen \(53\)"):
        cp.for_pattern(documents_of(lengths=[50, 4]))
    with pytest.raises(ValueError, match=r"lengths sum to 52, which must equal .* \(53\)"):
        cp.for_pattern("documents:lengths=50+2")
