"""Split a tile into two, so that a part of it need not wait for all of its operands."""

from dataclasses import replace

from harness.plan.dependencies import rebuilt
from harness.plan.plan import Plan
from harness.plan.tasks import Piece, Tile

Chunks = tuple[int, ...]


def split_rows(plan: Plan, index: int, first: Chunks) -> Plan:
    """Let a tile attend some of its query chunks first, and the others after.

    Raises:
        ValueError: The task is no tile, or `first` is not some but not all of its query chunks.
    """
    return _split(plan, index, first, on_kv=False)


def split_columns(plan: Plan, index: int, first: Chunks) -> Plan:
    """As `split_rows`, for key chunks."""
    return _split(plan, index, first, on_kv=True)


def _split(plan: Plan, index: int, first: Chunks, *, on_kv: bool) -> Plan:
    tile = plan.tasks[index]
    whole = (tile.kv if on_kv else tile.q) if isinstance(tile, Tile) else ()
    rest = tuple(chunk for chunk in whole if chunk not in first)
    if not isinstance(tile, Tile) or not first or not set(first) < set(whole):
        raise ValueError(
            f"split: chunks {list(first)} must be some, but not all, of {list(whole)}, those of "
            f"the tile that task {index} must be"
        )
    parts = [_part(plan, tile, chunks, on_kv=on_kv) for chunks in (first, rest)]
    kept = [part for part in parts if part is not None]
    return rebuilt(plan, (*plan.tasks[:index], *kept, *plan.tasks[index + 1 :]))


def _part(plan: Plan, tile: Tile, chunks: Chunks, *, on_kv: bool) -> Tile | None:
    """Trim a tile to chunks of one axis, and the other to what these need; None if nothing is."""
    q, kv = (tile.q, chunks) if on_kv else (chunks, tile.kv)
    areas = plan.problem.pattern.areas(
        [plan.q_chunks[i] for i in q], [plan.kv_chunks[j] for j in kv]
    )
    q = tuple(i for i, row in zip(q, areas, strict=True) if row.any())
    kv = tuple(j for j, column in zip(kv, areas.T, strict=True) if column.any())
    if not q:
        return None

    def trim(piece: Piece) -> Piece:
        return piece._replace(chunks=kv if piece.tensor.on_kv else q)

    return replace(
        tile,
        reads=tuple(map(trim, tile.reads)),
        writes=tuple(map(trim, tile.writes)),
        area=int(areas.sum()),
        after=(),
    )
