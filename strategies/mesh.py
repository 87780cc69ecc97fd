"""Mesh: ranks form Y x X; queries travel a ring along rows, keys a ring along columns.

Rank y X + x computes a tile of X query chunks x Y key chunks, as in `grid`; but chunks come from
the neighbour that had them, one ring step at a time, and each step attends what it makes possible.

    cp = 4, Y = X = 2     k0 k1 k2 k3       step    0        1 (keys)   2 (queries)
    ranks  0 1       q0    0  1  0  1       rank 0  q0·k0    q0·k2      q1·(k0 k2)
           2 3       q1    0  1  0  1       rank 1  q1·k1    q1·k3      q0·(k1 k3)
                     q2    2  3  2  3       rank 2  q2·k2    q2·k0      q3·(k2 k0)
                     q3    2  3  2  3       rank 3  q3·k3    q3·k1      q2·(k3 k1)

Which ring steps next is greedy: the one that makes more blocks possible, keys if both make as many.
The last queries come after the last keys, so that these rows are complete at once; partial (out,
lse) or dq of a complete row go home beside the next step. Y = cp is the ring, Y = 1 a ring of
queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.planning.block_assignment import RankGrid, rows_of
from harness.planning.builder import PlanBuilder
from harness.planning.errands import Errands
from harness.planning.need import NeedCut
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, option
from harness.planning.strategy import Context, Strategy, nearest_rows, with_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may choose."""

    rows: int | None = option(None, "rows of ranks", unset="as many as move the fewest bytes")
    placement: Placement = option(Placement.STRIPE, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan rings along both axes of a Y x X grid.

    Raises:
        UnsupportedError: Y does not divide cp; the legal Y are listed.
    """
    queries, keys = deal_tokens(problem.pattern, problem.cp, options.placement, options.chunk)
    b = PlanBuilder(problem, name, direction, queries, keys, cut=NeedCut.BOTH, align=context.align)
    grid = RankGrid(b, rows_of("mesh", options.rows, problem, direction))
    errands = Errands(b, delta=grid.x > 1)
    errands.start()
    steps = list(_steps(grid.y, grid.x))
    _bring(grid, errands, *steps[0])
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if following is not None:
            _bring(grid, errands, *following)
        _attend(grid, errands, *step)
        _return(grid, errands, *step)
    return errands.end()


def _steps(y: int, x: int) -> Iterator[tuple[range, range]]:
    """Yield the offsets of rows and of columns whose blocks each step attends.

    With r rows and c columns there, another column makes r blocks possible and another row c.
    """
    rows = columns = 1
    yield range(1), range(1)
    while (rows, columns) != (x, y):
        if columns < y and (rows >= columns or rows >= x - 1):
            yield range(rows), range(columns, columns + 1)
            columns += 1
        else:
            yield range(rows, rows + 1), range(columns)
            rows += 1


def _bring(grid: RankGrid, errands: Errands, rows: range, columns: range) -> None:
    """Pass on what a step newly needs: its one row or its one column."""
    for rank in grid.ranks:
        if rows.start:
            errands.bring_rows(*grid.passed_in_row(rank, rows.start))
        elif columns.start:
            errands.bring_columns(*grid.passed_in_column(rank, columns.start))


def _attend(grid: RankGrid, errands: Errands, rows: range, columns: range) -> None:
    owned_q, owned_kv = grid.b.queries.owned, grid.b.keys.owned
    for rank in grid.ranks:
        q = sorted(c for offset in rows for c in owned_q[grid.row_rank(rank, offset)])
        kv = sorted(c for offset in columns for c in owned_kv[grid.column_rank(rank, offset)])
        errands.attend(rank, tuple(q), tuple(kv))


def _return(grid: RankGrid, errands: Errands, rows: range, columns: range) -> None:
    """Send home the rows, and backward the columns, that a step completed."""
    for offset in rows if columns.stop == grid.y else ():
        for owner, rank, chunks in grid.rows_in(offset):
            errands.return_rows(rank, owner, chunks)
    gradients = rows.stop == grid.x and grid.b.direction is Direction.BACKWARD
    for offset in columns if gradients else ():
        for owner, rank, chunks in grid.columns_in(offset):
            errands.return_columns(rank, owner, chunks)


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the number of rows, which may differ between the directions."""
    options = with_chunk(problem, direction, options, context)
    return replace(options, rows=rows_of("mesh", options.rows, problem, direction))


STRATEGY = Strategy(
    name="mesh",
    summary="a grid of ranks: queries travel a ring along rows, keys one along columns",
    paper="Chen et al., Mesh-Attention, arXiv:2512.20968",
    plan=plan,
    defaults=Options(),
    resolve=resolve,
    alternatives=nearest_rows,
    compared=("placement=zigzag", "placement=contiguous"),
    degree="rows",
)
