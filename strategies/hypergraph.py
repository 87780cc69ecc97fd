"""Blocks of work and the data that they share as a hypergraph, cut between nodes, then GPUs.

The work of every block of queries and keys is a vertex. An edge joins the blocks of a row, which
share a chunk of queries, another those of a column, which share a chunk of keys; what it costs is
what that chunk moves to each part that lacks it. The cut makes parts of even work with the least
bytes between them. Chunks then go where they are needed most, to no rank more than twice the even
share, and kernels and transfers are joined where that pays.

        k0 k1 k2 k3     edges   q2: (2,1) (2,2)       cut in two    part 0: (0,0) (1,1)
    q0  .                       k1: (1,1) (2,1)                     part 1: (2,1) (2,2) (3,3)
    q1     .                                          k1 moves once, from part 0 to part 1
    q2     .  .
    q3           .

It allocates blocks as `ultraattn` does, but cuts once with a library where that solves and
compares: what the integer programs gain shows beside it.
"""

from dataclasses import dataclass, replace

import numpy as np

from harness.base.remembered import remembered
from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.reader import MOST_CHUNKS
from harness.plan.sharding import split
from harness.planning.block_assignment import Allocation
from harness.planning.block_transfers import plan_allocation
from harness.planning.hypergraph import (
    INSTALL,
    block_graph,
    can_cut,
    chunk_homes,
    cut_hypergraph,
)
from harness.planning.need import NeedCut
from harness.planning.options import option
from harness.planning.planned_for import USUAL, machine_of, nodes_and_gpus
from harness.planning.strategy import Checks, Context, Strategy
from harness.schedule.kernel_tiling import tile_kernels

_UNEVEN = 0.02  # of the mean work: what a part may have too much at each of the two levels
_EVEN = 1.05  # of the mean work: more chunks are not tried for less
_PARTS = (2, 4, 8)  # chunks of a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    parts: int | None = option(
        None, "chunks of a rank", unset="2, 4 or 8: the fewest that the cut makes even to 5 %"
    )


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan the blocks where the cut has them; legal for every problem.

    Raises:
        UnsupportedError: The library for the cut is not installed.
    """
    gpus = nodes_and_gpus(problem.cp, context.gpus_per_node)[1]
    allocation = _cut(problem, options, context)
    found = plan_allocation(
        problem,
        name,
        direction,
        allocation,
        gpus_per_node=gpus,
        cut=NeedCut.BLOCKS,
        align=context.align,
    )
    return tile_kernels(found, machine_of(problem, context)).plan


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the chunks of a rank."""
    del direction
    chunks = len(_cut(problem, options, context).queries.chunks)
    return replace(options, parts=chunks // problem.cp)


def _cut(problem: Problem, options: Options, context: Context) -> Allocation:
    if not can_cut():
        raise UnsupportedError("hypergraph: the library mtkahypar is not installed", (INSTALL,))
    nodes, _ = nodes_and_gpus(problem.cp, context.gpus_per_node)
    usual = replace(problem, **USUAL)
    _refuse_many(problem, options)
    for parts in _PARTS if options.parts is None else (options.parts,):
        allocation, uneven = _allocation(usual, parts, nodes)
        if uneven <= _EVEN:
            break
    return allocation


def _refuse_many(problem: Problem, options: Options) -> None:
    """Refuse more chunks than a plan may have before their pairs are looked at."""
    chunks = problem.cp * (options.parts or 1)
    if chunks > MOST_CHUNKS:
        raise UnsupportedError(
            f"hypergraph: parts ({options.parts}) of {problem.cp} ranks are {chunks} chunks, more "
            f"than the {MOST_CHUNKS} that a plan may have",
            (f"hypergraph:parts={MOST_CHUNKS // problem.cp}",),
        )


@remembered  # both directions, and whoever deals tokens, ask for the same
def _allocation(problem: Problem, parts: int, nodes: int) -> tuple[Allocation, float]:
    """Cut the work of a problem between nodes, then each node's share between its GPUs.

    Returns:
        Who computes what, and the work of the fullest rank over the mean.
    """
    ranks, gpus = problem.cp, problem.cp // nodes
    sides = [split(length, parts * ranks) for length in (problem.seqlen_q, problem.seqlen_kv)]
    areas = problem.pattern.areas(*sides)
    blocks = [(i, j) for i, j in np.argwhere(areas > 0).tolist()]
    graph = block_graph(problem, areas, blocks)
    node_of = cut_hypergraph(graph, nodes, _UNEVEN)
    cells: list[list[int | None]] = [[None] * len(sides[1]) for _ in sides[0]]
    work = [0] * ranks
    for node in range(nodes):
        inside = [vertex for vertex, at in enumerate(node_of) if at == node]
        gpu_of = cut_hypergraph(graph.among(inside), gpus, _UNEVEN)
        for vertex, gpu in zip(inside, gpu_of, strict=True):
            i, j = blocks[vertex]
            cells[i][j] = rank = node * gpus + gpu
            work[rank] += int(areas[i, j])
    allotted = tuple(map(tuple, cells))
    queries, keys = chunk_homes(problem, allotted, parts, gpus)
    uneven = max(work) * ranks / sum(work) if sum(work) else 1.0
    return Allocation(queries=queries, keys=keys, cells=allotted), uneven


STRATEGY = Strategy(
    name="hypergraph",
    summary="cuts blocks of work between nodes and GPUs with the least bytes between them",
    paper="DCP (SOSP'25), arXiv:2510.10620",
    plan=plan,
    defaults=Options(),
    resolve=resolve,
    timed=True,
    checks=Checks(options=("parts=3",)),
)
