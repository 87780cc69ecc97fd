"""Prove a plan right before anything runs it.

Presence and edges come from the one readiness rule in `residency`, contributions from `coverage`.
Here are the rules about a plan as a whole: its tables, the shapes of its tasks, where it starts
from and where its results end.
"""

from collections.abc import Iterator, Sequence

from harness.errors import (
    AbsentPieceError,
    CapacityError,
    CycleError,
    LostResultError,
    MisfitError,
    PlanError,
    UnorderedError,
)
from harness.plan import heads as head_sets
from harness.plan.grid import grid
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.residency import Program, Residency, Step, program_of, without_collection
from harness.plan.tasks import (
    LINEAR_FORMS,
    NO_CHUNKS,
    NO_HEADS,
    Collective,
    Delta,
    Finish,
    Free,
    Linear,
    LinearOp,
    Memory,
    Merge,
    Piece,
    Place,
    Resident,
    Scope,
    Task,
    Tensor,
    Tile,
    Transfer,
    ranks_of,
)
from harness.verify.coverage import Coverage

Owners = Sequence[tuple[tuple[int, ...], ...]]
"""Per rank the query chunks that it owns, then per rank the key chunks."""

_WEIGHTS = frozenset({Tensor.W_Q, Tensor.W_K, Tensor.W_V, Tensor.W_O})
_SAVED = frozenset({Tensor.Q, Tensor.K, Tensor.V, Tensor.OUT, Tensor.LSE})
_INPUTS = {
    (Scope.ATTENTION, Direction.FORWARD): {Tensor.Q, Tensor.K, Tensor.V},
    (Scope.ATTENTION, Direction.BACKWARD): _SAVED | {Tensor.DELTA, Tensor.DOUT},
    (Scope.LAYER, Direction.FORWARD): _WEIGHTS | {Tensor.X},
    (Scope.LAYER, Direction.BACKWARD): _WEIGHTS | _SAVED | {Tensor.DELTA, Tensor.X, Tensor.DY},
}
_RESULTS = {
    (Scope.ATTENTION, Direction.FORWARD): (Tensor.OUT,),
    (Scope.ATTENTION, Direction.BACKWARD): (Tensor.DQ, Tensor.DK, Tensor.DV),
    (Scope.LAYER, Direction.FORWARD): (Tensor.Y,),
    (Scope.LAYER, Direction.BACKWARD): (
        Tensor.DX,
        *(Tensor.DW_Q, Tensor.DW_K, Tensor.DW_V, Tensor.DW_O),
    ),
}
_TILE_READS = {
    Direction.FORWARD: ((Tensor.Q, Tensor.K, Tensor.V),),
    Direction.BACKWARD: tuple(
        (Tensor.Q, Tensor.K, Tensor.V, Tensor.LSE, Tensor.DOUT, last)
        for last in (Tensor.OUT, Tensor.DELTA)
    ),
}
_TILE_WRITES = {
    Direction.FORWARD: (Tensor.OUT_PART, Tensor.LSE_PART),
    Direction.BACKWARD: (Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART),
}
_TILE_SIDES = {
    (way, reads, _TILE_WRITES[way]): tuple([t.on_kv for t in (*reads, *_TILE_WRITES[way])])
    for way, forms in _TILE_READS.items()
    for reads in forms
}
"""Of each form of a tile, which of its pieces lie on keys."""
_ROTATED = frozenset({Tensor.Q, Tensor.K, Tensor.DQ, Tensor.DK})
_FORWARD = Direction.FORWARD  # enums are slow to ask, plans long
_DEVICE = Memory.DEVICE
_GRID_RANKS = 8


def verify(plan: Plan, owners: Owners | None = None) -> Program:
    """Prove a plan and return it resolved.

    Args:
        plan: The plan.
        owners: Who must end with what: per rank the query chunks, then per rank the key chunks.
            None takes the plan's outputs at their word about the rank, but still asks for every
            (chunk, head) exactly once.

    Returns:
        The plan with every piece resolved to slabs.

    Raises:
        PlanError: A subclass for the rule that breaks; a small plan's grid is attached as a note.
    """
    try:
        with without_collection():
            return _prove(plan, owners)
    except PlanError as error:
        if plan.problem.cp <= _GRID_RANKS:
            error.add_note(grid(plan, mark=error.task))
        raise


def _prove(plan: Plan, owners: Owners | None) -> Program:
    _tables(plan)
    coverage, residency = Coverage(plan), Residency(plan.initial)
    initial = len(residency.slabs)
    steps: list[Step] = []
    rotary = plan.problem.rotary is not None
    for index, task in enumerate(plan.tasks):
        _order(index, task)
        _fit(plan, index, task)
        if isinstance(task, Linear):
            turns = not _ROTATED.isdisjoint(piece.tensor for piece in _both(task))
            if turns and task.rotary is not rotary:
                raise _misfit(index, task, "every q and k is rotated if the problem says so")
        if isinstance(task, Tile):
            coverage.unmasked(index, task)
        try:
            step = residency.apply(index, task)
        except ValueError as error:
            raise _misfit(index, task, "pieces that arrive together join", str(error)) from error
        _edges(index, task, step)
        coverage.absorb(index, task)
        steps.append(step)
    _nothing_left(plan, residency)
    coverage.whole_area()
    _outputs(plan, owners, coverage, residency)
    return program_of(plan, residency, initial, steps)


# Tables and shapes --------------------------------------------------------------------------


def _tables(plan: Plan) -> None:
    """The chunks cover both sequences once; the plan starts from inputs, on its own ranks."""
    problem = plan.problem
    for name, table, seqlen in (
        ("query", plan.q_chunks, problem.seqlen_q),
        ("key", plan.kv_chunks, problem.seqlen_kv),
    ):
        seen = bytearray(seqlen)
        for chunk in table:
            part = slice(chunk.start, chunk.stop, chunk.step)
            if chunk and (chunk[0] < 0 or chunk[-1] >= seqlen or any(seen[part])):
                raise _misfit(None, None, f"{name} chunks are disjoint", f"{chunk}")
            seen[part] = b"\1" * len(chunk)
        if not all(seen):
            raise _misfit(
                None, None, f"{name} chunks cover every token", f"token {seen.index(0)} is in none"
            )
    if plan.scope is Scope.LAYER and plan.q_chunks != plan.kv_chunks:
        raise _misfit(None, None, "a layer's queries and keys are cut alike")
    for place, piece in (*plan.initial, *plan.outputs, *plan.saved):
        _fit_resident(plan, place, piece)
    for place, piece in plan.initial:
        if piece.tensor not in _INPUTS[plan.scope, plan.direction]:
            raise LostResultError(
                "a plan starts from inputs and computes its results",
                rank=place.rank,
                task=None,
                detail=f"{piece} is there at the start",
            )


def _fit_resident(plan: Plan, place: Place, piece: Piece) -> None:
    """What is there before the first task or after the last one is a part of what there is."""
    tensor, chunks, heads, _ = piece
    table = NO_CHUNKS if tensor.is_weight else plan.kv_chunks if tensor.on_kv else plan.q_chunks
    for rule, value, holds in (
        ("a piece lies on a rank of the plan", place.rank, 0 <= place.rank < plan.problem.cp),
        (
            "the chunks of a piece are some of the plan's, each once",
            chunks,
            chunks
            and 0 <= min(chunks) <= max(chunks) < len(table)
            and len(chunks) == len(set(chunks)),
        ),
        (
            "the heads of a piece are some of the problem's",
            f"bit set {heads}",
            0 < heads <= _all_heads(plan, tensor),
        ),
    ):
        if not holds:
            where = f"a piece of {tensor.value} at the start or the end"
            raise MisfitError(rule, rank=place.rank, task=None, detail=f"{where} has {value}")


def _fit(plan: Plan, index: int, task: Task) -> None:
    """The pieces of a task fit one another, and it runs where it can."""
    cp = plan.problem.cp
    for rank in ranks_of(task):
        if not 0 <= rank < cp:
            raise _misfit(index, task, "a task runs on a rank of the plan", f"rank {rank}")
    match task:
        case Tile():
            _fit_tile(plan, index, task)
        case Linear():
            _fit_linear(index, task)
        case Delta():
            if (task.out.chunks, task.out.heads) != (task.dout.chunks, task.dout.heads):
                raise _misfit(index, task, "delta joins out and dout of the same rows")
        case Merge():
            _fit_merge(index, task)
        case Finish() | Free() | Transfer() | Collective():
            return
    if task.place.memory is not _DEVICE:
        raise _misfit(index, task, "a device computes; the host only stores")


def _fit_tile(plan: Plan, index: int, tile: Tile) -> None:
    reads = tuple([piece.tensor for piece in tile.reads])
    writes = tuple([piece.tensor for piece in tile.writes])
    way = tile.direction
    # A layer's backward plan may attend forward again, to make what was not saved.
    again = way is _FORWARD and plan.scope is Scope.LAYER
    sides = _TILE_SIDES.get((way, reads, writes))
    if (
        sides is None
        or (way is not plan.direction and not again)
        or any(piece.version for piece in tile.writes)
    ):
        raise _misfit(
            index,
            tile,
            "a tile reads and writes what its kernel does, in order",
            f"{', '.join(reads)} -> {', '.join(writes)}",
        )
    q, kv, heads = tile.q, tile.kv, tile.heads
    kv_heads = plan.problem.kv_heads(heads)
    for on_kv, piece in zip(sides, tile.reads + tile.writes, strict=True):
        if piece.chunks != (kv if on_kv else q) or piece.heads != (kv_heads if on_kv else heads):
            raise _misfit(
                index,
                tile,
                "the pieces of a tile cover its queries, keys and heads",
                f"{piece} does not fit queries {tile.q} and keys {tile.kv}",
            )


def _fit_linear(index: int, task: Linear) -> None:
    pieces = _both(task)
    form = (task.op, tuple(piece.tensor for piece in task.reads))
    if [LINEAR_FORMS.get(form)] != [piece.tensor for piece in task.writes]:
        raise _misfit(index, task, "a product is one of LINEAR_FORMS")
    chunks = {piece.chunks for piece in pieces if not piece.tensor.is_weight}
    heads = {piece.heads for piece in pieces if not piece.tensor.is_headless}
    if (
        len(chunks) != 1
        or len(heads) != 1
        or any(piece.heads != NO_HEADS for piece in pieces if piece.tensor.is_headless)
        or any(piece.chunks != NO_CHUNKS for piece in pieces if piece.tensor.is_weight)
        or any(piece.version for piece in task.writes if piece.tensor.is_part)
    ):
        raise _misfit(
            index,
            task,
            "the pieces of a product have the same tokens and heads",
            ", ".join(map(str, pieces)),
        )
    rotated = any(piece.tensor in _ROTATED for piece in pieces)
    if task.rotary and (not rotated or task.op is LinearOp.OUTPUT):
        raise _misfit(index, task, "only q, k and their gradients are rotated")


def _fit_merge(index: int, task: Merge) -> None:
    """Partial outputs come with the lse that weighs them."""
    lses = {
        (piece.chunks, piece.heads, piece.version)
        for piece in task.sources
        if piece.tensor is Tensor.LSE_PART
    }
    outs = {
        (piece.chunks, piece.heads, piece.version)
        for piece in task.sources
        if piece.tensor is Tensor.OUT_PART
    }
    if lses != outs:
        raise _misfit(index, task, "out and lse of the same rows merge together")
    if any(not piece.tensor.is_part or not piece.version for piece in task.sources):
        raise _misfit(index, task, "a merge folds arrived partial results into version 0")


def _both(task: Linear) -> tuple[Piece, ...]:
    return (*task.reads, *task.writes)


def _misfit(index: int | None, task: Task | None, rule: str, detail: str = "") -> MisfitError:
    rank = None if task is None else ranks_of(task)[0]
    return MisfitError(rule, rank=rank, task=index, detail=detail)


# Edges --------------------------------------------------------------------------------------


def _order(index: int, task: Task) -> None:
    after = task.after
    if after and (min(after) < 0 or max(after) >= index):
        raise CycleError(
            "tasks come in an order in which each follows what it waits for",
            rank=ranks_of(task)[0],
            task=index,
            detail=f"it waits for {[t for t in task.after if not 0 <= t < index]}",
        )


def _edges(index: int, task: Task, step: Step) -> None:
    if step.requires == task.after:
        return
    missing = set(step.requires).difference(task.after)
    if missing:
        raise UnorderedError(
            "a task has an edge to the producer and the readers of what it touches",
            rank=ranks_of(task)[0],
            task=index,
            detail=f"no edge to task {min(missing)}",
        )


# Results ------------------------------------------------------------------------------------


def _nothing_left(plan: Plan, residency: Residency) -> None:
    """Only promised sums of a weight's gradient stay partial."""
    promised: dict[tuple[Place, Tensor, int], int] = {}
    for place, piece in plan.outputs:
        if piece.tensor.is_weight and not piece.version:
            for chunk in piece.chunks:
                key = (place, piece.tensor, chunk)
                promised[key] = promised.get(key, 0) | piece.heads
    for place, piece in residency.left():
        for chunk in piece.chunks:
            heads = piece.heads
            if not piece.version:
                heads &= ~promised.get((place, piece.tensor, chunk), 0)
            if heads:
                raise LostResultError(
                    "every partial result is merged and finished",
                    rank=place.rank,
                    task=None,
                    detail=f"{piece.tensor.value} of chunk {chunk} heads "
                    f"{head_sets.text(heads)} is left on {place.memory.value}",
                )


def _outputs(plan: Plan, owners: Owners | None, coverage: Coverage, residency: Residency) -> None:
    """Every (chunk, head) of every result is promised to its owner exactly once, and is there."""
    results = _RESULTS[plan.scope, plan.direction]
    for result in results:
        missing = _whole(plan, result)
        for place, piece in plan.outputs:
            if piece.tensor is not result:
                continue
            for chunk in piece.chunks:
                if owners is not None and not result.is_weight:
                    owned = owners[result.on_kv]
                    if place.rank >= len(owned) or chunk not in owned[place.rank]:
                        raise _lost(place.rank, piece, chunk, "ends at another's rank")
                if piece.heads & ~missing.get(chunk, 0):
                    raise _lost(place.rank, piece, chunk, "ends twice")
                missing[chunk] &= ~piece.heads
        if result.is_weight:
            _partial_sums(plan, result, missing, coverage)
        for chunk, heads in missing.items():
            if heads:
                raise _lost(None, Piece(result, (chunk,), heads), chunk, "ends nowhere")
    for place, piece in plan.outputs:
        try:
            residency.resolve(place, piece, None)
        except AbsentPieceError as error:
            raise _lost(place.rank, piece, piece.chunks[0], "is promised, not there") from error


def _whole(plan: Plan, result: Tensor) -> dict[int, int]:
    """All heads of all chunks of a result."""
    heads = _all_heads(plan, result)
    if result.is_weight:
        return dict.fromkeys(NO_CHUNKS, heads)
    table = plan.kv_chunks if result.on_kv else plan.q_chunks
    return {chunk: heads for chunk, tokens in enumerate(table) if tokens}


def _all_heads(plan: Plan, tensor: Tensor) -> int:
    """All heads of a tensor."""
    problem = plan.problem
    if tensor.is_headless:
        return NO_HEADS
    return problem.kv_heads(problem.all_heads) if tensor.on_kv else problem.all_heads


def _partial_sums(plan: Plan, result: Tensor, missing: dict[int, int], coverage: Coverage) -> None:
    """A weight's gradient may end as one partial sum per rank, for a reduction outside the plan."""
    part = Tensor(result.value + "_part")
    places: dict[int, set[Place]] = {}
    for place, piece in plan.outputs:
        if piece.tensor is part:
            for atom in coverage.split(piece.heads, part):
                if atom & ~missing[0]:
                    raise _lost(place.rank, piece, 0, "ends whole and in parts")
                places.setdefault(atom, set()).add(place)
    for atom, found in places.items():
        coverage.sums(part, atom, sorted(found))
        missing[0] &= ~atom


def _lost(rank: int | None, piece: Piece, chunk: int, what: str) -> LostResultError:
    return LostResultError(
        "every output and gradient ends at its owner once",
        rank=rank,
        task=None,
        detail=f"{piece.tensor.value} of chunk {chunk} heads {head_sets.text(piece.heads)} {what}",
    )


# Beyond one plan ----------------------------------------------------------------------------


def check_pair(forward: Plan, backward: Plan) -> None:
    """Prove that a backward plan starts from what its forward plan left, and the gradient.

    What lives there at the backward plan's start must be saved by the forward plan at the same
    place, or be the gradient of an output where that output ended (dout, or dy of a layer), or be
    a weight, which stays.

    Raises:
        MisfitError: They are for different problems or cut tokens differently.
        AbsentPieceError: The forward plan leaves less than the backward plan starts from.
    """
    for rule, first, second in (
        ("both directions plan one problem", forward.problem, backward.problem),
        ("both directions cut queries alike", forward.q_chunks, backward.q_chunks),
        ("both directions cut keys alike", forward.kv_chunks, backward.kv_chunks),
    ):
        if first != second:
            raise MisfitError(rule, rank=None, task=None, detail=f"{first} and {second}")
    left = Residency((*forward.saved, *_gradients(forward)))
    for place, piece in backward.initial:
        if piece.tensor not in _WEIGHTS:
            left.resolve(place, piece, None)


def _gradients(forward: Plan) -> Iterator[Resident]:
    gradient = {Tensor.OUT: Tensor.DOUT, Tensor.Y: Tensor.DY}
    for place, piece in forward.outputs:
        yield Resident(place, piece._replace(tensor=gradient[piece.tensor], version=0))


def check_capacity(peaks_bytes: Sequence[int], capacity_bytes: int) -> None:
    """Refuse a plan whose ranks need more memory than their device has.

    Raises:
        CapacityError: Names the fullest rank.
    """
    peak = max(peaks_bytes, default=0)
    if peak > capacity_bytes:
        raise CapacityError(
            "the peak memory of every rank fits its device",
            rank=list(peaks_bytes).index(peak),
            task=None,
            detail=f"{peak} bytes of {capacity_bytes}",
        )
