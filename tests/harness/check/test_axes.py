"""The grids of a check: every pair of values meets, and the whole product is streamed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, islice, product
from itertools import pairwise as neighbours

import pytest

from harness.check.axes import (
    GRID_PATTERNS,
    LAYER_CPS,
    LAYER_HEADS,
    Axes,
    pairwise,
    size,
    spelled_pattern,
    whole_product,
)
from harness.check.pairwise import covering
from harness.plan.problem import Dtype
from harness.plan.tasks import Scope
from patterns import make_pattern
from strategies import strategy as named

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


def test_every_legal_stage_of_heads_is_in_the_default_grid_of_layers() -> None:
    """Legal by counting: the ranks divide U, and U the heads."""
    cells = list(pairwise(Axes.of(Scope.LAYER)))
    assert len(cells) == len(set(cells))
    met = {
        (c.cp, c.heads_q, c.heads_kv, named(c.strategy).options.stage_heads or c.cp)
        for c in cells
        if c.strategy.split(":")[0] == "upipe" and "ring" not in c.strategy
    }
    wanted = {
        (cp, *heads, u)
        for cp in LAYER_CPS
        for heads in LAYER_HEADS
        for u in range(cp, heads[0] + 1, cp)
        if heads[0] % u == 0
    }
    assert len(wanted) == 124
    assert wanted - met == set()


def test_a_covering_of_layers_has_every_pair_that_is_legal() -> None:
    """Of a strategy in stages with a degree or heads, those that are legal; of the rest, all."""
    axes = Axes.of(Scope.LAYER)
    rows = [
        (
            *(c.strategy, c.pattern.split(":")[0], c.cp, c.dtype, (c.heads_q, c.heads_kv)),
            *(c.batch, c.seqlen_q, c.head_dim, c.rotary),
        )
        for c in pairwise(axes)
    ]
    legal = {
        (text, cp, heads)
        for text, cp, heads in product(axes.strategies, axes.cps, axes.heads)
        if not text.startswith("upipe") or fits(text, cp, heads)
    }
    for (i, first), (j, second) in combinations(enumerate(axes.values()[:9]), 2):
        met = {(row[i], row[j]) for row in rows}
        wanted = set(product(first, second))
        if (i, j) in ((0, 2), (0, 4)):
            wanted = {(row[0], row[j // 2]) for row in legal}
        assert met == wanted, (i, j)
    staged = {row for row in legal if row[0].startswith("upipe")}
    assert staged == {(row[0], row[2], row[4]) for row in rows if row[0].startswith("upipe")}


def fits(text: str, cp: int, heads: tuple[int, int]) -> bool:
    """By counting: groups of a ring share each stage, and stages share the heads."""
    options = named(text).options
    ranks, odd = divmod(cp, options.ring or 1)
    u = options.stage_heads or ranks
    if odd or u % ranks or heads[0] % ranks:
        return False
    return u <= heads[0] if options.short_last else heads[0] % u == 0


def test_what_cannot_meet_does_not_and_the_rest_does() -> None:
    """The library alone leaves some out: it ends at the first row that brings nothing new."""
    axes = [range(5), "abcd", (False, True, None)]

    def rule(row: Sequence[object]) -> bool:
        return len(row) < 2 or (row[0], row[1]) not in {(0, "a"), (3, "c"), (3, "d")}

    rows = list(covering(axes, rule, seed=0, also=[((0, 1), (1, "b"), (2, None))]))
    assert (1, "b", None) in rows
    for i, j in combinations(range(3), 2):
        met = {(row[i], row[j]) for row in rows}
        assert met == {pair for pair in product(axes[i], axes[j]) if j == 2 or rule(pair)}


def test_the_default_grid_is_large_enough_and_the_same_every_time() -> None:
    cells = list(pairwise(Axes()))
    assert 2 * len(cells) >= 500
    assert cells == list(pairwise(Axes()))


def test_the_whole_product_has_the_size_that_is_said_and_no_cell_twice() -> None:
    cells = list(whole_product(SMALL))
    assert len(cells) == len(set(cells)) == size(SMALL)


def test_values_given_twice_count_once() -> None:
    twice = Axes(**{**vars_of(SMALL), "cps": (2, 7, 2)})
    assert list(whole_product(twice)) == list(whole_product(SMALL))


def vars_of(axes: Axes) -> dict[str, object]:
    return {name: getattr(axes, name) for name in axes.__dataclass_fields__}


def test_cells_of_one_problem_stand_together_in_the_whole_product() -> None:
    problems = [replace(config, strategy="", cp=1) for config in whole_product(SMALL)]
    changes = sum(a != b for a, b in neighbours(problems))
    assert changes == len(set(problems)) - 1


def test_the_whole_product_is_not_held_in_memory() -> None:
    first = list(
        islice(whole_product(Axes()), 3)
    )  # at once, though there are hundreds of thousands
    assert len(first) == 3
    assert size(Axes()) > 10**5


@pytest.mark.parametrize("pattern", GRID_PATTERNS)
@pytest.mark.parametrize("seqlen", [1, 5, 64, 97, 1020])
def test_every_pattern_can_be_spelled_for_every_length(pattern: str, seqlen: int) -> None:
    text, seqlen_kv = spelled_pattern(pattern, seqlen)
    made = make_pattern(text, seqlen, seqlen_kv, cross=seqlen != seqlen_kv)
    assert (made.seqlen_q, made.seqlen_kv) == (seqlen, seqlen_kv)


def test_ulysses_gets_a_head_for_every_rank() -> None:
    for config in pairwise(Axes(strategies=("ulysses",))):
        assert config.heads_q >= config.cp
    assert {c.dtype for c in pairwise(SMALL)} == set(Dtype) - {Dtype.FLOAT16}
