"""Which rank computes each block of a grid of query chunks x key chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.plan.sharding import Sharding

Cells = tuple[tuple[int | None, ...], ...]  # per query chunk, per key chunk: who, or nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Who owns the chunks and who computes the blocks.

    Attributes:
        queries: Query chunks and their owners.
        keys: Key chunks and their owners.
        cells: `cells[i][j]` computes query chunk i with key chunk j; None where nothing is
            allowed, so nobody does.
    """

    queries: Sharding
    keys: Sharding
    cells: Cells

    def __post_init__(self) -> None:
        """Check that the cells fit the chunks and name ranks; raises ValueError."""
        rows, columns = len(self.queries.chunks), len(self.keys.chunks)
        if len(self.cells) != rows or any(len(row) != columns for row in self.cells):
            widths = sorted({len(row) for row in self.cells})
            raise ValueError(
                f"allocation: {len(self.cells)} rows of {widths} cells must be "
                f"{rows} query chunks x {columns} key chunks"
            )
        cp = len(self.queries.owned)
        strange = {rank for row in self.cells for rank in row if rank is not None}
        strange -= set(range(cp))
        if len(self.keys.owned) != cp or strange:
            raise ValueError(
                f"allocation: ranks {sorted(strange)} and the {len(self.keys.owned)} owners of "
                f"keys must be among the {cp} owners of queries"
            )

    def blocks_of(self, rank: int) -> list[tuple[int, int]]:
        """Return the (query chunk, key chunk) that a rank computes, row by row."""
        return [
            (i, j)
            for i, row in enumerate(self.cells)
            for j, device in enumerate(row)
            if device == rank
        ]


def row_owner(queries: Sharding, keys: Sharding) -> Allocation:
    """Return every block at the owner of its query chunk."""
    owner = queries.owner()
    cells = tuple((owner[i],) * len(keys.chunks) for i in range(len(queries.chunks)))
    return Allocation(queries=queries, keys=keys, cells=cells)


def cells_of(table: Sequence[Sequence[int]]) -> Cells:
    """Return cells from a table of ranks in which a negative number means nobody."""
    return tuple(tuple(None if rank < 0 else int(rank) for rank in row) for row in table)
