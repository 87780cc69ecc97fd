"""Documents and the ranks that share them: how tokens are dealt, and a ring for every group.

A document of a group lies head-tail over its ranks, as WLB-LLM (arXiv:2503.17924) and Transformer
Engine's thd layout deal it; documents of one rank stay whole. Groups may overlap: a rank may keep
short documents to itself and share a long one with many.

    documents     a a a a a a a a   b b b b   c c   d d
    group         ranks 0-3         ranks 2-3 0     1
    rank 0        a0 a7             .         c
    rank 1        a1 a6             .         .     d
    rank 2        a2 a5             b0 b3
    rank 3        a3 a4             b1 b2
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.errors import UnsupportedError
from harness.plan.dealing import MOST_CHUNKS, head_tail
from harness.plan.sharding import Sharding
from harness.planning.builder import Chunks, PlanBuilder
from harness.planning.rings import Holder, Ring, RingSeat

Members = tuple[int, ...]
"""Ranks that share a document, in the order of their ring."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Tokens side by side, a document or several short ones, and who shares them.

    Attributes:
        tokens: Positions.
        members: Ranks; each takes part in the attention of these tokens.
    """

    tokens: range
    members: Members


Grouping = tuple[Shared, ...]
"""All tokens of a sequence, in order."""


def deal_groups(grouping: Grouping, ranks: int) -> Sharding:
    """Deal the tokens of every group to its members.

    Args:
        grouping: Covers the sequence.
        ranks: How many there are; those of no group get nothing.

    Raises:
        UnsupportedError: There are too many chunks.
    """
    parts = sum(
        1 if len(each.members) == 1 else min(len(each.tokens), 2 * len(each.members))
        for each in grouping
    )
    if parts > MOST_CHUNKS:
        raise UnsupportedError(
            f"groups: {len(grouping)} documents in groups make {parts} chunks, and must make at "
            f"most {MOST_CHUNKS}",
            ("fewer ranks", "longer documents"),
        )
    found: list[tuple[range, int]] = []
    for members, documents in _by_members(grouping).items():
        if len(members) == 1:
            found += [(document, members[0]) for document in documents]
            continue
        part = head_tail(documents, len(members))
        found += [
            (part.chunks[chunk], rank)
            for rank, owned in zip(members, part.owned, strict=True)
            for chunk in owned
        ]
    found.sort(key=lambda each: each[0].start)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for chunk, (_, rank) in enumerate(found):
        owned[rank].append(chunk)
    return Sharding(tuple(chunk for chunk, _ in found), tuple(map(tuple, owned)))


def group_rings(b: PlanBuilder, grouping: Grouping) -> list[Ring]:
    """Return a ring for every group; documents of one rank are a ring of one step.

    Args:
        b: Who owns what, as `deal_groups` dealt it: queries and keys alike.
        grouping: The groups.
    """
    starts = {chunk.start: number for number, chunk in enumerate(b.queries.chunks)}
    owner = b.queries.owner()
    alone: list[list[int]] = [[] for _ in range(b.problem.cp)]
    rings: list[Ring] = []
    for members, documents in _by_members(grouping).items():
        mine: dict[int, list[int]] = {rank: [] for rank in members}
        for chunk in _chunks_of(documents, b.queries.chunks, starts):
            mine[owner[chunk]].append(chunk)
        if len(members) == 1:
            alone[members[0]] += mine[members[0]]
        else:
            rings.append(_ring(b, members, {rank: tuple(own) for rank, own in mine.items()}))
    heads = b.problem.all_heads
    stay = tuple(RingSeat(tuple(own), b.key_parts(own), heads) for own in map(sorted, alone))
    return [Ring(stay, 1, _itself, _from_itself), *rings]


def _by_members(grouping: Iterable[Shared]) -> dict[Members, list[range]]:
    found: dict[Members, list[range]] = {}
    for each in grouping:
        found.setdefault(each.members, []).append(each.tokens)
    return found


def _chunks_of(
    documents: Sequence[range], chunks: Sequence[range], starts: dict[int, int]
) -> Iterable[int]:
    """Chunks of documents, in order: a cut lies at the start of every document."""
    for document in documents:
        chunk, at = starts[document.start], document.start
        while at < document.stop:
            yield chunk
            at = chunks[chunk].stop
            chunk += 1


def _ring(b: PlanBuilder, members: Members, mine: dict[int, Chunks]) -> Ring:
    """Return a ring of some ranks, in which the others have no part."""
    at = {rank: position for position, rank in enumerate(members)}
    size, heads = len(members), b.problem.all_heads

    def source(rank: int, step: int) -> int:
        return members[(at[rank] - step) % size] if rank in at else rank

    def came_from(rank: int, step: int) -> Holder:
        return source(rank, 1), step - 1

    owned = [mine.get(rank, ()) for rank in range(b.problem.cp)]
    return Ring(
        tuple(RingSeat(own, b.key_parts(own), heads) for own in owned), size, source, came_from
    )


def _itself(rank: int, step: int) -> int:
    del step
    return rank


def _from_itself(rank: int, step: int) -> Holder:
    return rank, step - 1
