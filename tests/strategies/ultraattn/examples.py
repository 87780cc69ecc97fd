"""Tables that the tests share, and random instances."""

import numpy as np
from hypothesis import strategies as st

from harness.plan.problem import Direction
from patterns.table import Table
from strategies.ultraattn.blocks import grid_of_table, instance_of
from strategies.ultraattn.solver.instance import BACKWARD, FORWARD, Instance, Weights
from strategies.ultraattn.solver.published_instances import (
    SEED,
    SEED_TABLES,
    at_degree,
    node_blocks,
)

__all__ = ["SEED", "case", "instances", "table"]


def table(name: str, size: int) -> Table:
    """A pattern's table at a degree; `group`, one of the four of the remapped strided one."""
    if name == "group":
        return node_blocks(SEED_TABLES["strided"], 4, size)[0, 0]
    return at_degree(SEED_TABLES[name], size)


def case(name: str, size: int, devices: int, direction: Direction = Direction.FORWARD) -> Instance:
    """The instance of `table(name, size)`."""
    weights = FORWARD if direction is Direction.FORWARD else BACKWARD
    return instance_of(grid_of_table(table(name, size)), devices, weights)


@st.composite
def instances(draw: st.DrawFn, most_blocks: int = 7) -> Instance:
    """Few blocks, 2 to 4 devices, oblong tables, mixed FULL and CAUSAL, any weights."""
    devices = draw(st.integers(2, 4))
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    blocks = draw(
        st.lists(
            st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)),
            min_size=1,
            max_size=most_blocks if devices < 4 else most_blocks - 1,
            unique=True,
        )
    )
    cells = np.zeros((rows, columns), dtype=np.int8)
    for i, j in blocks:
        cells[i, j] = draw(st.sampled_from([1, 2]))
    odd = Weights(row_in=3, row_out=4, column_in=1, column_out=2)
    weights = draw(st.sampled_from([FORWARD, BACKWARD, odd]))
    inside = ()
    if draw(st.booleans()):
        inside = tuple(tuple(int(3 * bool(w)) for w in row) for row in cells)
    slack = draw(st.integers(0, 1))
    return instance_of(grid_of_table(cells), devices, weights, slack=slack, inside=inside)
