"""Allocations: what they refuse, and what each rank is given."""

import pytest

from harness.plan.sharding import Sharding
from harness.planning.block_assignment import Allocation

QUERIES = Sharding((range(3), range(3, 5)), ((1,), (), (0,)))
KEYS = Sharding((range(2), range(2, 3), range(3, 7)), ((0, 2), (1,), ()))
CELLS = ((2, None, 0), (None, 2, 2))


def test_each_rank_gets_its_blocks_row_by_row_and_all_get_all() -> None:
    allocation = Allocation(queries=QUERIES, keys=KEYS, cells=CELLS)
    assert [allocation.blocks_of(rank) for rank in range(3)] == [
        [(0, 2)],
        [],
        [(0, 0), (1, 1), (1, 2)],
    ]


@pytest.mark.parametrize(
    "cells",
    [
        CELLS[:1],  # a row too few
        (*CELLS, (0, 0, 0)),
        ((2, None), (None, 2)),  # a column too few
        ((2, None, 0), (None, 2)),  # ragged
    ],
)
def test_cells_must_be_query_chunks_by_key_chunks(
    cells: tuple[tuple[int | None, ...], ...],
) -> None:
    with pytest.raises(ValueError, match="must be 2 query chunks x 3 key chunks"):
        Allocation(queries=QUERIES, keys=KEYS, cells=cells)


@pytest.mark.parametrize("rank", [3, -1])
def test_cells_name_owners(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"ranks \[{rank}\].*among the 3 owners of queries"):
        Allocation(queries=QUERIES, keys=KEYS, cells=((rank, None, 0), (None, 2, 2)))


def test_queries_and_keys_have_as_many_owners() -> None:
    fewer = Sharding(KEYS.chunks, ((0, 2), (1,)))
    with pytest.raises(ValueError, match="the 2 owners of keys must be among the 3"):
        Allocation(queries=QUERIES, keys=fewer, cells=((0, None, 0), (None, 1, 1)))
