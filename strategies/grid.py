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

from dataclasses import dataclass, replace
from itertools import product

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import contiguous
from harness.plan.tasks import GATHERED
from harness.planning.block_assignment import RankGrid, rows_of, turned
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.errands import Errands
from harness.planning.need import NeedCut
from harness.planning.options import option
from harness.planning.strategy import Context, Strategy, nearest_rows

PAPER = "UltraAttn (SC'25), the plans for full attention of the authors' code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    rows: int | None = option(None, "rows of ranks", unset="as many as move the fewest bytes")
    fused: bool = option(
        False, "move chunks by collectives and attend once a rank, without overlap"
    )


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a Y x X grid.

    Raises:
        UnsupportedError: Y does not divide cp; the legal Y are listed.
    """
    queries, keys = shard_both(problem, contiguous)
    b = PlanBuilder(problem, name, direction, queries, keys, cut=NeedCut.BOTH, align=context.align)
    grid = RankGrid(b, rows_of("grid", options.rows, problem, direction))
    # Rows that leave their owner need delta there; with Y = cp none does.
    errands = Errands(b, delta=grid.x > 1)
    errands.start()
    return _fused(grid, errands) if options.fused else _unfused(grid, errands)


def _unfused(grid: RankGrid, errands: Errands) -> Plan:
    """Plan every chunk a transfer, every block a tile.

    Source: the authors' code, the order of the plans for full attention: rows in, columns in,
    blocks column by column, columns home but the last, rows home, the last column home.
    """
    b, x, y = grid.b, grid.x, grid.y

    def columns_home(offsets: range) -> None:
        for offset in offsets if b.direction is Direction.BACKWARD else ():
            for owner, rank, chunks in grid.columns_in(offset):
                errands.return_columns(rank, owner, chunks)

    for offset in range(1, x):
        for owner, rank, chunks in grid.rows_in(offset):
            errands.bring_rows(owner, rank, chunks)
    for offset in range(1, y):
        for owner, rank, chunks in grid.columns_in(offset):
            errands.bring_columns(owner, rank, chunks)
    for column, row, rank in product(range(y), range(x), grid.ranks):
        q, kv = grid.row_rank(rank, row), grid.column_rank(rank, column)
        errands.attend(rank, b.queries.owned[q], b.keys.owned[kv])
    columns_home(range(1, y - 1))
    for offset in range(1, x):
        for owner, rank, chunks in grid.rows_in(offset):
            errands.return_rows(rank, owner, chunks)
    columns_home(range(max(1, y - 1), y))
    return errands.end()


def _fused(grid: RankGrid, errands: Errands) -> Plan:
    """Gather rows and columns, attend once, return what is others'."""
    rows = [move for offset in range(grid.x) for move in grid.rows_in(offset)]
    columns = [move for offset in range(grid.y) for move in grid.columns_in(offset)]
    for line in grid.lines if grid.x > 1 else ():
        errands.gather_rows([move for move in rows if move[1] in line], GATHERED)
    for line in grid.columns if grid.y > 1 else ():
        errands.gather_columns([move for move in columns if move[1] in line], GATHERED)
    versions = (GATHERED if grid.x > 1 else 0, GATHERED if grid.y > 1 else 0)
    for rank in grid.ranks:
        q = sorted(c for _, dst, chunks in rows if dst == rank for c in chunks)
        kv = sorted(c for _, dst, chunks in columns if dst == rank for c in chunks)
        errands.attend(rank, tuple(q), tuple(kv), versions)
    for line in grid.lines:
        errands.return_all_rows(turned(rows, line))
    for line in grid.columns if grid.b.direction is Direction.BACKWARD else ():
        errands.return_all_columns(turned(columns, line))
    return errands.end()


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the number of rows, which may differ between the directions."""
    del context
    return replace(options, rows=rows_of("grid", options.rows, problem, direction))


STRATEGY = Strategy(
    name="grid",
    summary="a grid of ranks: keys over columns, queries over rows",
    paper=PAPER,
    plan=plan,
    defaults=Options(),
    resolve=resolve,
    alternatives=nearest_rows,
    compared=("fused=true",),
    degree="rows",
)
