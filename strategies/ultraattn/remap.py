"""The order in which devices own the blocks of the sequence: given, named or found.

An order lists blocks by place: entry p is the block at place p, and device d owns the places from
p * devices // blocks = d. Three sources: the user's own; `modulo`, which gathers the residues of
a stride, the paper's map c mod m; and a search for groups of blocks that need few others.

Source: UltraAttn (SC'25), Figure 4: the context remap; the paper leaves the search open.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.ultraattn.blocks import Grid
from strategies.ultraattn.solver.instance import even_owners

BlockOrder = tuple[int, ...]
_RESTARTS = 6
_PROMISING = 2


def modulo(blocks: int, stride: int) -> BlockOrder:
    """Return the order that gathers the blocks of each residue of `stride`.

    Raises:
        ValueError: The stride is not in 1..blocks.
    """
    if not 1 <= stride <= blocks:
        raise ValueError(f"remap: stride ({stride}) must be in 1..{blocks}, the number of blocks")
    return tuple(sorted(range(blocks), key=lambda block: (block % stride, block)))


def checked(order: Sequence[int], blocks: int) -> BlockOrder:
    """Return a given order.

    Raises:
        ValueError: The order is not a permutation of the blocks.
    """
    if sorted(order) != list(range(blocks)):
        raise ValueError(f"remap: order ({list(order)}) must be a permutation of 0..{blocks - 1}")
    return tuple(order)


def orders(
    grid: Grid, levels: Sequence[int], *, seed: int = 0, given: Sequence[BlockOrder] = ()
) -> list[BlockOrder]:
    """Return the orders that look best: row owners fetch less than where blocks lie as they come.

    Candidates are every modulo, the `given` ones, and groups of blocks found by swaps that need few
    chunks from one another. The few that need the fewest are returned, for a planner to try.

    Args:
        grid: Square: rows and columns are the same blocks in token order.
        levels: Numbers of devices, the most important first: nodes, then all GPUs.
        seed: Of the search.
        given: More candidates, which come first where they are as good.
    """
    table = np.array(grid.work) > 0
    plain = [_needs(table, range(len(table)), devices) for devices in levels]
    ranked = _ranked(grid, levels, seed, given)
    return [
        order
        for order in ranked[:_PROMISING]
        if [_needs(table, order, devices) for devices in levels] < plain
    ]


def _ranked(
    grid: Grid, levels: Sequence[int], seed: int, given: Sequence[BlockOrder]
) -> list[BlockOrder]:
    """Return all candidates but the tokens' own order, fewest needs first."""
    blocks = len(grid.work)
    pool = [checked(order, blocks) for order in given]
    pool += [modulo(blocks, stride) for stride in range(2, blocks)]
    pool += _grouped(grid, levels[0], seed)
    table = np.array(grid.work) > 0
    return sorted(
        dict.fromkeys(order for order in pool if order != tuple(range(blocks))),
        key=lambda order: [_needs(table, order, devices) for devices in levels],
    )


def _needs(table: NDArray[np.bool_], order: Sequence[int], devices: int) -> tuple[int, int]:
    """Return how many chunks row owners would fetch: by the busiest device, and in all."""
    owner = np.empty(len(order), dtype=np.int64)
    owner[list(order)] = even_owners(len(order), devices)
    fetched = [int((table[owner == d].any(axis=0) & (owner != d)).sum()) for d in range(devices)]
    return max(fetched), sum(fetched)


def _grouped(grid: Grid, devices: int, seed: int) -> list[BlockOrder]:
    """Return orders from swap descent on the volume, from random orders."""
    rng = np.random.default_rng(seed)
    table = np.array(grid.work) > 0
    blocks = len(table)
    owner = even_owners(blocks, devices)
    found = []
    end = time.process_time() + 0.5
    for _ in range(_RESTARTS):
        order = rng.permutation(blocks).tolist()
        cost = sum(_needs(table, order, devices))
        improved = True
        while improved and time.process_time() < end:
            improved = False
            for a in range(blocks):
                for b in range(a + 1, blocks):
                    if owner[a] == owner[b]:
                        continue
                    order[a], order[b] = order[b], order[a]
                    after = sum(_needs(table, order, devices))
                    if after < cost:
                        cost, improved = after, True
                    else:
                        order[a], order[b] = order[b], order[a]
        groups = [[order[p] for p in range(blocks) if owner[p] == d] for d in range(devices)]
        found.append(tuple(block for group in sorted(map(sorted, groups)) for block in group))
    return found
