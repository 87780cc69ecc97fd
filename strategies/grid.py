"""Grid: ranks form Y x X; a rank computes the rows of its X neighbours and Y ranks' columns.

Rank g = y * X + x needs the X query chunks of its row of ranks and the Y key chunks of its column
of ranks; partial results go home along the row (out, dq) and the column (dk, dv).

    cp = 4, Y = 2, X = 2     k0 k1 k2 k3
    ranks  0 1           q0   0  1  0  1
           2 3           q1   0  1  0  1
                         q2   2  3  2  3
                         q3   2  3  2  3

Y = cp gathers all keys (the row owner), Y = 1 gathers all queries. Not fused, every chunk is a
transfer and every block a tile, in the authors' order: offsets from the own rank, rows before
columns, and results as soon as their last block is done. Fused, chunks are gathered by collectives
and attended in one tile, without overlap; forward, partial (out, lse) are exchanged and merged in
order, because no reduce-scatter can add them.
"""

from dataclasses import replace

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import contiguous
from harness.plan.tasks import GATHERED
from harness.planning.block_transfers import Errands, Move
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.strategy import Context, Options, Strategy

PAPER = "UltraAttn (SC'25), the plans for full attention of the authors' code"


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a Y x X grid.

    Raises:
        UnsupportedError: Y does not divide cp; the legal Y are listed.
    """
    del context
    rows = _rows(problem, direction, options)
    queries, keys = shard_both(problem, contiguous)
    b = PlanBuilder(problem, name, direction, queries, keys)
    mesh = _Mesh(b, rows)
    return mesh.fused() if options.fused else mesh.unfused()


def _rows(problem: Problem, direction: Direction, options: Options) -> int:
    cp = problem.cp
    rows = options.rows or least_volume(problem, direction)
    if cp % rows:
        legal = tuple(f"grid:rows={y}" for y in range(1, cp + 1) if cp % y == 0)
        raise UnsupportedError(f"grid: rows ({rows}) must divide cp ({cp})", legal)
    return rows


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the number of rows, which may differ between the directions."""
    del context
    return replace(options, rows=_rows(problem, direction, options))


def least_volume(problem: Problem, direction: Direction) -> int:
    """Choose Y, the number of rows of ranks, that moves the fewest bytes if nothing is masked."""
    cp, part = problem.cp, problem.dtype.accumulator_bytes
    d_k, d_v, size = problem.head_dim, problem.head_dim_v, problem.dtype.bytes
    if direction is Direction.FORWARD:
        row = d_k * size + (d_v + 1) * part
        column = (d_k + d_v) * size
    else:
        row = (d_k + d_v) * size + 2 * part + d_k * part
        column = (d_k + d_v) * (size + part)
    row *= problem.heads_q * problem.seqlen_q
    column *= problem.heads_kv * problem.seqlen_kv

    def volume(rows: int) -> tuple[int, int]:
        return (cp // rows - 1) * row + (rows - 1) * column, -rows

    return min((y for y in range(1, cp + 1) if cp % y == 0), key=volume)


class _Mesh:
    """A grid of ranks: Y rows of X neighbours."""

    def __init__(self, b: PlanBuilder, rows: int) -> None:
        self.b = b
        self.y, self.x = rows, b.problem.cp // rows
        self.ranks = range(b.problem.cp)
        # Rows that leave their owner need delta there; with Y = cp none does.
        self.errands = Errands(b, delta=self.x > 1)
        self.errands.start()

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

    # In the authors' order ------------------------------------------------------------------

    def unfused(self) -> Plan:
        """Every chunk a transfer, every block a tile.

        Source: the authors' code, the order of the plans for full attention: rows in, columns in,
        blocks column by column, columns home but the last, rows home, the last column home.
        """
        errands, keys, queries = self.errands, self.b.keys, self.b.queries
        for offset in range(1, self.x):
            for src, dst, chunks in self.rows_in(offset):
                errands.bring_rows(src, dst, chunks)
        for offset in range(1, self.y):
            for src, dst, chunks in self.columns_in(offset):
                errands.bring_columns(src, dst, chunks)
        for column in range(self.y):
            for row in range(self.x):
                for rank in self.ranks:
                    owners = self.row_rank(rank, row), self.column_rank(rank, column)
                    errands.attend(rank, queries.owned[owners[0]], keys.owned[owners[1]])
        backward = self.b.direction is Direction.BACKWARD
        for offset in range(1, self.y - 1) if backward else ():
            self.columns_home(offset)
        for offset in range(1, self.x):
            for owner, rank, chunks in self.rows_in(offset):
                errands.return_rows(rank, owner, chunks)
        if backward and self.y > 1:
            self.columns_home(self.y - 1)
        return errands.end()

    def rows_in(self, offset: int) -> list[Move]:
        """The rows that ranks get from the owner at an offset."""
        owners = [(self.row_rank(rank, offset), rank) for rank in self.ranks]
        return [(owner, rank, self.chunks_of_row(owner, rank)) for owner, rank in owners]

    def columns_in(self, offset: int) -> list[Move]:
        """The columns that ranks get from the owner at an offset."""
        owners = [(self.column_rank(rank, offset), rank) for rank in self.ranks]
        return [(owner, rank, self.chunks_of_column(owner, rank)) for owner, rank in owners]

    def columns_home(self, offset: int) -> None:
        """Send home the gradients of the columns at an offset."""
        for owner, rank, chunks in self.columns_in(offset):
            self.errands.return_columns(rank, owner, chunks)

    # By collectives -------------------------------------------------------------------------

    def fused(self) -> Plan:
        """Gather rows and columns, attend once, return what is others'."""
        errands = self.errands
        rows = [move for offset in range(self.x) for move in self.rows_in(offset)]
        columns = [move for offset in range(self.y) for move in self.columns_in(offset)]
        for y in range(self.y) if self.x > 1 else ():
            line = range(y * self.x, (y + 1) * self.x)
            errands.gather_rows([move for move in rows if move[1] in line], GATHERED)
        for x in range(self.x) if self.y > 1 else ():
            line = range(x, len(self.ranks), self.x)
            errands.gather_columns([move for move in columns if move[1] in line], GATHERED)
        versions = (GATHERED if self.x > 1 else 0, GATHERED if self.y > 1 else 0)
        for rank in self.ranks:
            q = sorted(c for _, dst, chunks in rows if dst == rank for c in chunks)
            kv = sorted(c for _, dst, chunks in columns if dst == rank for c in chunks)
            errands.attend(rank, tuple(q), tuple(kv), versions)
        for y in range(self.y):
            line = range(y * self.x, (y + 1) * self.x)
            errands.return_all_rows(_home(rows, line))
        if self.b.direction is Direction.BACKWARD:
            for x in range(self.x):
                errands.return_all_columns(_home(columns, range(x, len(self.ranks), self.x)))
        return errands.end()


def _home(moves: list[Move], line: range) -> list[Move]:
    """Turn what came to the ranks of a line around, sources in rank order."""
    return sorted((dst, src, chunks) for src, dst, chunks in moves if dst in line)


STRATEGY = Strategy(
    name="grid",
    summary="a grid of ranks: keys over columns, queries over rows",
    paper=PAPER,
    plan=plan,
    accepts=frozenset({"rows", "fused"}),
    resolve=resolve,
)
