"""Labels of everything that a plan computes, task by task: what its device program must arrive at.

This knows nothing of buffers: of each tensor and version at a place it keeps the labels of all
heads and tokens of the whole problem.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from harness.plan import heads as head_sets
from harness.plan.kernel_calls import lower
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.sizes import batch_of
from harness.plan.slices import Cut, head_runs
from harness.plan.tasks import (
    Collective,
    Delta,
    Finish,
    Free,
    Leg,
    Linear,
    LinearOp,
    Merge,
    Piece,
    Place,
    Task,
    Tensor,
    Tile,
    Transfer,
)
from harness.program.labels import (
    NOTHING,
    Labels,
    added,
    attended,
    differentiated,
    mixed,
    projected,
    returned,
    summed_rows,
    weight_labels,
)

_NUMBERS = {tensor: 16 + number for number, tensor in enumerate(Tensor)}


def input_labels(plan: Plan, piece: Piece) -> Labels:
    """Labels of an input, which depend on its tensor, heads and tokens only."""
    heads, rows = _index(plan, piece)
    batch = np.arange(batch_of(plan, piece.tensor), dtype=np.uint64)
    number = _NUMBERS[piece.tensor]
    at = (x.astype(np.uint64) for x in (heads[None, :, None], rows[None, None, :]))
    return mixed(number, batch[:, None, None], *at)


class PlanLabels:
    """The labels at every place while a plan's tasks are done."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._held: dict[tuple[Place, Tensor, int], Labels] = {}
        for place, piece in plan.initial:
            self._put(place, piece, input_labels(plan, piece))

    def run(self) -> None:
        """Do all tasks."""
        for index, task in enumerate(self.plan.tasks):
            self._one(index, task)

    def at(self, place: Place, piece: Piece) -> Labels:
        """Labels of a piece."""
        heads, rows = _index(self.plan, piece)
        return self._all(place, piece)[:, heads[:, None], rows]

    @cached_property
    def _sizes(self) -> dict[bool, int]:
        problem = self.plan.problem
        return {False: problem.seqlen_q, True: problem.seqlen_kv}

    def _all(self, place: Place, piece: Piece) -> Labels:
        key = (place, piece.tensor, piece.version)
        found = self._held.get(key)
        if found is None:
            tensor, problem = piece.tensor, self.plan.problem
            heads = problem.heads_kv if tensor.on_kv else problem.heads_q
            shape = (
                batch_of(self.plan, tensor),
                1 if tensor.is_headless else heads,
                1 if tensor.is_weight else self._sizes[tensor.on_kv],
            )
            found = self._held[key] = np.full(shape, NOTHING)
        return found

    def _put(self, place: Place, piece: Piece, labels: Labels) -> None:
        heads, rows = _index(self.plan, piece)
        self._all(place, piece)[:, heads[:, None], rows] = labels

    def _take(self, place: Place, piece: Piece) -> Labels:
        """Labels of a piece; of a partial result nothing stays."""
        found = self.at(place, piece)
        if piece.tensor.is_part:
            self._put(place, piece, np.full_like(found, NOTHING))
        return found

    def _one(self, index: int, task: Task) -> None:
        match task:
            case Transfer():
                self._legs((task.leg,))
            case Collective():
                self._legs(task.legs)
            case Tile():
                self._tile(index, task)
            case Merge():
                self._merge(task)
            case Finish():
                for part, result in zip(task.parts, task.results, strict=True):
                    self._put(task.place, result, self._take(task.place, part))
            case Delta():
                out, dout = (self.at(task.place, piece) for piece in (task.out, task.dout))
                self._put(task.place, task.result, summed_rows(index, out, dout))
            case Linear():
                self._linear(index, task)
            case Free():
                pass

    def _legs(self, legs: Sequence[Leg]) -> None:
        moving = [
            (leg.dst, piece, self._take(leg.src, sent))
            for leg in legs
            for sent, piece in zip(leg.pieces, leg.arriving, strict=True)
        ]
        for place, piece, labels in moving:
            self._put(place, piece, labels)

    def _tile(self, index: int, tile: Tile) -> None:
        plan = self.plan
        reads = [self.at(tile.place, piece) for piece in tile.reads]
        totals = [self.at(tile.place, piece) for piece in tile.writes]
        q, kv = (plan.chunks(piece) for piece in tile.reads[:2])
        for number, call in enumerate(lower(plan.problem.pattern, q, kv)):
            for at, (q_heads, kv_heads) in enumerate(head_runs(tile.heads, plan.problem.group)):
                sides = ((call.rows, q_heads), (call.cols, kv_heads))
                _attend(tile, index, (number, at), sides, reads, totals)
        for piece, labels in zip(tile.writes, totals, strict=True):
            self._put(tile.place, piece, labels)

    def _merge(self, task: Merge) -> None:
        sources = {p: self._take(task.place, p) for p in task.sources}
        for at, piece in enumerate(task.sources):
            into = piece._replace(version=0)
            total = self.at(task.place, into)
            if piece.tensor is Tensor.OUT_PART:
                lse = task.sources[at + 1]
                lse_total = self.at(task.place, lse._replace(version=0))
                made = added(total, sources[piece], lse_total, sources[lse])
            else:
                made = added(total, sources[piece])
            self._put(task.place, into, made)

    def _linear(self, index: int, task: Linear) -> None:
        first, second = (self.at(task.place, piece) for piece in task.reads)
        (piece,) = task.writes
        match task.op:
            case LinearOp.PROJECT:
                made = projected(index, first, second)
            case LinearOp.INPUT_GRAD if piece.tensor is Tensor.DOUT:
                made = projected(index, first, second)
            case LinearOp.OUTPUT | LinearOp.INPUT_GRAD:
                made = returned(index, first, second)
            case LinearOp.WEIGHT_GRAD:
                x_first = task.reads[0].tensor is Tensor.X
                values, rows = (second, first) if x_first else (first, second)
                made = weight_labels(index, values, rows)
        if piece.tensor.is_part:
            made = added(self.at(task.place, piece), made)
        self._put(task.place, piece, made)


def _attend(
    tile: Tile,
    index: int,
    numbers: tuple[int, int],
    sides: tuple[Cut, Cut],
    reads: Sequence[Labels],
    totals: Sequence[Labels],
) -> None:
    on_q, on_kv = ((slice(None), slice(*heads), slice(*rows)) for rows, heads in sides)
    if tile.direction is Direction.FORWARD:
        q, k, v = reads
        out, lse = attended(index, numbers, q[on_q], k[on_kv], v[on_kv])
        before = totals[1][on_q].copy()
        totals[0][on_q] = added(totals[0][on_q], out, before, lse)
        totals[1][on_q] = added(before, lse)
        return
    by_tensor = {piece.tensor: x for piece, x in zip(tile.reads, reads, strict=True)}
    row = by_tensor.get(Tensor.DELTA, by_tensor.get(Tensor.OUT))
    assert row is not None  # the verifier asks for one of them
    grads = differentiated(
        index,
        numbers,
        *(by_tensor[Tensor.DOUT][on_q], by_tensor[Tensor.Q][on_q]),
        *(by_tensor[Tensor.K][on_kv], by_tensor[Tensor.V][on_kv]),
        *(row[on_q], by_tensor[Tensor.LSE][on_q]),
    )
    for total, grad, where in zip(totals, grads, (on_q, on_kv, on_kv), strict=True):
        total[where] = added(total[where], grad)


def _index(plan: Plan, piece: Piece) -> tuple["_Numbers", "_Numbers"]:
    """Heads and tokens of a piece, in the order of its rows."""
    return _heads(piece), _rows(plan.chunks(piece))


_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


def _heads(piece: Piece) -> _Numbers:
    return _members(piece.heads)


@lru_cache(maxsize=4096)
def _members(heads: int) -> _Numbers:
    return np.array(head_sets.members(heads), dtype=np.int64)


@lru_cache(maxsize=4096)
def _rows(chunks: tuple[range, ...]) -> _Numbers:
    parts = [np.arange(c.start, c.stop, c.step, dtype=np.int64) for c in chunks]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
