"""Fuse tiles of one rank that fill a rectangle of rows x columns into one kernel call.

    k0 k1 k2 k3
    B0 B1 B2 B3    rows 0, 1 x columns 0, 1: B0, B1, B4, B5 become one tile;
    B4 B5 B6 B7    rows and columns need not be neighbours, if all their blocks are full
          B8 B9

One call starts one kernel, reads its operands once, and folds into its accumulators once. But it
waits for the last of its operands, so what pays is decided by time, not here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from harness.cluster.machine import Cluster
from harness.plan.kernel_calls import lower
from harness.plan.plan import Plan
from harness.plan.residency import Program, Slab, Step
from harness.plan.sizes import piece_bytes
from harness.plan.tasks import Piece, Tile
from harness.schedule.greedy import Replacement, TimedPlan
from harness.schedule.substitute import Members, substituted
from harness.simulate.task_costs import costs_on
from patterns.geometry import Relation
from patterns.pattern import Pattern

Chunks = tuple[int, ...]
TilesByChunks = Mapping[tuple[Chunks, Chunks], int]
"""(query chunks, key chunks) of a tile -> its id."""

_FEWEST = 2


def fused(plan: Plan, groups: Iterable[Members]) -> Plan:
    """Fuse each group of tiles into one.

    Raises:
        ValueError: A group is not the tiles of one place, direction and set of heads that fill a
            rectangle, or no single kernel call can take it.
        CycleError: A tile of a group waits for a task that waits for another of the group.
    """
    replacements = {}
    for members in groups:
        tiles = [plan.tasks[index] for index in members]
        solid = [tile for tile in tiles if isinstance(tile, Tile)]
        tile = joined_tile(solid) if len(solid) == len(tiles) else None
        rule = f"fuse: tasks {list(members)} must be tiles of one place that fill a rectangle"
        if tile is None:
            raise ValueError(rule)
        areas = plan.problem.pattern.areas(
            [plan.q_chunks[i] for i in tile.q], [plan.kv_chunks[j] for j in tile.kv]
        )
        if int(areas.sum()) != tile.area:
            raise ValueError(f"{rule}; they have {tile.area} of its {int(areas.sum())} pairs")
        if not one_call(plan, tile):
            raise ValueError(f"{rule} which one kernel call can take")
        replacements[members] = tile
    return substituted(plan, replacements)


def joined_tile(tiles: Sequence[Tile]) -> Tile | None:
    """One tile over the rows and columns of several; None if they differ in more than those."""
    if not tiles:
        return None
    first = tiles[0]
    q = tuple(sorted({chunk for tile in tiles for chunk in tile.q}))
    kv = tuple(sorted({chunk for tile in tiles for chunk in tile.kv}))
    if any(_kind(tile) != _kind(first) for tile in tiles):
        return None

    def wide(piece: Piece) -> Piece:
        return piece._replace(chunks=kv if piece.tensor.on_kv else q)

    return Tile(
        place=first.place,
        direction=first.direction,
        reads=tuple(map(wide, first.reads)),
        writes=tuple(map(wide, first.writes)),
        area=sum(tile.area for tile in tiles),
    )


def _kind(tile: Tile) -> tuple[object, ...]:
    reads = tuple((piece.tensor, piece.heads, piece.version) for piece in tile.reads)
    return tile.place, tile.direction, reads


def one_call(plan: Plan, tile: Tile) -> bool:
    """Whether one kernel call takes a tile: all of it is allowed, or it is one triangle."""
    q = tuple(plan.q_chunks[chunk] for chunk in tile.q)
    kv = tuple(plan.kv_chunks[chunk] for chunk in tile.kv)
    if tile.area == sum(map(len, q)) * sum(map(len, kv)):
        return True
    rows, columns = _run(q), _run(kv)
    if rows is None or columns is None or not _triangle(plan.problem.pattern, rows, columns):
        return False  # masks with other shapes take many bounded calls; counting them is slow
    return len(lower(plan.problem.pattern, q, kv)) == 1


def _run(chunks: Sequence[range]) -> range | None:
    """The positions of chunks that continue one another; None if they do not."""
    for first, second in pairwise(chunks):
        if first.step != second.step or first[-1] + first.step != second.start:
            return None
    return range(chunks[0].start, chunks[-1].stop, chunks[0].step)


def _triangle(pattern: Pattern, rows: range, columns: range) -> bool:
    return pattern.relation(rows, columns).relation is Relation.CAUSAL


# At once, as published ----------------------------------------------------------------------


def fused_at_once(plan: Plan) -> Plan:
    """Fuse the largest rectangles of full blocks first, all that fit, untimed and for good.

    Shapes go by (area, rows, columns), the largest first; each takes its first rows and columns. No
    rectangle has more blocks than an even share of them all.

    Source: the public code of UltraAttn (SC'25), `graph_transformation_engine.py`.
    """
    rows, columns, cp = len(plan.q_chunks), len(plan.kv_chunks), plan.problem.cp
    first = plan.problem.pattern.area(plan.q_chunks[0], plan.kv_chunks[-1])
    blocks = rows * columns if first else rows * (columns - 1) // 2
    groups: list[Members] = []
    for cells in _groups(plan):
        full = {key: index for key, index in cells.items() if _is_full(plan, index)}
        groups += _largest_first(full, -(-blocks // cp))
    return fused(plan, groups)


def _is_full(plan: Plan, index: int) -> bool:
    tile = plan.tasks[index]
    assert isinstance(tile, Tile)
    rows, columns = (plan.tokens(piece) for piece in tile.reads[:2])
    return tile.area == rows * columns


def _largest_first(cells: TilesByChunks, most: int) -> Iterator[Members]:
    """Yield rectangles of at most so many blocks, each the largest that is left; more rows first.

    Only rectangles that cannot grow are looked at, since every other lies in one of them; trying
    all sets of rows, as the public code does, ends for small grids only.
    """
    free = dict(cells)
    while free:
        columns_of: dict[Chunks, set[Chunks]] = {}
        for q, kv in free:
            columns_of.setdefault(q, set()).add(kv)
        shapes = [
            (x * y, x, y, sorted(rows)[:x], sorted(columns)[:y])
            for rows, columns in _full(columns_of)
            for x in range(1, min(len(rows), most) + 1)
            for y in (min(len(columns), most // x),)
        ]
        area, _, _, rows, columns = max(
            shapes, key=lambda each: (each[:3], [(-q[0], -len(q)) for q in each[3]])
        )
        if area < _FEWEST:
            return
        yield tuple(sorted(free.pop((q, kv)) for q in rows for kv in columns))


# Replacements -------------------------------------------------------------------------------


def fused_tiles(timed: TimedPlan) -> Iterator[Replacement]:
    """Rectangles of tiles, each with the seconds that one call saves if nothing waits."""
    found: dict[Members, Tile] = {}
    for cells in _groups(timed.plan):
        for members in _rectangles(timed, cells):
            tile = joined_tile([timed.tile(index) for index in members])
            if tile is not None and one_call(timed.plan, tile):
                found[members] = tile
    seconds = tile_seconds(timed.plan, timed.cluster, list(found.values()))
    for (members, tile), (fresh_s, folded_s) in zip(found.items(), seconds, strict=True):
        begun = sum(
            piece_bytes(timed.plan, timed.program.slabs[slab].piece)
            for index in members
            for slab in timed.program.steps[index].creates
        )
        share = begun / sum(piece_bytes(timed.plan, piece) for piece in tile.writes)
        time_s = folded_s + (fresh_s - folded_s) * share
        separate_s = sum(timed.graph.seconds[index] for index in members)
        streams = timed.graph.streams[members[0]]
        yield Replacement(members, tile, time_s, streams, separate_s - time_s, late=True)


def tile_seconds(plan: Plan, cluster: Cluster, tiles: Sequence[Tile]) -> list[tuple[float, float]]:
    """Seconds of tiles whose accumulators are all new, and of the same if none is."""
    slabs: list[Slab] = []
    steps: list[Step] = []
    for tile in tiles:
        begun = range(len(slabs), len(slabs) + len(tile.writes))
        slabs += [Slab(i, tile.place, piece) for i, piece in zip(begun, tile.writes, strict=True)]
        steps += [Step((), (), tuple(begun)), Step((), (), ())]
    twice = tuple(tile for tile in tiles for _ in range(2))
    menu = Plan(
        problem=plan.problem,
        strategy=plan.strategy,
        direction=plan.direction,
        q_chunks=plan.q_chunks,
        kv_chunks=plan.kv_chunks,
        initial=(),
        tasks=twice,
        outputs=(),
    )
    costs = costs_on(Program(menu, tuple(slabs), tuple(steps), frozenset(), 0, {}), cluster)
    return [(costs.compute_s(2 * i), costs.compute_s(2 * i + 1)) for i in range(len(tiles))]


def _groups(plan: Plan) -> Iterator[TilesByChunks]:
    """Tiles that differ in rows and columns only, where these are cut alike."""
    groups: dict[tuple[object, ...], dict[tuple[Chunks, Chunks], int]] = {}
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Tile):
            groups.setdefault(_kind(task), {})[task.q, task.kv] = index
    for cells in groups.values():
        if len(cells) >= _FEWEST and all(map(_disjoint, zip(*cells, strict=True))):
            yield cells


def _disjoint(units: Iterable[Chunks]) -> bool:
    distinct = set(units)
    return sum(map(len, distinct)) == len({chunk for unit in distinct for chunk in unit})


def _rectangles(timed: TimedPlan, cells: TilesByChunks) -> Iterator[Members]:
    """Groups of at least two tiles that fill a rectangle, EMPTY blocks inside it allowed."""
    ready: dict[Chunks, float] = {}
    columns_of: dict[Chunks, set[Chunks]] = {}
    for (q, kv), index in cells.items():
        columns_of.setdefault(q, set()).add(kv)
        arrived = timed.ready_s(index)
        for unit in (q, kv):
            ready[unit] = min(arrived, ready.get(unit, arrived))
    seen: set[Members] = set()
    for rows, columns in (*_full(columns_of), *_windows(timed, cells, columns_of)):
        for some_rows, some_columns in _parts(
            sorted(rows, key=lambda unit: (ready[unit], unit)),
            sorted(columns, key=lambda unit: (ready[unit], unit)),
        ):
            members = tuple(
                sorted(cells[q, kv] for q in some_rows for kv in some_columns if (q, kv) in cells)
            )
            if len(members) >= _FEWEST and members not in seen:
                seen.add(members)
                if timed.whole(members):
                    yield members


def _full(columns_of: Mapping[Chunks, set[Chunks]]) -> Iterator[tuple[set[Chunks], set[Chunks]]]:
    """Maximal rectangles without holes: each set of columns that rows share, and all such rows."""
    shared: list[frozenset[Chunks]] = []
    for columns in map(frozenset, columns_of.values()):
        new = [columns, *(columns & known for known in shared)]
        shared += [common for common in dict.fromkeys(new) if common and common not in shared]
        if len(shared) > _MOST_RECTANGLES:
            break
    for common in shared:
        yield {q for q, columns in columns_of.items() if common <= columns}, set(common)


def _windows(
    timed: TimedPlan, cells: TilesByChunks, columns_of: Mapping[Chunks, set[Chunks]]
) -> Iterator[tuple[set[Chunks], set[Chunks]]]:
    """Squares of neighbouring rows and columns, which may be one triangle with an EMPTY corner."""
    partial = [timed.partial(index) for index in cells.values()]
    if not any(partial):
        return
    rows = sorted(columns_of)
    for top, bottom in (
        (a, b) for a in range(len(rows)) for b in range(a + 1, min(a + _MOST_ROWS, len(rows)))
    ):
        window = rows[top : bottom + 1]
        if all(first[-1] + 1 == second[0] for first, second in pairwise(window)):
            run = sorted(columns_of[rows[bottom]])[-len(window) :]
            if all(first[-1] + 1 == second[0] for first, second in pairwise(run)):
                yield set(window), set(run)


def _parts(
    rows: Sequence[Chunks], columns: Sequence[Chunks]
) -> Iterator[tuple[Sequence[Chunks], Sequence[Chunks]]]:
    """A rectangle, and its halves of rows and of columns, and theirs, in order of arrival."""
    for some_rows in _halves(rows):
        for some_columns in _halves(columns):
            yield some_rows, some_columns


def _halves(units: Sequence[Chunks]) -> Iterator[Sequence[Chunks]]:
    yield units
    if len(units) > 1:
        yield from _halves(units[: len(units) // 2])
        yield from _halves(units[len(units) // 2 :])


_MOST_RECTANGLES = 64  # per rank: patterns have few; what is beyond them is found in parts
_MOST_ROWS = 8  # of a triangle over several rows
