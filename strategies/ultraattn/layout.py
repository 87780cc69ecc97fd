"""Where tokens live: how fine the sequence is cut, in which order blocks lie, and who owns them.

A layout lists coarse chunks in the order in which nodes own them, each as the pieces that the
node's GPUs own in order. Both directions of a problem share one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from math import lcm

import numpy as np

from harness.plan.problem import Problem
from harness.plan.sharding import Sharding, split, zigzag
from patterns import Pattern, remap_order
from strategies.ultraattn.blocks import grid_of, imbalance, partition_degree
from strategies.ultraattn.nodes import Side
from strategies.ultraattn.remap import BlockOrder, orders
from strategies.ultraattn.solver.instance import even_owners

EPSILON = 0.1  # the paper publishes no value
_EVEN = 0.02  # imbalance that twice as many parts are not tried for
_FINEST = 64  # parts that a pattern's edges are looked for in
_MOST = 32  # parts per node: a tiling of more takes long and gains little
_HALVED = 4  # nodes: to more, two chunks each are more than a search gets through
_ORDERED = 32  # blocks that an order is searched for


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who owns what.

    Attributes:
        queries: Query chunks.
        keys: Key chunks.
        order: The order of the sequence's blocks; empty when it is the tokens' own.
    """

    queries: Side
    keys: Side
    order: BlockOrder = ()


def layouts(problem: Problem, nodes: int, gpus: int, *, remap: bool) -> Iterator[Layout]:
    """Yield layouts that are worth a plan, the tokens' own order first.

    Args:
        problem: The problem.
        nodes: How many.
        gpus: GPUs per node.
        remap: Other orders too.
    """
    size = sequence_parts(problem.pattern, nodes, gpus)
    yield _plain(problem, size, nodes)
    if 2 * size <= _MOST * nodes and cut_imbalance(problem.pattern, size, nodes * gpus) > _EVEN:
        yield _plain(problem, 2 * size, nodes)
    if 1 < nodes <= _HALVED:
        yield _halved(problem, size, nodes, gpus)
    if not remap or problem.seqlen_q != problem.seqlen_kv:
        return
    for order in found_orders(problem, size, nodes, gpus):
        yield _ordered(problem, size, nodes, order)
    ranks, lighter = nodes * gpus, problem.heads_kv < problem.heads_q
    size = lcm(size, 2 * ranks)
    if nodes > 1 and lighter and size <= _MOST * nodes and evened(problem, ranks):
        yield _ordered(problem, size, nodes, zigzag_order(problem, ranks))


def own_layout(problem: Problem, nodes: int, gpus: int, *, remap: bool) -> Layout:
    """Return the one layout of the public code: the pattern's own order, if it has one.

    A causal pattern is cut into two chunks to a node on 2 and 4 nodes, any other into one.

    Source: UltraAttn (SC'25), the public code: 4, 8 and 8 chunks on 2, 4 and 8 nodes if causal.

    Args:
        problem: The problem.
        nodes: How many.
        gpus: GPUs per node.
        remap: False takes the tokens' own order all the same.
    """
    size = sequence_parts(problem.pattern, nodes, gpus)
    if 1 < nodes <= _HALVED and problem.pattern.is_staircase:
        return _halved(problem, size, nodes, gpus)
    own = remap_order(problem.pattern) if remap else None
    if own is None or problem.seqlen_q != problem.seqlen_kv or size % len(own):
        return _plain(problem, size, nodes)
    return _ordered(problem, size, nodes, tuple(own))


def _plain(problem: Problem, size: int, coarse: int) -> Layout:
    return Layout(
        queries=_sides(split(problem.seqlen_q, size), coarse),
        keys=_sides(split(problem.seqlen_kv, size), coarse),
    )


def _halved(problem: Problem, size: int, nodes: int, gpus: int) -> Layout:
    """Return two chunks to a node, so that blocks which a node may give away are smaller."""
    return _plain(problem, lcm(size, 2 * nodes * gpus), 2 * nodes)


def _ordered(problem: Problem, size: int, nodes: int, order: BlockOrder) -> Layout:
    side = _sides(blocks_in_order(problem.seqlen_q, size, order), nodes)
    return Layout(queries=side, keys=side, order=order)


def sequence_parts(pattern: Pattern, nodes: int, gpus: int) -> int:
    """Return into how many parts the sequence is cut.

    A multiple of the ranks; of the pattern's own blocks too, where that is not too fine; and of
    those the first whose load can be even enough (see `blocks.partition_degree`).
    """
    ranks = nodes * gpus
    step = lcm(ranks, grain(pattern))
    if step > _MOST * nodes:
        step = ranks
    size = partition_degree(pattern, ranks, EPSILON, step=step)
    return size if size <= _MOST * nodes else step


def cut_imbalance(pattern: Pattern, size: int, ranks: int) -> float:
    """Return r(P) of a pattern cut into `size` parts (see `blocks.imbalance`)."""
    chunks = [split(length, size) for length in (pattern.seqlen_q, pattern.seqlen_kv)]
    return imbalance(grid_of(pattern, *chunks), ranks)


@lru_cache(maxsize=256)
def grain(pattern: Pattern) -> int:
    """Return the fewest even parts between which all straight edges of a pattern fall.

    1 for a pattern without any, or with edges that no 64 parts meet.
    """
    rows = {edge for band in pattern.bands for edge in (band.q0, band.q1)}
    columns = {edge for band in pattern.bands for edge in (band.k0, band.k1)}
    for size in range(1, _FINEST + 1):
        if all(
            edges <= {length * i // size for i in range(size + 1)}
            for edges, length in ((rows, pattern.seqlen_q), (columns, pattern.seqlen_kv))
        ):
            return size
    return 1


def found_orders(problem: Problem, size: int, nodes: int, gpus: int) -> list[BlockOrder]:
    """Return orders of the sequence's blocks, the pattern's own first, the most promising next.

    Blocks are those between which the pattern's edges fall, or one per rank.
    """
    own = remap_order(problem.pattern)
    given = [] if own is None else [tuple(own)]
    blocks = lcm(grain(problem.pattern), nodes if nodes > 1 else gpus)
    if blocks > _ORDERED or size % blocks:
        return [order for order in given if size % len(order) == 0]
    pieces = split(problem.seqlen_q, blocks)
    grid = grid_of(problem.pattern, pieces, pieces)
    same = [order for order in given if len(order) == blocks]
    levels = (nodes, nodes * gpus) if nodes > 1 else (gpus,)
    return orders(grid, [n for n in levels if n <= blocks], given=same)


def evened(problem: Problem, ranks: int) -> bool:
    """Whether the rows of a zigzag's ranks are work more even than rows side by side.

    Then nodes balance without queries on the way, which are the heavier where heads share keys.
    """
    pieces = split(problem.seqlen_q, 2 * ranks)
    rows = np.array(grid_of(problem.pattern, pieces, pieces).work).sum(axis=1)
    beside = rows[0::2] + rows[1::2]
    dealt = rows[zigzag_order(problem, ranks),].reshape(ranks, 2).sum(axis=1)
    return bool(dealt.max() < (1 - _EVEN) * beside.max())


def zigzag_order(problem: Problem, ranks: int) -> BlockOrder:
    """Return the order in which each rank owns a block from the head and one from the tail."""
    return tuple(chain.from_iterable(zigzag(problem.seqlen_q, ranks).owned))


def blocks_in_order(seqlen: int, size: int, order: Sequence[int]) -> list[range]:
    """Return a sequence cut into `size` parts, its blocks in an order."""
    fine = split(seqlen, size)
    each = size // len(order)
    return [part for block in order for part in fine[block * each : (block + 1) * each]]


def _sides(fine: Sequence[range], coarse: int) -> Side:
    each = len(fine) // coarse
    return tuple(tuple(fine[c * each : (c + 1) * each]) for c in range(coarse))


def by_rank(side: Side, nodes: int, gpus: int) -> Sharding:
    """Return who owns the tokens of a side, in the fewest chunks: runs of one rank's are one."""
    node_of, gpu_of = even_owners(len(side), nodes), even_owners(len(side[0]), gpus)
    chunks: list[range] = []
    owned: list[list[int]] = [[] for _ in range(nodes * gpus)]
    owners = [(node_of[c], gpu_of[p]) for c in range(len(side)) for p in range(len(side[0]))]
    pieces = list(chain.from_iterable(side))
    starts = [0, *(at for at, _ in enumerate(pairwise(pieces), 1) if _breaks(pieces, owners, at))]
    for start, stop in pairwise([*starts, len(pieces)]):
        node, gpu = owners[start]
        owned[node * gpus + gpu].append(len(chunks))
        chunks.append(range(pieces[start].start, pieces[stop - 1].stop))
    return Sharding(tuple(chunks), tuple(map(tuple, owned)))


def _breaks(pieces: Sequence[range], owners: Sequence[tuple[int, int]], at: int) -> bool:
    return owners[at] != owners[at - 1] or pieces[at].start != pieces[at - 1].stop
