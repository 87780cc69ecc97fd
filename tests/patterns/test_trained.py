"""Patterns that models are trained with: masks by hand, and packs drawn from distributions."""

from math import log

import numpy as np
import pytest

from patterns import make_pattern
from patterns.lengths import PRESETS, drawn

MASKS = {
    "prefix_lm:length=2": "11... 11... 111.. 1111. 11111",
    "lambda:sink=1,left=1": "1.... 11... 111.. 1.11. 1..11",
    "documents:lengths=3+2,window=1": "1.... 11... .11.. ...1. ...11",
    "documents:lengths=3+2,mask=full,window=1": "11... 111.. .11.. ...11 ...11",
    "varlen_block_causal:lengths=3+2,block=2": "11... 11... 111.. ...11 ...11",
    "causal_blockwise:block=1,local=1": "1.... 11... 111.. 1.11. 11111",
    "causal_blockwise:block=2,local=0": "1.... 11... 111.. 11.1. 11111",
    "shared_question:answers=2,percent=20": "1.... 11... 111.. 1..1. 1..11",
    "random_topk:block=2,topk=3": "1.... 11... 111.. 1111. 11111",
}


@pytest.mark.parametrize("text", MASKS)
def test_a_small_mask_is_the_one_drawn_by_hand(text: str) -> None:
    rows = make_pattern(text, 5).allowed(np.arange(5), np.arange(5))
    assert MASKS[text] == " ".join("".join(".1"[cell] for cell in row) for row in rows.astype(int))


def test_selection_takes_its_number_of_blocks_and_the_own_one() -> None:
    pattern = make_pattern("random_topk:block=4,topk=3,seed=1", 50)
    mask = pattern.allowed(np.arange(50), np.arange(50))
    for row in range(13):
        queries = mask[row * 4 : row * 4 + 4]
        met = {block for block in range(13) if queries[:, block * 4 : block * 4 + 4].any()}
        assert row in met
        assert len(met) == min(3, row + 1)
    other = make_pattern("random_topk:block=4,topk=3,seed=2", 50)
    assert pattern.content != other.content


def test_selection_of_too_many_blocks_is_refused_with_a_block_that_is_not() -> None:
    with pytest.raises(ValueError, match=r"block \(2\) makes 5000 blocks .*; try block=3"):
        make_pattern("random_topk:block=2", 10_000)
    make_pattern("random_topk:block=3,topk=2", 10_000)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_pack_fills_the_sequence_and_depends_on_the_seed_alone(preset: str) -> None:
    pack = drawn(preset, 5, 1_000_003)
    assert sum(pack) == 1_000_003
    assert min(pack) >= 1
    assert pack == drawn(preset, 5, 1_000_003) != drawn(preset, 6, 1_000_003)
    assert pack[:2] == drawn(preset, 5, 2_000_003)[:2]


def test_a_pack_is_the_same_in_every_release() -> None:
    assert drawn("megatron", 1, 4000) == [128, 1548, 977, 128, 327, 275, 596, 21]
    assert drawn("pile_web", 1, 4000) == [188, 2446, 1366]


@pytest.mark.parametrize(("preset", "mean"), [("pile", 1775), ("pile_wikipedia", 333)])
def test_the_mean_of_many_documents_is_the_published_one(preset: str, mean: int) -> None:
    """KiB x 1024 x 0.29335 tokens a byte, by hand; 10,000 draws lie within 4 in 100 of it."""
    pack = drawn(preset, 3, mean * 10_000)
    assert sum(pack) / len(pack) == pytest.approx(mean, rel=0.04)


def test_the_median_of_many_lognormal_documents_is_that_of_the_formula() -> None:
    """The median is mean / exp(sigma ** 2 / 2)."""
    pack = drawn("megatron", 3, 10_000_000)
    assert log(np.median(pack)) == pytest.approx(log(1024) - 1.5**2 / 2, abs=0.05)
    assert (min(pack[:-1]), max(pack)) == (128, 8192)  # the last one is cut
