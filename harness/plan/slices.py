"""Where parts lie in wholes: heads in sets of heads, chunks in slabs.

Shared by the executor and the memory ledger, so that both cut alike.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from harness.plan import heads as head_sets
from harness.plan.plan import Plan
from harness.plan.residency import Access, Slab
from harness.plan.tasks import Piece

OffsetRange = tuple[int, int]
Cut = tuple[OffsetRange, OffsetRange]
"""Half-open ranges of rows and of heads."""


@lru_cache(maxsize=4096)
def positions(whole: int, part: int) -> OffsetRange:
    """Where a set of heads lies in the ascending list of a larger set's heads.

    Raises:
        ValueError: The part is not a run of the whole.
    """
    low = (whole & ((part & -part) - 1)).bit_count()
    high = low + part.bit_count()
    inside = head_sets.members(whole)[low:high]
    if sum(1 << head for head in inside) != part:
        raise ValueError(
            f"heads {head_sets.text(part)} are no run of heads {head_sets.text(whole)}"
        )
    return low, high


@lru_cache(maxsize=1024)
def head_runs(heads: int, group: int) -> tuple[Cut, ...]:
    """Split query heads into runs in which each KV head serves equally many.

    Returns:
        Per run, offsets into the ascending query heads and into their ascending KV heads.
    """
    counts: dict[int, int] = {}
    for head in head_sets.members(heads):
        counts[head // group] = counts.get(head // group, 0) + 1
    found: list[Cut] = []
    q, equal = 0, 0
    for kv, count in enumerate(counts.values()):
        if found and count == equal:
            (q0, _), (kv0, _) = found[-1]
            found[-1] = ((q0, q + count), (kv0, kv + 1))
        else:
            found.append(((q, q + count), (kv, kv + 1)))
        q, equal = q + count, count
    return tuple(found)


def runs(whole: Sequence[int], part: Sequence[int]) -> Iterator[list[int]]:
    """Split chunks into runs that lie side by side in `whole`."""
    at = {chunk: index for index, chunk in enumerate(whole)}
    run: list[int] = []
    for chunk in part:
        if run and at[run[-1]] + 1 != at[chunk]:
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


def parts_of(
    plan: Plan, slabs: Sequence[Slab], access: Access, where: Cut
) -> list[tuple[int, Cut | None, Cut]]:
    """Split rows and heads of a piece by the slabs that hold it.

    Args:
        plan: The plan.
        slabs: Its slabs, by id.
        access: The piece, resolved.
        where: The rows and heads of it.

    Returns:
        Per slab: its id, the rows and heads inside it (None = all of it), and the rows and heads
        inside a tensor that covers just `where`.
    """
    piece = access.piece
    rows, heads = where
    parts: list[tuple[int, Cut | None, Cut]] = []
    for segment in access.segments:
        slab = slabs[segment.slab]
        slab_rows = plan.rows(slab.piece, segment.chunks)
        row, end = plan.rows(piece, segment.chunks)
        first, last = max(rows[0], row), min(rows[1], end)
        if first >= last:
            continue
        shift = slab_rows[0] - row
        low, high = positions(piece.heads, segment.heads)
        h0, h1 = max(heads[0], low), min(heads[1], high)
        if h0 >= h1:
            continue
        up = positions(slab.piece.heads, segment.heads)[0] - low
        cut = ((first + shift, last + shift), (h0 + up, h1 + up))
        inner = ((first - rows[0], last - rows[0]), (h0 - heads[0], h1 - heads[0]))
        everything = ((0, plan.tokens(slab.piece)), (0, slab.piece.heads.bit_count()))
        parts.append((slab.id, None if cut == everything else cut, inner))
    return parts


def landing(plan: Plan, whole: Piece, piece: Piece) -> Iterator[tuple[Cut, Cut]]:
    """Where a piece goes in a larger one: cuts of the larger, and what each takes of the piece."""
    for chunks in runs(whole.chunks, piece.chunks):
        rows, own_rows = plan.rows(whole, chunks), plan.rows(piece, chunks)
        for heads in head_sets.heads_side_by_side(piece.heads, whole.heads):
            yield (
                (rows, positions(whole.heads, heads)),
                (own_rows, positions(piece.heads, heads)),
            )
