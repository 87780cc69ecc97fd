"""Prove a plan right before anything runs it.

Presence and edges come from the one readiness rule in `residency`, contributions from `coverage`.
The shape of each task is judged in `shapes`. Here are the rules about a plan as a whole: its
tables, where it starts from and where its results end.
"""

from collections.abc import Sequence

from harness.errors import (
    AbsentPieceError,
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
    NO_CHUNKS,
    NO_HEADS,
    Piece,
    Place,
    Scope,
    Task,
    Tensor,
    Tile,
    ranks_of,
)
from harness.verify.coverage import Coverage
from harness.verify.shapes import Shapes

OwnedChunks = Sequence[tuple[tuple[int, ...], ...]]
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
_GRID_RANKS = 8
_WINDOW = 2**24  # tokens


def verify(plan: Plan, owners: OwnedChunks | None = None) -> Program:
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


def _prove(plan: Plan, owners: OwnedChunks | None) -> Program:
    shapes = Shapes(plan)
    _tables(plan, shapes)
    for index, task in enumerate(plan.tasks):
        shapes.task(index, task)
    coverage, residency = Coverage(plan), Residency(plan.initial)
    initial = len(residency.slabs)
    steps: list[Step] = []
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Tile):
            coverage.unmasked(index, task)
        try:
            step = residency.apply(index, task)
        except ValueError as error:
            raise MisfitError(
                "pieces that arrive together join",
                rank=ranks_of(task)[0],
                task=index,
                detail=str(error),
            ) from error
        _edges(index, task, step)
        coverage.absorb(index, task)
        steps.append(step)
    _nothing_left(plan, residency)
    coverage.whole_area()
    _outputs(plan, owners, coverage, residency)
    return program_of(plan, residency, initial, steps)


# Tables -------------------------------------------------------------------------------------


def _tables(plan: Plan, shapes: Shapes) -> None:
    """The chunks cover both sequences once; the plan starts from inputs, on its own ranks."""
    problem = plan.problem
    _tiled("query", plan.q_chunks, problem.seqlen_q)
    _tiled("key", plan.kv_chunks, problem.seqlen_kv)
    layer = plan.scope is Scope.LAYER
    if layer is not (problem.hidden is not None):
        raise _whole_misfit(
            "a plan does a layer if its problem is a layer",
            f"the problem's model width is {problem.hidden}, the plan starts from "
            f"{'x' if layer else 'q, k and v'}",
        )
    if layer and plan.q_chunks != plan.kv_chunks:
        raise _whole_misfit("a layer's queries and keys are cut alike")
    for resident in (*plan.initial, *plan.outputs, *plan.saved):
        shapes.resident(resident)
    for place, piece in plan.initial:
        if piece.tensor not in _INPUTS[plan.scope, plan.direction]:
            raise LostResultError(
                "a plan starts from inputs and computes its results",
                rank=place.rank,
                task=None,
                detail=f"{piece} is there at the start",
            )


def _tiled(name: str, table: tuple[range, ...], seqlen: int) -> None:
    """Judge a table of chunks, some tokens at a time: sequences are long, and memory is not."""
    for chunk in table:
        if chunk.step < 1 or (chunk and (chunk[0] < 0 or chunk[-1] >= seqlen)):
            raise _whole_misfit(f"{name} chunks ascend inside the sequence", f"{chunk}")
    for low in range(0, seqlen, _WINDOW):
        seen = bytearray(min(_WINDOW, seqlen - low))
        for chunk in table:
            inside = _between(chunk, low, low + _WINDOW)
            if not inside:
                continue
            part = slice(inside[0] - low, inside[-1] - low + 1, inside.step)
            if any(seen[part]):
                raise _whole_misfit(f"{name} chunks are disjoint", f"{chunk}")
            seen[part] = b"\1" * len(inside)
        if not all(seen):
            rule = f"{name} chunks cover every token"
            raise _whole_misfit(rule, f"token {low + seen.index(0)} is in none")


def _between(chunk: range, low: int, high: int) -> range:
    """The positions of an ascending chunk in low <= position < high."""
    first, last = (max(0, -(-(end - chunk.start) // chunk.step)) for end in (low, high))
    return chunk[first:last]


def _whole_misfit(rule: str, detail: str = "") -> MisfitError:
    return MisfitError(rule, rank=None, task=None, detail=detail)


# Edges --------------------------------------------------------------------------------------


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


def _outputs(
    plan: Plan, owners: OwnedChunks | None, coverage: Coverage, residency: Residency
) -> None:
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
                if place in places.setdefault(atom, set()):
                    raise _lost(place.rank, piece, 0, "ends twice")
                places[atom].add(place)
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
