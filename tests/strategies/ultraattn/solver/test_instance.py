"""The account of an assignment, and the worked example of four devices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.plan.problem import Direction, Dtype
from strategies.ultraattn.blocks import grid_of_table, instance_of
from strategies.ultraattn.solver.instance import (
    BACKWARD,
    FORWARD,
    Instance,
    Weights,
    account,
    all_received,
    even_owners,
    most,
    own_rows,
    weights_of,
)
from tests.strategies.ultraattn.brute import optima, traffic
from tests.strategies.ultraattn.examples import SEED, instances
from tests.support import problem


def test_the_worked_example_is_as_published() -> None:
    instance = instance_of(grid_of_table(SEED), 4, FORWARD)
    assert instance.cap == 4  # two FULL blocks
    assert most(account(instance, own_rows(instance))) == 6
    found = optima(instance)
    assert found is not None
    assert found[:2] == (4, 24)


def test_the_worked_example_with_the_diagonal_fixed_is_worse() -> None:
    found = optima(instance_of(grid_of_table(SEED), 4, FORWARD, fix_diagonal=True))
    assert found is not None
    assert found[0] == 5


def test_the_constructed_plan_has_the_published_account() -> None:
    """The plan of section 4.2 as its account determines it: per device A B C D, in, out, blocks."""
    instance = instance_of(grid_of_table(SEED), 4, FORWARD)
    cells = [[0, None, None, None], [2, 1, None, None], [2, None, 1, None], [0, None, None, 3]]
    lines = account(instance, cells)
    assert [(x.A, x.B, x.C, x.D, x.received, x.sent, x.work // 2) for x in lines] == [
        (1, 0, 0, 1, 1, 3, 2),
        (1, 1, 1, 0, 4, 2, 2),
        (1, 1, 1, 1, 4, 4, 2),
        (0, 0, 1, 0, 1, 1, 1),
    ]
    assert most(lines) == 4


@given(instances(), st.integers(0, 2**32 - 1))
def test_the_account_agrees_with_moving_every_chunk(instance: Instance, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cells: list[list[int | None]] = [
        [int(rng.integers(instance.devices)) if w else None for w in row] for row in instance.work
    ]
    owners = {(i, j): cells[i][j] or 0 for i, j in instance.blocks}
    lines = account(instance, cells)
    assert [(line.received, line.sent) for line in lines] == traffic(instance, owners)
    assert sum(line.work for line in lines) == instance.total
    assert all_received(lines) == sum(line.sent for line in lines)


def test_an_account_refuses_cells_that_do_not_fit_the_work() -> None:
    instance = instance_of(grid_of_table(SEED), 4, FORWARD)
    cells = own_rows(instance)
    cells[1][0] = None
    with pytest.raises(ValueError, match=r"block \(1, 0\)"):
        account(instance, cells)


def test_weights_of_equal_shapes_are_the_papers() -> None:
    p = problem("full", 96, heads=(6, 6))
    assert weights_of(p, Direction.FORWARD, 8, 8) == FORWARD
    assert weights_of(p, Direction.BACKWARD, 8, 8) == BACKWARD


def test_weights_follow_heads_lengths_and_widths() -> None:
    grouped = problem("full", 96, heads=(6, 2))
    assert weights_of(grouped, Direction.FORWARD, 8, 8) == Weights(
        row_in=3, row_out=3, column_in=2, column_out=0, unit=3
    )
    cross = problem("full", 96, heads=(6, 6), seqlen_kv=288)
    assert weights_of(cross, Direction.BACKWARD, 8, 8) == Weights(
        row_in=2, row_out=1, column_in=6, column_out=6
    )
    more_columns = weights_of(cross, Direction.FORWARD, 8, 24)  # as many tokens in each chunk
    assert more_columns == FORWARD
    wide = problem("full", 96, heads=(6, 6), dims=(8, 4))
    assert weights_of(wide, Direction.FORWARD, 8, 8) == Weights(
        row_in=2, row_out=1, column_in=3, column_out=0, unit=2
    )


def test_shipped_weights_count_accumulators_and_the_row_sums() -> None:
    p = problem("full", 96, heads=(6, 6), dims=(8, 8), dtype=Dtype.BFLOAT16)
    # bytes per token and head: q 16, out 8 * 4 + 4, k and v 32; backward in 32 + 8, dq 32, 64
    assert weights_of(p, Direction.FORWARD, 8, 8, shipped=True) == Weights(
        row_in=4, row_out=9, column_in=8, column_out=0, unit=4
    )
    assert weights_of(p, Direction.BACKWARD, 8, 8, shipped=True) == Weights(
        row_in=5, row_out=4, column_in=4, column_out=8, unit=2
    )


def test_owners_are_contiguous_also_when_chunks_do_not_divide() -> None:
    assert even_owners(8, 4) == (0, 0, 1, 1, 2, 2, 3, 3)
    assert even_owners(5, 3) == (0, 0, 1, 1, 2)
