"""Who attends which block, and the account of every rank: UltraAttn's worked example."""

from harness.plan.block_table import block_table, rank_accounts
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sharding import contiguous
from harness.planning.block_assignment import Allocation
from harness.planning.block_transfers import plan_allocation
from strategies import strategy
from tests.harness.numeric import table_pattern
from tests.support import problem

# First column and diagonal; the seed's constructed plan for four ranks.
STAR = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
CELLS = [[0, -1, -1, -1], [0, 1, -1, -1], [2, -1, 2, -1], [1, -1, -1, 3]]


def test_the_account_of_a_plan_by_hand() -> None:
    p = Problem(
        pattern=table_pattern(STAR, 44, 44),
        heads_q=6,
        heads_kv=2,
        head_dim=8,
        head_dim_v=4,
        dtype=Dtype.BFLOAT16,
        cp=4,
    )
    sharding = contiguous(44, 4)
    cells = tuple(tuple(None if rank < 0 else rank for rank in row) for row in CELLS)
    allocation = Allocation(queries=sharding, keys=sharding, cells=cells)
    plan = plan_allocation(p, "by hand", Direction.FORWARD, allocation)
    table = block_table(plan)
    assert table.row_owner == table.column_owner == (0, 1, 2, 3)
    assert [[cell[0] if cell else -1 for cell in row] for row in table.ranks] == CELLS
    lines = rank_accounts(plan, table)
    assert [(each.A, each.B, each.C, each.D) for each in lines] == [
        (1, 0, 0, 2),  # q1 comes; k0 goes to ranks 1 and 2
        (1, 1, 1, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
    ]
    q, out, kv = 11 * 6 * 8 * 2, 11 * 6 * (4 + 1) * 4, 11 * 2 * (8 + 4) * 2
    assert [each.received_bytes for each in lines] == [q, q + kv + out, kv, out]
    assert [each.sent_bytes for each in lines] == [out + 2 * kv, q + out, 0, q]
    assert [each.area for each in lines] == [2 * 121 * 6, 2 * 121 * 6, 2 * 121 * 6, 121 * 6]


def test_blocks_whose_heads_are_spread_have_several_ranks() -> None:
    p = problem("causal", 37, cp=2)
    plan = strategy("ulysses").plan(p, Direction.BACKWARD)
    assert {cell for row in block_table(plan).ranks for cell in row} <= {(), (0, 1)}
