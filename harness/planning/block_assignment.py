"""Which rank computes each block of a grid of query chunks x key chunks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding
from harness.planning.builder import PlanBuilder
from harness.planning.token_owners import Move

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


class RankGrid:
    """A grid of ranks: Y rows of X neighbours; rank y X + x computes its row's and column's blocks.

    Args:
        b: Who owns what, and what the pattern needs.
        rows: Y; divides cp.
    """

    def __init__(self, b: PlanBuilder, rows: int) -> None:
        self.b = b
        self.y, self.x = rows, b.problem.cp // rows
        self.ranks = range(b.problem.cp)
        self.lines = [range(y * self.x, (y + 1) * self.x) for y in range(self.y)]
        self.columns = [range(x, len(self.ranks), self.x) for x in range(self.x)]

    def row_rank(self, rank: int, offset: int) -> int:
        """The owner of the row that is `offset` places after a rank's own."""
        first = rank // self.x * self.x
        return first + (rank - first + offset) % self.x

    def column_rank(self, rank: int, offset: int) -> int:
        """The owner of the column that is `offset` places after a rank's own."""
        return (rank + offset * self.x) % len(self.ranks)

    def chunks_of_row(self, owner: int, rank: int) -> tuple[int, ...]:
        """The query chunks of an owner that attend some key of a rank's columns."""
        columns = (self.column_rank(rank, offset) for offset in range(self.y))
        keys = tuple(chunk for column in columns for chunk in self.b.keys.owned[column])
        return self.b.needed_q(self.b.queries.owned[owner], keys)

    def chunks_of_column(self, owner: int, rank: int) -> tuple[int, ...]:
        """The key chunks of an owner that some query of a rank's rows attends."""
        rows = (self.row_rank(rank, offset) for offset in range(self.x))
        queries = tuple(chunk for row in rows for chunk in self.b.queries.owned[row])
        return self.b.needed_kv(queries, self.b.keys.owned[owner])

    def passed_in_row(self, rank: int, offset: int) -> Move:
        """The row at an offset, from the next neighbour: what a rank and those after it need."""
        owner, after = self.row_rank(rank, offset), range(self.x - offset)
        needed = [self.chunks_of_row(owner, self.row_rank(rank, -step)) for step in after]
        return self.row_rank(rank, 1), rank, tuple(sorted({c for part in needed for c in part}))

    def passed_in_column(self, rank: int, offset: int) -> Move:
        """The column at an offset, from the next neighbour: what a rank and those after it need."""
        owner, after = self.column_rank(rank, offset), range(self.y - offset)
        needed = [self.chunks_of_column(owner, self.column_rank(rank, -step)) for step in after]
        return self.column_rank(rank, 1), rank, tuple(sorted({c for part in needed for c in part}))

    def rows_in(self, offset: int) -> list[Move]:
        """The rows that ranks get from the owner at an offset."""
        owners = [(self.row_rank(rank, offset), rank) for rank in self.ranks]
        return [(owner, rank, self.chunks_of_row(owner, rank)) for owner, rank in owners]

    def columns_in(self, offset: int) -> list[Move]:
        """The columns that ranks get from the owner at an offset."""
        owners = [(self.column_rank(rank, offset), rank) for rank in self.ranks]
        return [(owner, rank, self.chunks_of_column(owner, rank)) for owner, rank in owners]


def rows_of(name: str, asked: int | None, problem: Problem, direction: Direction) -> int:
    """Choose Y, the rows of a `RankGrid`: as asked, or as many as move the fewest bytes.

    Raises:
        UnsupportedError: Y does not divide cp; the legal Y of the strategy `name` are listed.
    """
    cp, rows = problem.cp, asked or least_volume(problem, direction)
    if cp % rows:
        legal = tuple(f"{name}:rows={y}" for y in range(1, cp + 1) if cp % y == 0)
        raise UnsupportedError(f"{name}: rows ({rows}) must divide cp ({cp})", legal)
    return rows


def turned(moves: Iterable[Move], line: range) -> list[Move]:
    """Turn what came to the ranks of a line around, sources in rank order."""
    return sorted((dst, src, chunks) for src, dst, chunks in moves if dst in line)


def line_bytes(problem: Problem, direction: Direction) -> tuple[int, int]:
    """Count the bytes that a visit of all queries, and of all keys, moves if nothing is masked.

    Queries bring q and return out and lse; backward they bring q, lse, dout and delta and return
    dq. Keys bring k and v; backward they return dk and dv too.
    """
    part, size = problem.dtype.accumulator_bytes, problem.dtype.bytes
    sent = size if problem.round_sent else part
    d_k, d_v = problem.head_dim, problem.head_dim_v
    if direction is Direction.FORWARD:
        row = d_k * size + (d_v + 1) * part
        column = (d_k + d_v) * size
    else:
        row = (d_k + d_v) * size + 2 * part + d_k * sent
        column = (d_k + d_v) * (size + sent)
    return row * problem.heads_q * problem.seqlen_q, column * problem.heads_kv * problem.seqlen_kv


class Traveller(StrEnum):
    """What travels."""

    QUERIES = "queries"
    KEYS = "keys"


class Carry(StrEnum):
    """What travels forward, or who decides on both directions."""

    QUERIES = "queries"
    KEYS = "keys"
    AUTO = "auto"


def fewest_bytes(problem: Problem, direction: Direction) -> Traveller:
    """Return what is fewer bytes, with all that comes home.

    Source: Meta, arXiv:2411.01783, section 3.5; BurstAttention, arXiv:2509.19836.
    """
    queries, keys = line_bytes(problem, direction)
    return Traveller.QUERIES if queries <= keys else Traveller.KEYS


def faster_traveller(
    problem: Problem,
    direction: Direction,
    evaluate: Callable[[Plan], float] | None,
    planned: Callable[[Traveller], Plan],
) -> Traveller:
    """Return what is predicted to be faster; what is fewer bytes where nothing predicts."""
    if evaluate is None:
        return fewest_bytes(problem, direction)
    times = {each: evaluate(planned(each)) for each in Traveller}
    return min(times, key=lambda each: times[each])


def least_volume(problem: Problem, direction: Direction) -> int:
    """Choose Y, the rows of a `RankGrid`, that moves the fewest bytes if nothing is masked."""
    cp, (row, column) = problem.cp, line_bytes(problem, direction)

    def volume(rows: int) -> tuple[int, int]:
        return (cp // rows - 1) * row + (rows - 1) * column, -rows

    return min((y for y in range(1, cp + 1) if cp % y == 0), key=volume)
