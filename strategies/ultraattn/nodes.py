"""Two levels: nodes share the blocks of a coarse grid, the GPUs of a node share each block.

A coarse chunk is cut into pieces, dealt evenly to the GPUs of the node that owns the chunk. A chunk
that another node needs travels in a group: GPU i of one node to GPU i of the other, all NICs at
once. The block is then a device tiling inside that node, as if its GPUs owned the pieces. Equal
blocks are planned once.

Source: UltraAttn (SC'25), section 4.2: nodes as integrated devices, groupwise P2P.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding
from harness.planning.block_assignment import Allocation
from harness.planning.levels import Level
from harness.schedule.scip import SolverStatus
from patterns.geometry import Chunk
from strategies.ultraattn.blocks import Grid, grid_of, instance_of
from strategies.ultraattn.solver.assign import DEFAULT_S, Assigned
from strategies.ultraattn.solver.bounds import lower_bound
from strategies.ultraattn.solver.instance import (
    Instance,
    Matrix,
    Weights,
    account,
    all_received,
    even_owners,
    most,
    own_rows,
    rounded,
    weights_of,
)
from strategies.ultraattn.solver.store import Cache, assign_cached

Side = Sequence[Sequence[Chunk]]
"""Coarse chunks, each as its pieces."""

BlockCost = Callable[[Sequence[Chunk], Sequence[Chunk], Assigned], float]
"""Seconds of a block on one node, from its row's pieces, its column's pieces and its tiling."""

ROW_OWNER = "row owner"
"""Name of the rule that decides a level that is off."""

_RESOLUTION = 256  # units of work of the dearest block, when a cost is given in seconds
_FINEST = 64  # denominator of the ratio of bandwidths


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """Work that a device, and a node, may have beyond the paper's cap, in units of `Grid.work`."""

    device: int = 0
    node: int = 0


NO_SLACK = Slack()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The shape of the cluster and what the node level weighs.

    Attributes:
        nodes: How many.
        gpus: GPUs per node.
        inside_speed: Bandwidth of a GPU to its neighbours over its bandwidth to other nodes; both
            link classes are then in the objective. None counts transfers between nodes only, as
            the paper does.
    """

    nodes: int
    gpus: int
    inside_speed: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of a tiling: which levels are tiled, weights of chunks and blocks, caps of loads.

    Attributes:
        levels: NODE and DEVICE are tiled if they are here; else rows are computed by their owners.
        cost: Weight of a block, from a simulator; by default its work.
        shipped: See `instance.weights_of`; weights are rounded.
        slack: Work beyond the caps.
        fix_diagonal: As the authors' code: see `blocks.instance_of`.
    """

    levels: Container[Level] = frozenset(Level)
    cost: BlockCost | None = None
    shipped: bool = False
    slack: Slack = NO_SLACK
    fix_diagonal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to search.

    Attributes:
        seconds: CPU seconds per distinct block, and for the nodes.
        prove: Go for proofs.
        cache: Where answers are kept.
    """

    seconds: float = DEFAULT_S
    prove: bool = False
    cache: Cache | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevels:
    """A plan of both levels.

    Attributes:
        allocation: The rank of every pair of pieces.
        instance: The assignment problem of the nodes.
        nodes: Its answer.
        blocks: The device tiling of each distinct block: (problem, answer).
        kind: Per coarse row and column, the index in `blocks`; None where empty.
        shipped: Whether chunks are weighed as they are shipped or counted as in the paper.
        node_full: Work of a whole block between nodes, in units of their instance.
        block_full: The same of each of `blocks`.
    """

    allocation: Allocation
    instance: Instance
    nodes: Assigned
    blocks: tuple[tuple[Instance, Assigned], ...]
    kind: tuple[tuple[int | None, ...], ...]
    shipped: bool
    node_full: int
    block_full: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """The coarse blocks, each distinct one tiled.

    Attributes:
        grid: Their work.
        kind: See `TwoLevels`; an index in the other fields.
        solved: Each distinct block's problem and answer.
        full: Work of each distinct block, were it whole.
        first: Coarse row and column in which each comes first.
    """

    grid: Grid
    kind: tuple[tuple[int | None, ...], ...]
    solved: tuple[tuple[Instance, Assigned], ...]
    full: tuple[int, ...]
    first: tuple[tuple[int, int], ...]


def tile_nodes(
    problem: Problem,
    direction: Direction,
    shape: Nodes,
    sides: tuple[Side, Side],
    rules: Rules,
    effort: Effort,
) -> TwoLevels:
    """Tile the nodes, then the GPUs inside each distinct block.

    Args:
        problem: The problem; cp = nodes x GPUs.
        direction: Forward or backward.
        shape: The cluster.
        sides: Coarse query chunks and key chunks, in the order in which nodes own them, each as
            its pieces, in the order in which GPUs own those; as many in each.
        rules: Rules of the tiling.
        effort: How long to search.
    """
    rows, columns = sides
    exact = weights_of(problem, direction, len(rows), len(columns), shipped=rules.shipped)
    weights = rounded(exact)
    blocks = _tile_devices(problem, shape, sides, weights, rules, effort)
    grid = blocks.grid if rules.cost is None else _priced(blocks, sides, rules.cost)
    weights, inside = _links(weights, blocks, shape, len(rows[0]))
    instance = instance_of(
        grid,
        shape.nodes,
        weights,
        slack=rules.slack.node,
        fix_diagonal=rules.fix_diagonal,
        inside=inside,
    )
    nodes = _solved(instance, Level.NODE, rules, effort)
    return TwoLevels(
        allocation=_flat(nodes, blocks, shape, sides),
        instance=instance,
        nodes=nodes,
        blocks=blocks.solved,
        kind=blocks.kind,
        shipped=rules.shipped,
        node_full=grid.full,
        block_full=blocks.full,
    )


def _tile_devices(
    problem: Problem,
    shape: Nodes,
    sides: tuple[Side, Side],
    weights: Weights,
    rules: Rules,
    effort: Effort,
) -> _Blocks:
    """Tile the GPUs inside each distinct block."""
    rows, columns = sides
    grids = [[grid_of(problem.pattern, row, column) for column in columns] for row in rows]
    first: dict[Instance, tuple[int, int]] = {}
    instances = [[_block_instance(grid, shape, weights, rules) for grid in row] for row in grids]
    for i, j in product(range(len(rows)), range(len(columns))):
        instance = instances[i][j]
        if instance is not None:
            first.setdefault(instance, (i, j))
    number = {instance: index for index, instance in enumerate(first)}
    return _Blocks(
        grid=Grid(
            work=tuple(tuple(g.total for g in row) for row in grids), full=grids[-1][-1].full
        ),
        kind=tuple(tuple(None if x is None else number[x] for x in row) for row in instances),
        solved=tuple((each, _solved(each, Level.DEVICE, rules, effort)) for each in first),
        full=tuple(grids[i][j].full for i, j in first.values()),
        first=tuple(first.values()),
    )


def _block_instance(grid: Grid, shape: Nodes, weights: Weights, rules: Rules) -> Instance | None:
    if not grid.total:
        return None
    slack, fixed = rules.slack.device, rules.fix_diagonal
    return instance_of(grid, shape.gpus, weights, slack=slack, fix_diagonal=fixed)


def _solved(instance: Instance, level: Level, rules: Rules, effort: Effort) -> Assigned:
    if level not in rules.levels:
        return _by_row_owner(instance)
    return assign_cached(instance, effort.cache, seconds=effort.seconds, prove=effort.prove)


def _by_row_owner(instance: Instance) -> Assigned:
    """Return what is left where a level is not tiled, whatever load that gives."""
    cells = own_rows(instance)
    lines = account(instance, cells)
    value, bound = most(lines), lower_bound(instance)
    return Assigned(
        cells=tuple(map(tuple, cells)),
        value=value,
        bound=min(bound, value),
        volume=all_received(lines),
        status=SolverStatus.FEASIBLE,
        seconds=0.0,
        source=ROW_OWNER,
    )


def _priced(blocks: _Blocks, sides: tuple[Side, Side], cost: BlockCost) -> Grid:
    """Return the work of blocks from their seconds."""
    rows, columns = sides
    solved = zip(blocks.first, blocks.solved, strict=True)
    seconds = [cost(rows[i], columns[j], found) for (i, j), (_, found) in solved]
    dearest = max(seconds, default=0.0) or 1.0
    units = [max(1, round(_RESOLUTION * each / dearest)) for each in seconds]
    work = tuple(tuple(0 if k is None else units[k] for k in row) for row in blocks.kind)
    return Grid(work=work, full=_RESOLUTION)


def _links(weights: Weights, blocks: _Blocks, shape: Nodes, pieces: int) -> tuple[Weights, Matrix]:
    """Return the node level's prices and what each block moves inside its node, in equal units.

    A chunk between nodes is one G-th of it per NIC; a unit inside a node is one piece on a faster
    link.
    """
    if shape.inside_speed is None:
        return weights, ()
    ratio = Fraction(shape.gpus, pieces) / Fraction(shape.inside_speed)
    ratio = ratio.limit_denominator(_FINEST)
    scale = ratio.denominator
    prices = replace(
        weights,
        row_in=weights.row_in * scale,
        row_out=weights.row_out * scale,
        column_in=weights.column_in * scale,
        column_out=weights.column_out * scale,
        unit=weights.unit * scale,
    )
    moved = [found.value * ratio.numerator for _, found in blocks.solved]
    inside = tuple(tuple(0 if k is None else moved[k] for k in row) for row in blocks.kind)
    return prices, inside


def _flat(nodes: Assigned, blocks: _Blocks, shape: Nodes, sides: tuple[Side, Side]) -> Allocation:
    """Return the rank of every pair of pieces."""
    rows, columns = sides
    pieces = len(rows[0])
    cells: list[list[int | None]] = [
        [None] * (len(columns) * pieces) for _ in range(len(rows) * pieces)
    ]
    for i, line in enumerate(blocks.kind):
        for j, block in enumerate(line):
            node = nodes.cells[i][j]
            if block is None or node is None:
                continue
            for a, row in enumerate(blocks.solved[block][1].cells):
                for b, device in enumerate(row):
                    if device is not None:
                        cells[i * pieces + a][j * pieces + b] = node * shape.gpus + device
    return Allocation(
        queries=_owned(rows, shape, pieces),
        keys=_owned(columns, shape, pieces),
        cells=tuple(map(tuple, cells)),
    )


def _owned(side: Side, shape: Nodes, pieces: int) -> Sharding:
    """Return the pieces and their owners: the node of the chunk, and the GPU of the piece."""
    node_of = even_owners(len(side), shape.nodes)
    gpu_of = even_owners(pieces, shape.gpus)
    owned: list[list[int]] = [[] for _ in range(shape.nodes * shape.gpus)]
    for chunk, node in enumerate(node_of):
        for piece, gpu in enumerate(gpu_of):
            owned[node * shape.gpus + gpu].append(chunk * pieces + piece)
    return Sharding(tuple(piece for pieces_ in side for piece in pieces_), tuple(map(tuple, owned)))
