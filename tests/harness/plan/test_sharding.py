"""Shardings: every token has one owner, and local order follows from the chunks."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.plan.sharding import Sharding, contiguous, split, stripe, subdivided, zigzag

HOW = (contiguous, zigzag, stripe)
every_sharding = pytest.mark.parametrize("how", HOW)


def check(sharding: Sharding, seqlen: int, cp: int) -> None:
    """Positions of all ranks are the sequence, once; owner() and tokens() agree with them."""
    assert cp == len(sharding.owned)
    everything = [p for rank in range(cp) for p in sharding.positions(rank)]
    assert list(range(seqlen)) == sorted(everything)
    owner = sharding.owner()
    assert set(range(len(sharding.chunks))) == set(owner)
    for rank in range(cp):
        assert len(sharding.positions(rank)) == sharding.tokens(rank)
        assert all(owner[chunk] == rank for chunk in sharding.owned[rank])


def shard(sequence: list[int], sharding: Sharding, rank: int) -> list[int]:
    return [sequence[p] for p in sharding.positions(rank)]


@every_sharding
@given(st.integers(1, 60), st.integers(1, 9))
def test_every_token_has_one_owner(
    how: Callable[[int, int], Sharding], seqlen: int, cp: int
) -> None:
    check(how(seqlen, cp), seqlen, cp)


@every_sharding
@given(st.integers(1, 60), st.integers(1, 9))
def test_positions_undo_the_sharding(
    how: Callable[[int, int], Sharding], seqlen: int, cp: int
) -> None:
    sharding = how(seqlen, cp)
    sequence = [7 * p + 3 for p in range(seqlen)]
    restored = [0] * seqlen
    for rank in range(cp):
        for position, value in zip(
            sharding.positions(rank), shard(sequence, sharding, rank), strict=True
        ):
            restored[position] = value

    assert sequence == restored


@given(st.integers(1, 60), st.integers(1, 9))
def test_parts_differ_by_at_most_one_token(seqlen: int, parts: int) -> None:
    lengths = [len(part) for part in split(seqlen, parts)]
    assert max(lengths) - min(lengths) <= 1
    assert [p for part in split(seqlen, parts) for p in part] == list(range(seqlen))


def test_the_placements_are_the_published_ones() -> None:
    assert [contiguous(10, 3).positions(rank) for rank in range(3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8, 9],
    ]
    assert [zigzag(12, 3).positions(rank) for rank in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert [stripe(11, 3).positions(rank) for rank in range(3)] == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8],
    ]
    assert tuple(owner for _, owner in sorted(zigzag(11, 3).owner().items())) == (0, 1, 2, 2, 1, 0)


def test_a_stripe_longer_than_the_sequence_leaves_ranks_empty() -> None:
    assert [stripe(2, 4).positions(rank) for rank in range(4)] == [[0], [1], [], []]


@every_sharding
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 4))
def test_a_subdivision_restores_the_coarse_chunks_in_order(
    how: Callable[[int, int], Sharding], seqlen: int, cp: int, parts: int
) -> None:
    coarse = how(seqlen, cp)
    fine = subdivided(coarse, parts)
    check(fine, seqlen, cp * parts)
    for rank in range(cp):
        group = range(rank * parts, (rank + 1) * parts)
        chunks = sorted(chunk for member in group for chunk in fine.owned[member])
        gathered = [p for chunk in chunks for p in fine.chunks[chunk]]
        assert coarse.positions(rank) == gathered


def test_a_subdivision_gives_the_first_part_to_the_first_rank() -> None:
    fine = subdivided(zigzag(16, 2), 2)
    assert [fine.positions(rank) for rank in range(4)] == [
        [0, 1, 12, 13],
        [2, 3, 14, 15],
        [4, 5, 8, 9],
        [6, 7, 10, 11],
    ]
