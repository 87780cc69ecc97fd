"""The grids of a check: every pair of values meets, and the whole product is streamed."""

from dataclasses import replace
from itertools import combinations, islice
from itertools import pairwise as neighbours

import pytest

from harness.grid import PATTERNS, Axes, pairwise, size, spelled, whole
from harness.problem import Dtype
from patterns import make_pattern

SMALL = Axes(
    strategies=("ring", "ulysses"), patterns=("causal", "full_cross"), cps=(2, 7), lengths=(5, 64)
)


def test_every_two_values_of_different_axes_meet_in_each_covering() -> None:
    axes = Axes()
    for coverings in (1, 2):
        cells = list(pairwise(axes, coverings))
        rows = [
            (c.strategy, c.cp, c.dtype, c.batch, c.seqlen_q, c.head_dim, c.heads_q // c.heads_kv)
            for c in cells
        ]
        groups = [q // kv for q, kv in axes.heads]
        values = [
            *(axes.strategies, axes.cps, axes.dtypes, axes.batches),
            *(axes.lengths, axes.head_dims, groups),
        ]
        for (i, first), (j, second) in combinations(enumerate(values), 2):
            met = {(row[i], row[j]) for row in rows}
            wanted = {(a, b) for a in first for b in second}
            assert wanted - met == set(), (i, j)
        assert len(set(cells)) == len(cells)


def test_the_default_grid_is_large_enough_and_the_same_every_time() -> None:
    cells = list(pairwise(Axes()))
    assert 2 * len(cells) >= 500
    assert cells == list(pairwise(Axes()))


def test_the_whole_product_has_the_size_that_is_said_and_no_cell_twice() -> None:
    cells = list(whole(SMALL))
    assert len(cells) == len(set(cells)) == size(SMALL)


def test_values_given_twice_count_once() -> None:
    twice = Axes(**{**vars_of(SMALL), "cps": (2, 7, 2)})
    assert list(whole(twice)) == list(whole(SMALL))


def vars_of(axes: Axes) -> dict[str, object]:
    return {name: getattr(axes, name) for name in axes.__dataclass_fields__}


def test_cells_of_one_problem_stand_together_in_the_whole_product() -> None:
    problems = [replace(config, strategy="", cp=1) for config in whole(SMALL)]
    changes = sum(a != b for a, b in neighbours(problems))
    assert changes == len(set(problems)) - 1


def test_the_whole_product_is_not_held_in_memory() -> None:
    first = list(islice(whole(Axes()), 3))  # at once, though there are hundreds of thousands
    assert len(first) == 3
    assert size(Axes()) > 10**5


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("seqlen", [1, 5, 64, 97, 1020])
def test_every_pattern_can_be_spelled_for_every_length(pattern: str, seqlen: int) -> None:
    text, seqlen_kv = spelled(pattern, seqlen)
    made = make_pattern(text, seqlen, seqlen_kv, cross=seqlen != seqlen_kv)
    assert (made.seqlen_q, made.seqlen_kv) == (seqlen, seqlen_kv)


def test_ulysses_gets_a_head_for_every_rank() -> None:
    for config in pairwise(Axes(strategies=("ulysses",))):
        assert config.heads_q >= config.cp
    assert {c.dtype for c in pairwise(SMALL)} == set(Dtype) - {Dtype.FLOAT16}
