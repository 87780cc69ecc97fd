"""Residency of pieces while a plan runs: the one readiness rule.

Walking a plan's tasks in order, this module keeps the slabs (pieces as they were created) of every
place. For each task it resolves the pieces that the task touches to parts of slabs, and tells which
earlier tasks it must wait for. The builder derives edges from it, the verifier checks edges against
it, and the executor and the memory ledger read their buffers from it.
"""

import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from harness.errors import AbsentPieceError, OverwriteError
from harness.plan import heads as head_sets
from harness.plan.kernel_calls import lower
from harness.plan.plan import Plan
from harness.plan.tasks import (
    AccessMode,
    Finish,
    Merge,
    Piece,
    Place,
    Resident,
    Task,
    Tensor,
    Tile,
    effects,
)


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold back the cycle collector: plans are many small values, and none is part of a cycle."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Slab(NamedTuple):
    """One buffer: chunks in storage order x heads in ascending order of one tensor."""

    id: int
    place: Place
    piece: Piece


class Segment(NamedTuple):
    """A part of a slab: consecutive chunks x heads that lie side by side in it."""

    slab: int
    chunks: tuple[int, ...]
    heads: int


class Access(NamedTuple):
    """A piece that a task touches and the parts of slabs that make it up, in piece order."""

    place: Place
    piece: Piece
    mode: AccessMode
    segments: tuple[Segment, ...]


_CREATE, _READ, _ACCUMULATE = AccessMode.CREATE, AccessMode.READ, AccessMode.ACCUMULATE
_TAKE, _DROP = AccessMode.TAKE, AccessMode.DROP


@dataclass(slots=True)
class Step:
    """One task, resolved.

    Attributes:
        requires: Ids of the tasks that it must wait for, ascending.
        accesses: The pieces that it touches, in the order of `effects`.
        creates: Slabs that begin with it.
        frees: Slabs whose last use it is.
    """

    requires: tuple[int, ...]
    accesses: tuple[Access, ...]
    creates: tuple[int, ...]
    frees: tuple[int, ...] = ()


_SUMMED = frozenset({Tensor.OUT_PART, Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART})
_MOST_ADDED = 2
"""Contributions to a row whose sum is rounded once if it is kept in their precision."""

_Cells = dict[int, tuple[tuple[int, int], ...]]
"""Of one (tensor, version) at one place: chunk -> slabs, and the heads that each holds of it."""


class _Held(NamedTuple):
    """Slabs at one place.

    Attributes:
        cells: By tensor and version.
        whole: Slabs that nothing was taken from yet, by their piece: most reads ask for a whole
            one.
    """

    cells: dict[tuple[Tensor, int], _Cells]
    whole: dict[Piece, tuple[Segment, ...]]


class Residency:
    """The slabs of every place, as tasks are applied one by one."""

    def __init__(self, initial: tuple[Resident, ...]) -> None:
        self.slabs: list[Slab] = []
        self.last_use: list[int] = []
        self._writer: list[int | None] = []
        # Of slabs that were written in part: the last writer of each chunk so written.
        self._parts: dict[int, dict[int, int]] = {}
        self._readers: list[list[int]] = []
        self._held: defaultdict[Place, _Held] = defaultdict(lambda: _Held({}, {}))
        for place, piece in initial:
            self._create(place, piece, None)

    def apply(self, index: int, task: Task) -> Step:
        """Advance by one task.

        Args:
            index: The task's id.
            task: The task; its `after` is not looked at.

        Returns:
            What it must wait for, and what it touches.

        Raises:
            AbsentPieceError: It reads what its place does not hold.
            OverwriteError: It creates what its place already holds.
        """
        accesses: list[Access] = []
        creates: list[int] = []
        requires = self._advance(index, task, accesses, creates)
        return Step(requires, tuple(accesses), tuple(creates))

    def requires(self, index: int, task: Task) -> tuple[int, ...]:
        """Advance by one task as `apply` does; return what it must wait for, and nothing else."""
        return self._advance(index, task, None, [])

    def _advance(
        self, index: int, task: Task, accesses: list[Access] | None, creates: list[int]
    ) -> tuple[int, ...]:
        requires: set[int] = set()
        writers, readers = self._writer, self._readers
        parts, last_use = self._parts, self.last_use
        here: Place | None = None
        whole: dict[Piece, tuple[Segment, ...]] = {}
        for place, piece, mode in effects(task):
            if mode is _CREATE:
                segments = self._create(place, piece, index)
                creates.append(segments[0][0])
                if accesses is not None:
                    accesses.append(Access(place, piece, mode, segments))
                continue
            if place is not here:
                here, whole = place, self._held[place].whole
            known = whole.get(piece)
            if known is None:
                if mode is _ACCUMULATE:
                    creates.extend(self._fill(place, piece, index))
                known = self.resolve(place, piece, index, tolerant=isinstance(task, Finish))
            for slab, chunks, _ in known:
                if slab in parts:
                    requires.update(self._part_writers(slab, chunks))
                else:
                    writer = writers[slab]
                    if writer is not None:
                        requires.add(writer)
                last_use[slab] = index
                if mode is _READ:
                    readers[slab].append(index)
                    continue
                if readers[slab]:
                    requires.update(readers[slab])
                if mode is _ACCUMULATE:
                    self._write(slab, chunks, index)
            if mode is _TAKE or mode is _DROP:
                self._remove(place, piece, known)
            if accesses is not None:
                accesses.append(Access(place, piece, mode, known))
        requires.discard(index)
        return tuple(sorted(requires) if len(requires) > 1 else requires)

    def _part_writers(self, slab: int, chunks: tuple[int, ...]) -> Iterator[int]:
        """The tasks that last wrote chunks of a slab that was written in part."""
        base, parts = self._writer[slab], self._parts[slab]
        for chunk in chunks:
            writer = parts.get(chunk, base)
            if writer is not None:
                yield writer

    def _write(self, slab: int, chunks: tuple[int, ...], index: int) -> None:
        """Note who wrote chunks of a slab. What is taken is gone, so taking writes nothing."""
        if chunks == self.slabs[slab].piece.chunks:
            self._writer[slab] = index
            self._parts.pop(slab, None)
            self._readers[slab].clear()
        else:
            self._parts.setdefault(slab, {}).update(dict.fromkeys(chunks, index))

    def resolve(
        self, place: Place, piece: Piece, index: int | None, *, tolerant: bool = False
    ) -> tuple[Segment, ...]:
        """Find the parts of slabs that hold a piece, in the piece's chunk order.

        Raises:
            AbsentPieceError: Some of it is not there (unless `tolerant`).
        """
        held_here = self._held[place]
        whole = held_here.whole.get(piece)
        if whole is not None:
            return whole
        table = held_here.cells.get((piece.tensor, piece.version), {})
        runs: list[tuple[int, int, list[int]]] = []
        before = -1
        for chunk in piece.chunks:
            missing = piece.heads
            for slab, held in table.get(chunk, ()):
                found = held & piece.heads
                if found:
                    missing &= ~found
                    for heads in head_sets.heads_side_by_side(
                        found, self.slabs[slab].piece.heads, piece.heads
                    ):
                        self._append(runs, slab, (before, chunk), heads)
            before = chunk
            if missing and not tolerant:
                raise AbsentPieceError(
                    "a task reads only what its place holds",
                    rank=place.rank,
                    task=index,
                    detail=f"{piece} is read on {place.memory.value}, but chunk {chunk} "
                    f"heads {head_sets.text(missing)} are not there",
                )
        return tuple(Segment(slab, tuple(chunks), heads) for slab, heads, chunks in runs)

    def _append(
        self, runs: list[tuple[int, int, list[int]]], slab: int, pair: tuple[int, int], heads: int
    ) -> None:
        """Add a chunk, the second of a pair, to the run of the one before it in the piece.

        What lies side by side in a slab need not do so in the piece: a chunk of rows that attend
        to nothing may be missing between them.
        """
        before, chunk = pair
        if runs:
            last, last_heads, chunks = runs[-1]
            if last == slab and last_heads == heads and chunks[-1] == before:
                order = self.slabs[slab].piece.chunks
                at = order.index(chunks[-1]) + 1
                if at < len(order) and order[at] == chunk:
                    chunks.append(chunk)
                    return
        runs.append((slab, heads, [chunk]))

    def _create(self, place: Place, piece: Piece, index: int | None) -> tuple[Segment, ...]:
        here = self._held[place]
        tensor, chunks, heads, version = piece
        table = here.cells.get((tensor, version))
        if table is None:
            table = here.cells[tensor, version] = {}
        slab = len(self.slabs)
        cell = (slab, heads)
        for chunk in chunks:
            cells = table.get(chunk)
            if cells is None:
                table[chunk] = (cell,)
                continue
            for _, held in cells:
                if held & heads:
                    raise OverwriteError(
                        "nothing is overwritten in use",
                        rank=place.rank,
                        task=index,
                        detail=f"{piece} arrives, but chunk {chunk} is already there",
                    )
            table[chunk] = (*cells, cell)
        whole = (Segment(slab, chunks, heads),)
        here.whole[piece] = whole
        self.slabs.append(Slab(slab, place, piece))
        self.last_use.append(-1 if index is None else index)
        self._writer.append(index)
        self._readers.append([])
        return whole

    def _fill(self, place: Place, piece: Piece, index: int) -> Iterator[int]:
        """Create accumulators for the cells of a piece that have none yet."""
        table = self._held[place].cells.get((piece.tensor, piece.version), {})
        groups: list[tuple[int, list[int]]] = []
        if not table:
            yield self._create(place, piece, index)[0].slab
            return
        for chunk in piece.chunks:
            missing = piece.heads
            for _, held in table.get(chunk, ()):
                missing &= ~held
            if not missing:
                continue
            if groups and groups[-1][0] == missing:
                groups[-1][1].append(chunk)
            else:
                groups.append((missing, [chunk]))
        for heads, chunks in groups:
            part = Piece(piece.tensor, tuple(chunks), heads, piece.version)
            yield self._create(place, part, index)[0].slab

    def _remove(self, place: Place, piece: Piece, segments: tuple[Segment, ...]) -> None:
        here = self._held[place]
        table = here.cells.get((piece.tensor, piece.version), {})
        for slab, chunks, heads in segments:
            here.whole.pop(self.slabs[slab].piece, None)
            for chunk in chunks:
                rest = [
                    (other, left)
                    for other, held in table[chunk]
                    if (left := held & ~heads if other == slab else held)
                ]
                if rest:
                    table[chunk] = tuple(rest)
                else:
                    del table[chunk]

    def held(self) -> Iterator[tuple[int, Place, Piece]]:
        """List what is there now, by the slab that it lies in."""
        for place, tensor, version, table in self._tables():
            parts: dict[tuple[int, int], list[int]] = {}
            for chunk, cells in table.items():
                for slab, heads in cells:
                    parts.setdefault((slab, heads), []).append(chunk)
            for (slab, heads), chunks in parts.items():
                yield slab, place, Piece(tensor, tuple(chunks), heads, version)

    def left(self) -> Iterator[tuple[Place, Piece]]:
        """List the partial results that nobody took, chunk by chunk."""
        for place, tensor, version, table in self._tables():
            if tensor.is_part:
                for chunk, cells in table.items():
                    for _, heads in cells:
                        yield place, Piece(tensor, (chunk,), heads, version)

    def _tables(self) -> Iterator[tuple[Place, Tensor, int, _Cells]]:
        for place, here in self._held.items():
            for (tensor, version), table in here.cells.items():
                yield place, tensor, version, table


@dataclass(frozen=True, slots=True)
class Program:
    """A plan with every piece resolved to slabs.

    Attributes:
        plan: The plan.
        slabs: All buffers, by id; the first `initial` of them exist before the first task.
        steps: One per task.
        kept: Slabs that hold outputs or saved pieces and outlive the plan.
        initial: How many slabs are there at the start.
        final: Where each output and saved piece is at the end.
        narrow: Accumulators that need no more precision than their values, as the sum is rounded
            but once: a tile begins them, each row gets at most two kernel calls, or one and what a
            merge adds, and a `Finish` takes them.
    """

    plan: Plan
    slabs: tuple[Slab, ...]
    steps: tuple[Step, ...]
    kept: frozenset[int]
    initial: int
    final: Mapping[Resident, tuple[Segment, ...]]
    narrow: frozenset[int] = frozenset()


def program_of(plan: Plan, residency: Residency, initial: int, steps: list[Step]) -> Program:
    """Close a walk: find the outputs and when every other slab is last used."""
    final = {
        resident: residency.resolve(resident.place, resident.piece, None)
        for resident in (*plan.outputs, *plan.saved)
    }
    kept = frozenset(segment.slab for segments in final.values() for segment in segments)
    for slab, last in enumerate(residency.last_use):
        if slab not in kept and last >= 0:
            steps[last].frees += (slab,)
    slabs = tuple(residency.slabs)
    narrow = frozenset(_narrow(plan, slabs, steps)) - kept
    return Program(plan, slabs, tuple(steps), kept, initial, final, narrow)


def _narrow(plan: Plan, slabs: Sequence[Slab], steps: Sequence[Step]) -> Iterator[int]:
    """Yield the sums that need no more precision than their values; see `Program`."""
    if plan.problem.dtype.bytes == plan.problem.dtype.accumulator_bytes:
        return
    calls: dict[int, int] = {}
    wide: set[int] = set()
    for task, step in zip(plan.tasks, steps, strict=True):
        for access in step.accesses:
            tensor = access.piece.tensor
            if tensor not in _SUMMED or isinstance(task, Finish):
                continue
            for slab in (segment.slab for segment in access.segments):
                if slab in wide:
                    continue
                if isinstance(task, Tile):
                    calls[slab] = calls.get(slab, 0) + _overlap(plan, task, tensor)
                elif isinstance(task, Merge) and access.mode is _ACCUMULATE and slab in calls:
                    calls[slab] += 1
                else:
                    wide.add(slab)
                if calls.get(slab, 0) > _MOST_ADDED:
                    wide.add(slab)
    for slab, _, piece in slabs:
        if piece.tensor in _SUMMED and slab in calls and slab not in wide:
            yield slab


def _overlap(plan: Plan, tile: Tile, tensor: Tensor) -> int:
    """The most kernel calls of a tile that add to one row of a result."""
    q, kv = (plan.chunks(piece) for piece in tile.reads[:2])
    calls = lower(plan.problem.pattern, q, kv)
    spans = [call.cols if tensor.on_kv else call.rows for call in calls]
    if len(spans) == 1:
        return int(spans[0][0] < spans[0][1])
    # In order of position; where one span ends and another begins, the end comes first.
    events = sorted([(first, 1) for first, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate(change for _, change in events), default=0)
