"""Tensors that a layer saves for backward: checkpointing and offloading, for any strategy.

Both are passes over a pair of plans. Checkpointing lets forward save less; backward first does
again what it lacks, by the forward plan's own tasks, and lets go of whatever else they bring.
Offloading keeps saved tensors in the host's memory: forward sends each there when it is made,
backward fetches it when it is first read. Both are seen in the plans as tasks, with their price.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

from harness.plan.dependencies import linked, resolved
from harness.plan.plan import Plan
from harness.plan.residency import Residency
from harness.plan.tasks import (
    AccessMode,
    Free,
    Leg,
    Memory,
    Piece,
    Place,
    Resident,
    Task,
    Tensor,
    Transfer,
    effects,
)


class Checkpoint(StrEnum):
    """Tensors that forward saves for backward, besides weights."""

    NONE = "none"
    """Whatever the strategy saves."""
    ATTENTION = "attention"
    """x, out and lse: backward projects and moves q, k and v again, and attends no tile again."""
    LAYER = "layer"
    """x alone: backward does the layer again, but for its output projection."""


_SAVED = {
    Checkpoint.ATTENTION: frozenset({Tensor.X, Tensor.OUT, Tensor.LSE}),
    Checkpoint.LAYER: frozenset({Tensor.X}),
}
_STAY = frozenset({Tensor.W_Q, Tensor.W_K, Tensor.W_V, Tensor.W_O, Tensor.DY})
"""Inputs of a backward plan that no forward plan saves."""


# Checkpointing ------------------------------------------------------------------------------


def checkpointed(forward: Plan, checkpoint: Checkpoint) -> Plan:
    """Let a forward plan save less."""
    if checkpoint is Checkpoint.NONE:
        return forward
    saved = (r for r in forward.saved if r.piece.tensor in _SAVED[checkpoint])
    return replace(forward, saved=tuple(saved))


def recomputing(forward: Plan, backward: Plan, checkpoint: Checkpoint) -> Plan:
    """Let a backward plan begin with the tasks that make what was not saved.

    Args:
        forward: The whole forward plan.
        backward: The backward plan that starts from what it saves.
        checkpoint: The tensors that it saves in fact.
    """
    if checkpoint is Checkpoint.NONE:
        return backward
    there = _SAVED[checkpoint] | _STAY
    lacking = tuple(r for r in backward.initial if r.piece.tensor not in there)
    initial = tuple(r for r in backward.initial if r.piece.tensor in there)
    again = _let_go(initial, tuple(_making(forward, lacking)), lacking)
    return replace(backward, initial=initial, tasks=linked(initial, (*again, *backward.tasks)))


def _making(forward: Plan, wanted: Iterable[Resident]) -> Iterator[Task]:
    """Those of a forward plan's tasks that have a part in making some pieces, in their order."""
    program = resolved(replace(forward, saved=tuple(wanted), outputs=()))
    needed = set(program.kept)
    kept: set[int] = set()
    for index in reversed(range(len(program.steps))):
        accesses = program.steps[index].accesses
        touched = [
            (access.mode, segment.slab) for access in accesses for segment in access.segments
        ]
        if any(
            s in needed for mode, s in touched if mode in (AccessMode.CREATE, AccessMode.ACCUMULATE)
        ):
            kept.add(index)
            needed.update(slab for _, slab in touched)
    for index, (task, step) in enumerate(zip(forward.tasks, program.steps, strict=True)):
        if index in kept:
            yield task
        elif isinstance(task, Free):
            pieces = tuple(
                access.piece
                for access in step.accesses
                if needed.issuperset(segment.slab for segment in access.segments)
            )
            if pieces:
                yield Free(task.place, pieces)


def _let_go(
    initial: Sequence[Resident], tasks: Sequence[Task], wanted: Iterable[Resident]
) -> Iterator[Task]:
    """Follow each task by the release of what it was the last to touch, if nobody wants it."""
    residency = Residency(tuple(initial))
    first = len(residency.slabs)
    for index, task in enumerate(tasks):
        residency.apply(index, task)
    kept = {
        segment.slab for place, piece in wanted for segment in residency.resolve(place, piece, None)
    }
    gone: dict[int, dict[Place, list[Piece]]] = {}
    for slab, place, piece in residency.held():
        if slab >= first and slab not in kept:
            gone.setdefault(residency.last_use[slab], {}).setdefault(place, []).append(piece)
    for index, task in enumerate(tasks):
        yield task
        for place, pieces in gone.get(index, {}).items():
            yield Free(place, tuple(pieces))


# Offloading ---------------------------------------------------------------------------------


def offloaded(forward: Plan) -> Plan:
    """Let all that a forward plan saves on a device rest on its host."""
    program = resolved(forward)
    made = {slab: index for index, step in enumerate(program.steps) for slab in step.creates}
    leaving: dict[int, list[Resident]] = {}
    for resident in forward.saved:
        if resident.place.memory is Memory.DEVICE:
            slabs = (segment.slab for segment in program.final[resident])
            # What is there from the start leaves at once.
            leaving.setdefault(max(made.get(slab, -1) for slab in slabs), []).append(resident)
    tasks = [_copy(resident, Memory.HOST) for resident in leaving.get(-1, ())]
    for index, task in enumerate(forward.tasks):
        tasks += [task, *(_copy(resident, Memory.HOST) for resident in leaving.get(index, ()))]
    saved = tuple(resident._replace(place=_host(resident.place)) for resident in forward.saved)
    return replace(forward, tasks=linked(forward.initial, tasks), saved=saved)


def fetching(backward: Plan) -> Plan:
    """Let a backward plan start from what rests on the hosts, and fetch it when it is read."""
    waiting = [
        resident
        for resident in backward.initial
        if resident.piece.tensor not in _STAY and resident.place.memory is Memory.DEVICE
    ]
    rest = set(waiting)
    initial = tuple(r._replace(place=_host(r.place)) if r in rest else r for r in backward.initial)
    at: dict[tuple[Place, Tensor, int], list[Resident]] = {}
    for resident in waiting:
        place, piece = resident
        at.setdefault((place, piece.tensor, piece.version), []).append(resident)
    tasks: list[Task] = []
    for task in backward.tasks:
        for place, piece, mode in effects(task):
            if mode is AccessMode.CREATE:
                continue
            for resident in list(at.get((place, piece.tensor, piece.version), ())):
                held = resident.piece
                if held.heads & piece.heads and set(held.chunks) & set(piece.chunks):
                    at[place, piece.tensor, piece.version].remove(resident)
                    tasks.append(_copy(resident, Memory.DEVICE))
        tasks.append(task)
    return replace(backward, initial=initial, tasks=linked(initial, tasks))


def _host(place: Place) -> Place:
    return Place(place.rank, Memory.HOST)


def _copy(resident: Resident, towards: Memory) -> Task:
    """Move a piece between a rank's two memories."""
    (rank, _), piece = resident
    src = Memory.DEVICE if towards is Memory.HOST else Memory.HOST
    return Transfer(Leg(Place(rank, src), Place(rank, towards), (piece,), piece.version))
