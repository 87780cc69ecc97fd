"""Blocks of keys chosen at random for each block of queries: what selection costs, not its maths.

In trained sparse attention an indexer chooses the keys of each query by their content, so a plan
cannot know them; DeepSeek-V3.2 (arXiv:2512.02556, section 2.1) has the 2048 best of them for each
query. Here a seed chooses as many blocks before the query's own, which is always seen, causally:
the same area and the same kind of scatter, for kernels, transfers and balance.
"""

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np

from patterns.areas import Ints
from patterns.geometry import Band
from patterns.kind import BuiltMask, Kind, Values, whole_parameter
from patterns.pattern import Bools

_MOST_BLOCKS = 4096
"""Along the sequence: the table of choices has the square of it."""


@dataclass(frozen=True, eq=False)
class SelectedBlocks:
    """Keys up to the query are allowed where their block is chosen for the query's block.

    Attributes:
        table: Whether a block of keys is chosen, shape (blocks of queries, blocks of keys).
        block: Tokens of a block.
    """

    table: Bools
    block: int

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        return np.asarray(self.table[q // self.block, k // self.block] & (k <= q))


def choices(blocks: int, topk: int, seed: int) -> list[list[int]]:
    """Choose, for each block, blocks up to it: its own, and others before it at random.

    Args:
        blocks: Blocks of the sequence.
        topk: How many to choose, the own one included; all where there are fewer.
        seed: Of the choice, which is the same in every process.
    """
    random, chosen = Random(seed), []
    for own in range(blocks):
        earlier = list(range(own))
        for at in range(min(topk - 1, own)):  # a shuffle that ends early
            other = at + int(random.random() * (own - at))
            earlier[at], earlier[other] = earlier[other], earlier[at]
        chosen.append([*sorted(earlier[: topk - 1]), own])
    return chosen


def _random_topk(values: Values, seqlen: int, _: int) -> BuiltMask:
    block, topk, seed = (int(values[name]) for name in ("block", "topk", "seed"))
    blocks = -(-seqlen // block)
    if blocks > _MOST_BLOCKS:
        raise ValueError(
            f"random_topk: block ({block}) makes {blocks} blocks of {seqlen} tokens, and must make "
            f"at most {_MOST_BLOCKS}; try block={-(-seqlen // _MOST_BLOCKS)}"
        )
    table = np.zeros((blocks, blocks), dtype=np.bool_)
    bands: list[Band] = []
    for row, columns in enumerate(choices(blocks, topk, seed)):
        table[row, columns] = True
        bands += _row(row, columns, block, seqlen)
    return BuiltMask(bands=tuple(bands), predicate=SelectedBlocks(table, block))


def _row(row: int, columns: list[int], block: int, seqlen: int) -> list[Band]:
    """Return one block of queries: runs of neighbouring blocks, and its own block."""
    q0, q1 = row * block, min((row + 1) * block, seqlen)
    others = columns[:-1]
    starts = [at for at, b in enumerate(others) if not at or others[at - 1] != b - 1]
    runs = [(others[a], others[b - 1] + 1) for a, b in pairwise([*starts, len(others)])]
    return [
        *(Band(q0=q0, q1=q1, k0=first * block, k1=last * block) for first, last in runs),
        Band(q0=q0, q1=q1, k0=q0, k1=q1, lo=0),
    ]


RANDOM_TOPK = Kind(
    summary="a block of queries sees `topk` blocks of keys: its own, and others before it at "
    "random; a model of what selection costs",
    build=_random_topk,
    # 16 blocks of 128 tokens: the 2048 keys of DeepSeek-V3.2 (arXiv:2512.02556, section 2.1)
    parameters={
        "block": whole_parameter(128, least=1),
        "topk": whole_parameter(16, least=1, most=_MOST_BLOCKS),
        "seed": whole_parameter(0, least=0, most=(1 << 32) - 1),
    },
    cross=False,
    sample=lambda seqlen: f"block={seqlen // 11 + 1},topk=4,seed=5",
)
