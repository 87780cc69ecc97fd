"""A plan of attention with queries and keys cut at the same places, as a layer's tokens are."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from harness.plan.plan import Plan
from harness.plan.tasks import (
    Collective,
    Delta,
    Finish,
    Free,
    Leg,
    Merge,
    Piece,
    Resident,
    Task,
    Tile,
    Transfer,
)

Chunks = tuple[int, ...]
_Rename = Callable[[Piece], Piece]


def cut_alike(plan: Plan) -> Plan:
    """Name the same pieces of a plan of attention by chunks that queries and keys share.

    Both tables must tile as many tokens, and chunks that overlap must have one step. Tasks and
    their order stay as they are.
    """
    if plan.q_chunks == plan.kv_chunks:
        return plan
    chunks, of_q, of_kv = _common(plan.q_chunks, plan.kv_chunks)
    known: dict[tuple[bool, Chunks], Chunks] = {}

    def rename(piece: Piece) -> Piece:
        key = (piece.tensor.on_kv, piece.chunks)
        if key not in known:
            parts = of_kv if key[0] else of_q
            known[key] = tuple(part for chunk in piece.chunks for part in parts[chunk])
        return piece._replace(chunks=known[key])

    def residents(some: Sequence[Resident]) -> tuple[Resident, ...]:
        return tuple(Resident(place, rename(piece)) for place, piece in some)

    return Plan(
        problem=plan.problem,
        strategy=plan.strategy,
        direction=plan.direction,
        q_chunks=chunks,
        kv_chunks=chunks,
        initial=residents(plan.initial),
        tasks=tuple(_renamed(task, rename) for task in plan.tasks),
        outputs=residents(plan.outputs),
        saved=residents(plan.saved),
    )


def _common(
    q: Sequence[range], kv: Sequence[range]
) -> tuple[tuple[range, ...], list[Chunks], list[Chunks]]:
    """Cut both tables where either is cut; per chunk of each, its parts in order."""
    at = np.empty(sum(map(len, kv)), dtype=np.int64)
    for number, chunk in enumerate(kv):
        at[chunk.start : chunk.stop : chunk.step] = number
    chunks: list[range] = []
    of_q: list[Chunks] = []
    of_kv: list[list[int]] = [[] for _ in kv]
    for chunk in q:
        inside = at[chunk.start : chunk.stop : chunk.step]
        changes = (np.flatnonzero(inside[1:] != inside[:-1]) + 1).tolist()
        bounds = [0, *changes, len(chunk)]
        of_q.append(tuple(range(len(chunks), len(chunks) + len(bounds) - 1)))
        for first, last in pairwise(bounds):
            if first < last:
                of_kv[int(inside[first])].append(len(chunks))
            chunks.append(chunk[first:last])
    for parts in of_kv:
        parts.sort(key=lambda part: chunks[part].start)
    return tuple(chunks), of_q, [tuple(parts) for parts in of_kv]


def _renamed(task: Task, rename: _Rename) -> Task:
    def each(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        return tuple(map(rename, pieces))

    def leg(moved: Leg) -> Leg:
        return moved._replace(pieces=each(moved.pieces))

    match task:
        case Tile():
            reads, writes = each(task.reads), each(task.writes)
            return Tile(task.place, task.direction, reads, writes, task.area, task.after)
        case Transfer():
            return Transfer(leg(task.leg), task.after)
        case Collective():
            return Collective(task.kind, tuple(map(leg, task.legs)), task.after)
        case Merge():
            return Merge(task.place, each(task.sources), task.after)
        case Finish():
            return Finish(task.place, each(task.parts), task.after)
        case Delta():
            return Delta(task.place, rename(task.out), rename(task.dout), task.after)
        case Free():
            return Free(task.place, each(task.pieces), task.after)
        case _:
            raise TypeError(f"{task} is no task of attention")
