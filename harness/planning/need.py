"""Chunks cut where some other rank's need of them ends, so that transfers carry that and no more.

A rank needs the keys that its queries attend. Where that run ends inside a chunk of another rank,
the chunk is cut there, and what moves are the parts that are needed::

    window, 3 ranks     k0        k1        k2
    q0                  ####.
    q1                     ##|#########         rank 1 needs the end of k0: k0 is cut at |
    q2                               ##|####    rank 2 needs the end of k1

The parts stay with their owner in their order, so that tiles over several of them are the same
kernel calls as before (`kernel_calls.runs_of` joins parts that continue one another).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harness.plan.sharding import Sharding
from patterns.areas import Ints
from patterns.geometry import Chunk
from patterns.pattern import Pattern
from patterns.reach import Runs, attended_keys, attending_queries, merged

Chunks = tuple[int, ...]


class NeedCut(StrEnum):
    """Which tokens a strategy moves to ranks that need some of them, and so may cut.

    WHOLE: None. KEYS: Keys, and their gradients. BOTH: Queries and their results too. BLOCKS: Both,
    where any rank may compute any query chunk with any key chunk.
    """

    WHOLE = "whole"
    KEYS = "keys"
    BOTH = "both"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Parts:
    """A sharding after its chunks were cut.

    Attributes:
        sharding: Parts and their owners.
        of: Per chunk before, its parts in order.
    """

    sharding: Sharding
    of: tuple[Chunks, ...]


def uncut(sharding: Sharding) -> Parts:
    """Return a sharding as it is."""
    return Parts(sharding, tuple((c,) for c in range(len(sharding.chunks))))


def cut_at_need(
    pattern: Pattern,
    queries: Sharding,
    keys: Sharding,
    cut: NeedCut,
    groups: Sequence[int],
    align: int = 1,
) -> tuple[Parts, Parts]:
    """Cut queries and keys where some other group's need of them ends.

    Args:
        pattern: Who attends whom.
        queries: Query chunks and their owners.
        keys: Key chunks and their owners.
        cut: Which of the two.
        groups: Per rank, the number of the group that holds its tokens together. What its members
            need of one another cuts nothing; tokens that no rank at all needs are cut off.
        align: Cuts are multiples of so many tokens from the start of a chunk, outwards, so that
            at least what is needed is on one side. It doubles while cuts are too many.
    """
    if cut is NeedCut.WHOLE:
        return uncut(queries), uncut(keys)
    apart = cut is NeedCut.BLOCKS
    of_rows, of_columns = (_parties(s, None if apart else groups) for s in (queries, keys))
    some = not apart and len(set(groups)) < len(groups)
    needs = _edges(attended_keys(pattern, queries.chunks), of_rows, some)
    k = _cut(keys, needs, _NO_PARTY if apart else of_columns, align)
    if cut is NeedCut.KEYS:
        return uncut(queries), k
    needs = _edges(attending_queries(pattern, keys.chunks), of_columns, some)
    return _cut(queries, needs, _NO_PARTY if apart else of_rows, align), k


_MOST_CUTS = 2048
"""Of one sequence: where needs have more ends, as with many random blocks, `align` grows."""

_ALL_TOGETHER, _NO_PARTY = -1, -2
"""Whose need: that of all ranks together, which ends in every group's chunks; nobody's."""


def _parties(sharding: Sharding, groups: Sequence[int] | None) -> Ints:
    """Per chunk, whose need it adds to: the group of its owner; None = its own."""
    if groups is None:
        return np.arange(len(sharding.chunks))
    found = np.full(len(sharding.chunks), _NO_PARTY)
    for rank, owned in enumerate(sharding.owned):
        found[list(owned)] = groups[rank]
    return found


@dataclass(frozen=True, slots=True)
class _Edges:
    """Ends of needs in ascending order, columns of shape (edges,)."""

    at: Ints
    begins: NDArray[np.bool_]
    party: Ints


def _edges(runs: Runs, party: Ints, together: bool) -> _Edges:
    found = [merged(runs, party)]
    if together:
        every = merged(runs, np.zeros_like(party))
        found.append(every._replace(chunk=np.full_like(every.chunk, _ALL_TOGETHER)))
    at = np.concatenate([part for each in found for part in (each.start, each.stop)])
    whose = np.concatenate([each.chunk for each in found for _ in range(2)])
    begins = np.concatenate(
        [np.full(len(each.start), first) for each in found for first in (True, False)]
    )
    order = np.argsort(at, kind="stable")
    return _Edges(at[order], begins[order], whose[order])


def _cut(sharding: Sharding, edges: _Edges, party: Ints | int, align: int) -> Parts:
    """Cut the chunks of a sharding at the ends of the needs of others than their own party."""
    own = np.broadcast_to(party, len(sharding.chunks)).tolist()
    pairs = list(zip(sharding.chunks, own, strict=True))
    cuts = [_inside(chunk, edges, mine, align) for chunk, mine in pairs]
    while sum(map(len, cuts)) > _MOST_CUTS:
        align *= 2
        cuts = [_inside(chunk, edges, mine, align) for chunk, mine in pairs]
    if not any(cuts):
        return uncut(sharding)
    chunks: list[range] = []
    of: list[Chunks] = []
    for chunk, inside in zip(sharding.chunks, cuts, strict=True):
        of.append(tuple(range(len(chunks), len(chunks) + len(inside) + 1)))
        chunks += [chunk[a:b] for a, b in pairwise((0, *inside, len(chunk)))]
    owned = tuple(tuple(part for c in mine for part in of[c]) for mine in sharding.owned)
    return Parts(Sharding(tuple(chunks), owned), tuple(of))


def _inside(chunk: Chunk, edges: _Edges, own: int, align: int) -> list[int]:
    """Where to cut a chunk, in tokens from its start, ascending.

    A stripe is not cut: ranks that attend to some of it lack single tokens at most, each where a
    document ends, and without them the rest would be many pieces.
    """
    if len(chunk) <= 1 or chunk.step > 1:
        return []
    near = slice(*np.searchsorted(edges.at, (chunk[0], chunk[-1]), side="right").tolist())
    others = edges.party[near] != own
    index = -((chunk.start - edges.at[near][others]) // chunk.step)
    outwards = np.where(edges.begins[near][others], index // align, -(-index // align)) * align
    cuts: list[int] = np.unique(outwards[(outwards > 0) & (outwards < len(chunk))]).tolist()
    return cuts
