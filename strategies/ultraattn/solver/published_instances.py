"""Instances with known answers: those that the authors solved, and what a node sees of a pattern.

Source: UltraAttn (SC'25), the solver logs of the authors' repository (`prof_data/intra_tiles`,
8 devices, degree 8, forward weights, diagonal fixed, Gurobi 11.0.3 with 32 threads).
"""

from dataclasses import dataclass

import numpy as np

from patterns.table import Table, refine
from patterns.tables import (
    global_local_table,
    star_table,
    streaming_table,
    strided_order,
    strided_table,
)


@dataclass(frozen=True, slots=True, eq=False)
class Logged:
    """An instance of the authors' logs.

    Attributes:
        name: Pattern, nodes and which block.
        table: 8 x 8.
        value: The logged optimum, in query chunks.
        seconds: The logged time.
    """

    name: str
    table: Table
    value: int
    seconds: float


def _remapped_strided() -> Table:
    order = list(strided_order(16, 4))
    return strided_table(16, 4, 3)[np.ix_(order, order)]


# The six patterns as the paper draws them; `strided` after its remap.
SEED_TABLES: dict[str, Table] = {
    "full": np.ones((1, 1), dtype=np.int8),
    "causal": np.full((1, 1), 2, dtype=np.int8),
    "strided": _remapped_strided(),
    "global_local": global_local_table(16, 1, 1),
    "star": star_table(4),
    "streaming": streaming_table(8, 3),
}
# The worked example on four devices: first column and diagonal, seven FULL blocks.
SEED: Table = np.tri(4, dtype=np.int8) * (np.eye(4, dtype=np.int8) | (np.arange(4) == 0)).astype(
    np.int8
)


def at_degree(table: Table, degree: int) -> Table:
    """Return a table refined to `degree` rows.

    Raises:
        ValueError: The degree is not a multiple of the table's size.
    """
    if degree % len(table):
        raise ValueError(f"degree ({degree}) must be a multiple of the table's size, {len(table)}")
    return refine(table, degree // len(table))


def node_blocks(table: Table, nodes: int, degree: int) -> dict[tuple[int, int], Table]:
    """Return the distinct blocks that nodes compute, refined to `degree`, by their first place.

    Args:
        table: A pattern's table, in the order in which nodes own its rows and columns.
        nodes: How many; chunks are dealt evenly.
        degree: Rows and columns of each result, a multiple of what the block has.
    """
    size = len(table)
    if size % nodes:
        table = refine(table, nodes)
    width = len(table) // nodes
    found: dict[tuple[int, int], Table] = {}
    for i in range(nodes):
        for j in range(nodes):
            block = table[i * width : (i + 1) * width, j * width : (j + 1) * width]
            block = at_degree(block, degree)
            known = any(np.array_equal(block, other) for other in found.values())
            if block.any() and not known:
                found[i, j] = block
    return found


def logged() -> list[Logged]:
    """Return the instances of the authors' logs, those that two patterns share once."""
    cases = [
        # pattern, nodes, place of the block among nodes, what it holds, value, seconds
        ("full", 8, (0, 0), "all", 8, 34.0),
        ("strided", 2, (0, 0), "two bands", 4, 0.07),
        ("strided", 4, (0, 0), "band", 8, 68.8),
        ("strided", 8, (0, 1), "lower triangle", 7, 3.7),
        ("strided", 8, (1, 0), "upper triangle", 7, 5.1),
        ("global_local", 2, (0, 0), "row, column, diagonal", 10, 0.1),
        ("global_local", 2, (0, 1), "row", 7, 0.1),
        ("global_local", 2, (1, 0), "column", 14, 0.1),
        ("global_local", 2, (1, 1), "diagonal", 0, 0.1),
        ("global_local", 4, (0, 0), "row, column, diagonal", 7, 2.26),
        ("global_local", 4, (0, 1), "row", 5, 0.04),
        ("global_local", 4, (1, 0), "column", 8, 0.12),
        ("global_local", 4, (1, 1), "diagonal", 2, 0.006),
        ("global_local", 8, (0, 1), "row", 6, 0.33),
        ("global_local", 8, (1, 0), "column", 7, 2.4),
        ("global_local", 8, (1, 1), "diagonal", 4, 0.05),
    ]
    return [
        Logged(
            f"{pattern}, {nodes} nodes, {what}",
            node_blocks(SEED_TABLES[pattern], nodes, 8)[place],
            value,
            seconds,
        )
        for pattern, nodes, place, what, value, seconds in cases
    ]
