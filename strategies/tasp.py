"""TASP: as many rings as an all-to-all network has disjoint ones, a part of each key chunk in each.

A ring of n ranks uses n of the n (n - 1) links between them. They fall into n - 1 rings that share
no link in either direction, so each chunk is cut into n - 1 parts, and each part goes its own way.
At every step a rank sends a part to every other rank, and attends what came in one tile.

    cp = 5, 4 rings            step    0              1              2
    0 -> 1 -> 3 -> 2 -> 4      rank 0  a0 b0 c0 d0    a4 b2 c1 d3    a2 b1 c3 d4    ...
    1 -> 2 -> 0 -> 3 -> 4      rank 1  a1 b1 c1 d1    a0 b4 c3 d2    a4 b3 c2 d0    ...
    2 -> 3 -> 1 -> 0 -> 4
    3 -> 0 -> 2 -> 1 -> 4      (each closes, 4 -> its first)    c3: part c of the keys of rank 3

For an odd n the rings are zigzags through Z_(n-1), turned by one for each ring and closed over the
last rank (Walecki). For an even n, n - 2 such rings leave out one rank; it is put into one link of
each, and the links that it replaces, end to end, are ring n - 1: a search for them, found for
8 <= n <= 40. There are none for 4 and 6 (Tillson 1980, J. Combinatorial Theory B 29, 68-74); there,
and where the search gives up, n - 2 rings run: (n - 2) / 2 of them and the same backwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from harness.errors import UnsupportedError
from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.reader import MOST_CHUNKS
from harness.plan.sharding import Placement, cut_each
from harness.planning.builder import PlanBuilder
from harness.planning.closed_forms import ring_volume
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, PRUNE, option
from harness.planning.rings import cycle, rings_attention
from harness.planning.strategy import Checks, Context, Strategy, with_chunk

Order = tuple[int, ...]
_MOST_TRIES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may choose."""

    prune: bool = option(True, PRUNE)
    placement: Placement = option(Placement.ZIGZAG, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan disjoint rings that turn at the same time.

    Raises:
        UnsupportedError: The parts are more chunks than a plan may have.
    """
    dealt = deal_tokens(problem.pattern, problem.cp, options.placement, options.chunk)
    chunks = len(dealt[1].chunks)
    _refuse_many(max(1, problem.cp - 2), chunks)  # before rings are looked for, which takes seconds
    orders = disjoint_rings(problem.cp)
    _refuse_many(len(orders), chunks)
    queries, keys = (cut_each(sharding, len(orders)) for sharding in dealt)
    b = PlanBuilder(
        problem, name, direction, queries, keys, prune=options.prune, align=context.align
    )
    rings_attention(b, [cycle(b, order, way, len(orders)) for way, order in enumerate(orders)])
    return b.build()


def _refuse_many(rings: int, chunks: int) -> None:
    """Refuse more parts than a plan may have chunks, where there are so many rings or more."""
    if rings * chunks > MOST_CHUNKS:
        raise UnsupportedError(
            f"tasp: {rings} parts of each of {chunks} chunks are more than the {MOST_CHUNKS} "
            "chunks that a plan may have",
            ("tasp:placement=contiguous at cp <= 64", "ring:direction=both"),
        )


@lru_cache(maxsize=64)
def disjoint_rings(ranks: int) -> tuple[Order, ...]:
    """Return rings through all ranks of which no two share a link in the same direction.

    They are `ranks` - 1, or one fewer where so many do not exist or are not found; see the module.
    """
    if ranks <= 2:
        return (tuple(range(ranks)),)
    if ranks % 2:
        return _turned_zigzags(ranks, ranks - 1)
    rings = _turned_zigzags(ranks - 1, ranks - 2)
    through = _one_link_of_each(rings) if ranks > 6 else None
    if through is None:
        half = _turned_zigzags(ranks, ranks // 2 - 1)
        return (*half, *(order[::-1] for order in half))
    after = dict(pairwise(through))
    opened = []
    for order in rings:
        at = next(i for i, rank in enumerate(order) if after.get(rank) == _next(order, i))
        opened.append((*order[: at + 1], ranks - 1, *order[at + 1 :]))
    return (*opened, (*through, ranks - 1))


def _turned_zigzags(ranks: int, rings: int) -> tuple[Order, ...]:
    """Zigzags 0, 1, -1, 2, -2, ... through all ranks but the last, turned by one for each ring."""
    m = ranks - 1
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(m)]
    return tuple((*((rank + turn) % m for rank in zigzag), m) for turn in range(rings))


def _next(order: Sequence[int], at: int) -> int:
    return order[(at + 1) % len(order)]


def _one_link_of_each(rings: Sequence[Order]) -> Order | None:
    """Find a path through all ranks that takes one link of each ring; None after many tries.

    Each link is part of one ring. Ranks with the fewest ways on are tried first.
    """
    ranks = range(len(rings) + 1)
    ring_of = {(a, _next(o, i)): ring for ring, o in enumerate(rings) for i, a in enumerate(o)}
    tries = 0

    def ways_on(path: Order, used: frozenset[int], at: int) -> list[int]:
        return [r for r in ranks if r != at and r not in path and ring_of[at, r] not in used]

    def longer(path: Order, used: frozenset[int]) -> Order | None:
        nonlocal tries
        tries += 1
        if tries > _MOST_TRIES or len(path) == len(ranks):
            return path if len(path) == len(ranks) else None
        ways = ways_on(path, used, path[-1])
        for rank in sorted(ways, key=lambda rank: len(ways_on(path, used, rank))):
            found = longer((*path, rank), used | {ring_of[path[-1], rank]})
            if found is not None:
                return found
        return None

    return longer((ranks[-1],), frozenset())


_VOLUME = (
    "TASP (arXiv:2509.26541): the ring's volume (arXiv:2310.01889, section 3), spread over the "
    "links; a part of each block in each ring"
)

STRATEGY = Strategy(
    name="tasp",
    summary="disjoint rings over all links, a part of each key chunk in each",
    paper="Wang et al., TASP, arXiv:2509.26541",
    plan=plan,
    defaults=Options(),
    resolve=with_chunk,
    volume=partial(ring_volume, _VOLUME),
    compared=("placement=contiguous",),
    checks=Checks(options=("placement=contiguous,prune=false",)),
)
