"""Blocks of work as a hypergraph: its cut into even parts, by Mt-KaHyPar if it is there.

A vertex is the work of a block; an edge is a chunk of data, and joins all blocks that read it or
add to it. Cut between so many parts, an edge's cost is paid for each of them but one: that is what
the chunk moves if one of them owns it. Chunks get their owners after the cut.

Source: DCP (SOSP'25), arXiv:2510.10620, whose graph has the data as vertices too. The library's
preset is its deterministic one, so that all ranks come to one cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding, split
from harness.planning.block_assignment import Cells, line_bytes
from patterns.areas import Ints

_MODULE = "mtkahypar"
INSTALL = "pip install mtkahypar==1.7.post1"
"""The command that installs the library."""

_ROOM = 2  # times the even number of chunks that a rank may own
_TOTAL = 10_000_000  # whole numbers that all weights, or the dearest edge, come to


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypergraph:
    """Vertices that are joined by edges of any size.

    Attributes:
        weights: Of vertices, 0 or more.
        edges: Vertices that each edge joins.
        costs: Of edges, above 0.
    """

    weights: tuple[float, ...]
    edges: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]

    def among(self, vertices: Sequence[int]) -> "Hypergraph":
        """Return the part that some vertices make, in their order; edges keep those of them."""
        number = {vertex: at for at, vertex in enumerate(vertices)}
        kept = [tuple(number[v] for v in edge if v in number) for edge in self.edges]
        pairs = [(e, c) for e, c in zip(kept, self.costs, strict=True) if len(e) > 1]
        return Hypergraph(
            weights=tuple(self.weights[vertex] for vertex in vertices),
            edges=tuple(edge for edge, _ in pairs),
            costs=tuple(cost for _, cost in pairs),
        )


def can_cut() -> bool:
    """Whether the library is there; says nothing of whether it works."""
    return find_spec(_MODULE) is not None


def cut_hypergraph(graph: Hypergraph, parts: int, uneven: float) -> list[int]:
    """Return the part of each vertex.

    Args:
        graph: What to cut.
        parts: Into how many.
        uneven: Weight that a part may have beyond the mean, as a share of it.

    Raises:
        ImportError: The library is not there.
    """
    if parts == 1:
        return [0] * len(graph.weights)
    whole = graph.among(range(len(graph.weights)))
    if not whole.edges or len(whole.weights) <= parts:
        return _least_first(whole.weights, parts)
    return _cut(whole, parts, uneven)


@lru_cache(maxsize=1)
def _library() -> tuple[Any, Any]:
    import mtkahypar

    return mtkahypar, mtkahypar.initialize(1, False)


def _cut(graph: Hypergraph, parts: int, uneven: float) -> list[int]:
    library, started = _library()
    library.set_seed(0)
    context = started.context_from_preset(library.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(parts, uneven, library.Objective.KM1)
    context.logging = False
    weigh, price = sum(graph.weights) or 1.0, max(graph.costs)
    hypergraph = started.create_hypergraph(
        context,
        len(graph.weights),
        len(graph.edges),
        list(map(list, graph.edges)),
        [round(_TOTAL * weight / weigh) for weight in graph.weights],
        [max(round(_TOTAL / 1000 * cost / price), 1) for cost in graph.costs],
    )
    found: list[int] = hypergraph.partition(context).get_partition()
    return found


def _least_first(weights: Sequence[float], parts: int) -> list[int]:
    """Deal vertices that nothing joins: the heaviest first, each to the lightest part so far."""
    heap = [(0.0, part) for part in range(parts)]
    heapify(heap)
    found = [0] * len(weights)
    for vertex in sorted(range(len(weights)), key=lambda v: -weights[v]):
        load, part = heap[0]
        found[vertex] = part
        heapreplace(heap, (load + weights[vertex], part))
    return found


# Blocks and chunks ---------------------------------------------------------------------------


def block_graph(problem: Problem, areas: Ints, blocks: Sequence[tuple[int, int]]) -> Hypergraph:
    """Return the graph of some blocks of a grid: joined by their rows and their columns.

    Args:
        problem: The problem.
        areas: Allowed pairs of every block.
        blocks: (row, column) of each vertex.
    """
    costs = _line_costs(problem, areas.shape)
    lines: dict[tuple[int, int], list[int]] = {}
    for vertex, block in enumerate(blocks):
        for side in range(2):
            lines.setdefault((side, block[side]), []).append(vertex)
    return Hypergraph(
        weights=tuple(float(areas[i, j]) for i, j in blocks),
        edges=tuple(map(tuple, lines.values())),
        costs=tuple(costs[side] for side, _ in lines),
    )


def chunk_homes(problem: Problem, cells: Cells, parts: int, gpus: int) -> tuple[Sharding, Sharding]:
    """Deal chunks of queries and keys to ranks, so that as little as can be moves.

    Args:
        problem: The problem.
        cells: Who computes each block of an even grid.
        parts: Chunks of a rank on average; no rank gets more than twice as many.
        gpus: Ranks of a node; what a neighbour computes with counts half.

    Returns:
        The same value twice for self-attention.
    """
    ranks, (row, column) = problem.cp, _line_costs(problem, (len(cells), len(cells[0])))
    saved = np.zeros((2, len(cells), ranks))  # bytes that need not move, by side, chunk and rank
    for i, line in enumerate(cells):
        for j, rank in enumerate(line):
            if rank is not None:
                saved[0, i, rank], saved[1, j, rank] = row, column
    queries = split(problem.seqlen_q, len(cells))
    if problem.seqlen_q == problem.seqlen_kv:
        both = Sharding(queries, _dealt(saved.sum(axis=0), _ROOM * parts, gpus))
        return both, both
    keys = split(problem.seqlen_kv, len(cells[0]))
    rows, columns = (_dealt(side, _ROOM * parts, gpus) for side in saved)
    return Sharding(queries, rows), Sharding(keys, columns)


def _line_costs(problem: Problem, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the bytes of a chunk of queries, and of keys, that visits a rank and goes home."""
    each = [line_bytes(problem, way) for way in Direction]
    return sum(row for row, _ in each) / shape[0], sum(column for _, column in each) / shape[1]


def _dealt(saved: NDArray[np.float64], most: int, gpus: int) -> tuple[tuple[int, ...], ...]:
    """Give each chunk to a rank, what saves most first."""
    ranks = saved.shape[1]
    near = saved.reshape(len(saved), -1, gpus).max(axis=2).repeat(gpus, axis=1)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    free = set(range(len(saved)))
    for place in np.argsort(-(saved + near / 2), axis=None, kind="stable").tolist():
        chunk, rank = divmod(place, ranks)
        if chunk in free and len(owned[rank]) < most:
            owned[rank].append(chunk)
            free.discard(chunk)
    return tuple(tuple(sorted(own)) for own in owned)
