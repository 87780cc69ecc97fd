"""Which parts of slabs make up a piece: for whoever reads, writes or moves it."""

from collections.abc import Iterator, Sequence

from harness.plan import heads as head_sets
from harness.plan.plan import Plan
from harness.plan.residency import Access, Slab
from harness.plan.slices import Cut, positions, runs
from harness.plan.tasks import Piece


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
