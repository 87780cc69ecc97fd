"""The interpreter: run a verified plan on tensors.

One interpreter serves every strategy and transport. It walks the tasks in the plan's order, does
the part of the ranks that live in this process, and keeps one tensor per slab of the resolved
plan. Transfers start when their task is reached and are waited for when a task first touches what
they bring, so they run beside the kernels in between. Merges happen in the plan's order, never in
order of arrival, so equal plans give equal bits on every transport.

A slab is a contiguous tensor `(batch, heads, tokens, width)`; lse and delta lack the last axis.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from harness import heads as head_sets
from harness import kernels
from harness.lower import lower
from harness.plan import (
    Collective,
    Delta,
    Finish,
    Free,
    Leg,
    Merge,
    Mode,
    Piece,
    Place,
    Resident,
    Task,
    Tensor,
    Tile,
    Transfer,
    legs_of,
    ranks_of,
)
from harness.problem import Direction, Dtype
from harness.residency import Access, Program, Segment, Slab, Step
from harness.sizes import is_accumulated, is_per_row, width
from harness.transport import Handle, Transport

DTYPES: Mapping[Dtype, torch.dtype] = {
    Dtype.FLOAT64: torch.float64,
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
}


_Range = tuple[int, int]
_Cut = tuple[_Range, _Range]
"""Half-open ranges of rows and of heads."""


class Span(NamedTuple):
    """When a rank did a task, in seconds since the run began."""

    task: int
    rank: int
    stream: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Run:
    """What an execution leaves behind: tensors by place and piece, and when things happened."""

    results: dict[Resident, torch.Tensor]
    spans: list[Span] = field(default_factory=list)


Watch = Callable[[int], None]
"""Called with a rank before its part of a task runs (the memory account listens)."""


def execute(
    program: Program,
    inputs: Mapping[Resident, torch.Tensor],
    transport: Transport,
    *,
    timed: bool = False,
    watch: Watch | None = None,
) -> Run:
    """Run a plan.

    Args:
        program: A verified, resolved plan (see `verify`).
        inputs: A tensor for each initial resident of the ranks in this process, shaped as a slab.
            Tensors are read, never written.
        transport: Where the ranks are.
        timed: Record spans.
        watch: See `Watch`.

    Returns:
        Tensors of the outputs and saved pieces of the ranks in this process.

    Raises:
        ValueError: An input is missing or has the wrong shape, dtype or device.
    """
    return _Interpreter(program, inputs, transport, timed, watch).run()


class _Interpreter:
    def __init__(
        self,
        program: Program,
        inputs: Mapping[Resident, torch.Tensor],
        transport: Transport,
        timed: bool,
        watch: Watch | None,
    ) -> None:
        self.program = program
        self.plan = program.plan
        self.problem = program.plan.problem
        self.transport = transport
        self.local = frozenset(transport.ranks)
        self.dtype = DTYPES[self.problem.dtype]
        self.acc = kernels.accumulator_dtype(self.dtype)
        self.timed = timed
        self.watch = watch
        self.spans: list[Span] = []
        self.buffers: dict[int, torch.Tensor] = {}
        self.arriving: dict[int, list[Callable[[], None]]] = {}
        self.leaving: dict[int, list[Handle]] = {}
        self.device = torch.device("cpu")
        self._starts: dict[tuple[bool, tuple[int, ...]], dict[int, int]] = {}
        self._adopt(inputs)

    # Set-up ---------------------------------------------------------------------------------

    def _adopt(self, inputs: Mapping[Resident, torch.Tensor]) -> None:
        for slab in self.program.slabs[: self.program.initial]:
            if slab.place.rank not in self.local:
                continue
            resident = Resident(slab.place, slab.piece)
            if resident not in inputs:
                raise ValueError(f"execute: no tensor for {slab.piece} of rank {slab.place.rank}")
            tensor = inputs[resident]
            shape, dtype = self._shape(slab.piece), self._dtype(slab.piece.tensor)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"execute: {slab.piece} of rank {slab.place.rank} is {tuple(tensor.shape)} "
                    f"{tensor.dtype}; the plan needs {shape} {dtype}"
                )
            self.buffers[slab.id] = tensor
            self.device = tensor.device

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        rows = (self.problem.batch, piece.heads.bit_count(), self.plan.tokens(piece))
        wide = width(self.plan, piece.tensor)
        return rows if is_per_row(piece.tensor) else (*rows, wide)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return self.acc if is_accumulated(tensor) else self.dtype

    def _empty(self, piece: Piece) -> torch.Tensor:
        return torch.empty(self._shape(piece), dtype=self._dtype(piece.tensor), device=self.device)

    def _neutral(self, piece: Piece) -> torch.Tensor:
        fill = -torch.inf if piece.tensor in (Tensor.LSE, Tensor.LSE_PART) else 0.0
        return torch.full(
            self._shape(piece), fill, dtype=self._dtype(piece.tensor), device=self.device
        )

    # The walk -------------------------------------------------------------------------------

    def run(self) -> Run:
        with torch.no_grad():
            tag = 0
            for index, (task, step) in enumerate(
                zip(self.plan.tasks, self.program.steps, strict=True)
            ):
                legs = legs_of(task)
                if self.local.intersection(ranks_of(task)):
                    self._task(index, task, step, tag)
                tag += sum(len(leg.pieces) for leg in legs)
                for slab in step.frees:
                    self._free(slab)
            results = {
                resident: self._result(resident)
                for resident in (*self.plan.outputs, *self.plan.saved)
                if resident.place.rank in self.local
            }
            for slab in list(self.leaving):
                self._sent(slab)
        return Run(results, self.spans)

    def _task(self, index: int, task: Task, step: Step, tag: int) -> None:
        match task:
            case Transfer():
                self._legs(index, (task.leg,), step, tag)
            case Collective():
                self._legs(index, task.legs, step, tag)
            case _:
                self._on(task.place.rank)
                begin = time.perf_counter() if self.timed else 0.0
                match task:
                    case Tile():
                        self._tile(task, step)
                    case Merge():
                        self._merge(step)
                    case Finish():
                        self._finish(task, step)
                    case Delta():
                        self._delta(step)
                    case Free():
                        pass
                if self.timed:
                    self._span(index, task.place.rank, "compute", begin)

    def _on(self, rank: int) -> None:
        if self.watch is not None:
            self.watch(rank)

    def _span(self, index: int, rank: int, stream: str, begin: float) -> None:
        self.spans.append(Span(index, rank, stream, begin, time.perf_counter()))

    # Buffers --------------------------------------------------------------------------------

    def _slab(self, slab: int) -> torch.Tensor:
        """Return a slab's tensor, once it is all there."""
        for arrive in self.arriving.pop(slab, ()):
            arrive()
        return self.buffers[slab]

    def _free(self, slab: int) -> None:
        if slab in self.buffers:
            self._sent(slab)
            self._slab(slab)
            del self.buffers[slab]

    def _sent(self, slab: int) -> None:
        for handle in self.leaving.pop(slab, ()):
            handle.wait()

    def _rows(self, piece: Piece, chunks: Sequence[int]) -> _Range:
        """Rows of consecutive chunks in a tensor shaped as a piece."""
        key = (piece.tensor.on_kv, piece.chunks)
        if key not in self._starts:
            lengths = [len(chunk) for chunk in self.plan.chunks(piece)]
            rows = accumulate(lengths, initial=0)
            self._starts[key] = dict(zip(piece.chunks, rows, strict=False))
        first = self._starts[key][chunks[0]]
        table = self.plan.kv_chunks if piece.tensor.on_kv else self.plan.q_chunks
        return first, first + sum(len(table[chunk]) for chunk in chunks)

    def _view(self, segment: Segment) -> torch.Tensor:
        """The part of a slab's tensor that a segment names: a view where heads are a range."""
        slab = self.program.slabs[segment.slab]
        return _cut(
            self._slab(segment.slab),
            self._rows(slab.piece, segment.chunks),
            _positions(slab.piece.heads, segment.heads),
        )

    def _read(self, access: Access) -> torch.Tensor:
        """A piece as one tensor: a view of one slab, or a copy that joins several."""
        if len(access.segments) == 1:
            return self._view(access.segments[0])
        joined = self._empty(access.piece)
        for target, segment in self._targets(access, joined):
            target.copy_(self._view(segment))
        return joined

    def _targets(
        self, access: Access, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Segment]]:
        """The parts of a piece-shaped tensor that its segments fill."""
        for segment in access.segments:
            rows = self._rows(access.piece, segment.chunks)
            heads = _positions(access.piece.heads, segment.heads)
            yield _cut(whole, rows, heads), segment

    def _result(self, resident: Resident) -> torch.Tensor:
        segments = self.program.final[resident]
        return self._read(Access(resident.place, resident.piece, Mode.READ, segments))

    # Moving ---------------------------------------------------------------------------------

    def _legs(self, index: int, legs: Sequence[Leg], step: Step, tag: int) -> None:
        begin = time.perf_counter() if self.timed else 0.0
        accesses = iter(step.accesses)
        reads = [[next(accesses) for _ in leg.pieces] for leg in legs]
        creates = {
            (access.place, access.piece.tensor, access.piece.version): access for access in accesses
        }
        number = tag
        for leg, pieces in zip(legs, reads, strict=True):
            for access in pieces:
                if leg.src != leg.dst and leg.src.rank in self.local:
                    self._on(leg.src.rank)
                    self._send(leg, access, number)
                if leg.dst.rank in self.local:
                    self._on(leg.dst.rank)
                    key = (leg.dst, access.piece.tensor, leg.version)
                    self._arrive(leg, access, creates[key], number)
                number += 1
        if self.timed:
            for rank in self.local.intersection(ranks_of(self.plan.tasks[index])):
                self._span(index, rank, "transfer", begin)

    def _send(self, leg: Leg, access: Access, tag: int) -> None:
        buffer = self._read(access).contiguous()
        handle = self.transport.send(buffer, leg.src.rank, leg.dst.rank, tag)
        for segment in access.segments:
            self.leaving.setdefault(segment.slab, []).append(handle)

    def _arrive(self, leg: Leg, access: Access, create: Access, tag: int) -> None:
        slab = self.program.slabs[create.segments[0].slab]
        if slab.id not in self.buffers:
            self.buffers[slab.id] = self._empty(slab.piece)
        piece = access.piece
        whole = self.buffers[slab.id]
        targets = list(self._landing(slab.piece, piece, whole))
        if leg.src == leg.dst:
            _scatter(self._read(access), targets)
            return
        direct = len(targets) == 1 and targets[0][0].is_contiguous()
        buffer = targets[0][0] if direct else self._empty(piece)
        handle = self.transport.receive(buffer, leg.src.rank, leg.dst.rank, tag)

        def arrive() -> None:
            handle.wait()
            if not direct:
                _scatter(buffer, targets)

        self.arriving.setdefault(slab.id, []).append(arrive)

    def _landing(
        self, whole: Piece, piece: Piece, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, _Range]]:
        """Where a piece's rows go in the tensor of a larger piece: views, and the rows they take."""
        heads = _positions(whole.heads, piece.heads)
        for chunks in _runs(whole.chunks, piece.chunks):
            yield (
                _cut(tensor, self._rows(whole, chunks), heads),
                self._rows(piece, chunks),
            )

    # Attention ------------------------------------------------------------------------------

    def _tile(self, tile: Tile, step: Step) -> None:
        reads = {a.piece.tensor: self._read(a) for a in step.accesses[: len(tile.reads)]}
        writes = step.accesses[len(tile.reads) :]
        fresh = set(step.creates)
        q_chunks, kv_chunks = (self.plan.chunks(piece) for piece in tile.reads[:2])
        scale = self.problem.softmax_scale
        for call in lower(self.problem.pattern, q_chunks, kv_chunks):
            for q_heads, kv_heads in _head_runs(tile.heads, self.problem.group):
                q = _cut(reads[Tensor.Q], call.rows, q_heads)
                k, v = (_cut(reads[t], call.cols, kv_heads) for t in (Tensor.K, Tensor.V))
                if tile.direction is Direction.FORWARD:
                    out, lse = kernels.attend(q, k, v, call.mask, scale)
                    self._accumulate_out(writes, call.rows, q_heads, out, lse, fresh)
                    continue
                dout, lse = (_cut(reads[t], call.rows, q_heads) for t in (Tensor.DOUT, Tensor.LSE))
                if Tensor.DELTA in reads:
                    delta = _cut(reads[Tensor.DELTA], call.rows, q_heads)
                    grads = kernels.attend_backward_delta(
                        dout, q, k, v, delta, lse, call.mask, scale
                    )
                else:
                    out = _cut(reads[Tensor.OUT], call.rows, q_heads)
                    grads = kernels.attend_backward(dout, q, k, v, out, lse, call.mask, scale)
                dq, dk, dv = writes
                self._accumulate(dq, call.rows, q_heads, grads[0], fresh)
                self._accumulate(dk, call.cols, kv_heads, grads[1], fresh)
                self._accumulate(dv, call.cols, kv_heads, grads[2], fresh)

    def _accumulate_out(
        self,
        writes: Sequence[Access],
        rows: tuple[int, int],
        heads: tuple[int, int],
        out: torch.Tensor,
        lse: torch.Tensor,
        fresh: set[int],
    ) -> None:
        """Merge a partial output into the accumulators; a fresh slab that it fills becomes it."""
        outs = self._parts(writes[0], rows, heads)
        lses = self._parts(writes[1], rows, heads)
        for (slab, cut, inner), (lse_slab, lse_cut, _) in zip(outs, lses, strict=True):
            part, lse_part = _cut(out, *inner), _cut(lse, *inner)
            if slab in fresh and cut is None:
                fresh -= {slab, lse_slab}
                self.buffers[slab] = part.to(self.acc)
                self.buffers[lse_slab] = lse_part
                continue
            self._fill(slab, fresh)
            self._fill(lse_slab, fresh)
            target, lse_target = self._slab(slab), self._slab(lse_slab)
            if cut is not None:
                target = _cut(target, *cut)
            if lse_cut is not None:
                lse_target = _cut(lse_target, *lse_cut)
            kernels.merge_(target, lse_target, part, lse_part)

    def _accumulate(
        self,
        write: Access,
        rows: tuple[int, int],
        heads: tuple[int, int],
        grad: torch.Tensor,
        fresh: set[int],
    ) -> None:
        """Add a partial gradient to the accumulators; a fresh slab that it fills becomes it."""
        for slab, cut, inner in self._parts(write, rows, heads):
            part = _cut(grad, *inner)
            if slab in fresh and cut is None:
                fresh.discard(slab)
                self.buffers[slab] = part.to(self.acc).contiguous()
                continue
            self._fill(slab, fresh)
            target = self._slab(slab)
            (target if cut is None else _cut(target, *cut)).add_(part)

    def _fill(self, slab: int, fresh: set[int]) -> None:
        """Start a fresh accumulator that is filled part by part."""
        if slab in fresh:
            fresh.discard(slab)
            self.buffers[slab] = self._neutral(self.program.slabs[slab].piece)

    def _parts(
        self, access: Access, rows: tuple[int, int], heads: tuple[int, int]
    ) -> list[tuple[int, _Cut | None, _Cut]]:
        """Split rows and heads of a piece by the slabs that hold it.

        Returns:
            Per slab: its id, the rows and heads inside it (None = all of it), and the rows and
            heads inside the tensor that covers just `rows` and `heads`.
        """
        piece = access.piece
        parts: list[tuple[int, _Cut | None, _Cut]] = []
        for segment in access.segments:
            slab = self.program.slabs[segment.slab]
            slab_rows = self._rows(slab.piece, segment.chunks)
            row, end = self._rows(piece, segment.chunks)
            first, last = max(rows[0], row), min(rows[1], end)
            if first >= last:
                continue
            shift = slab_rows[0] - row
            low, high = _positions(piece.heads, segment.heads)
            h0, h1 = max(heads[0], low), min(heads[1], high)
            if h0 >= h1:
                continue
            up = _positions(slab.piece.heads, segment.heads)[0] - low
            cut = ((first + shift, last + shift), (h0 + up, h1 + up))
            inner = ((first - rows[0], last - rows[0]), (h0 - heads[0], h1 - heads[0]))
            everything = (
                (0, self.plan.tokens(slab.piece)),
                (0, slab.piece.heads.bit_count()),
            )
            parts.append((slab.id, None if cut == everything else cut, inner))
        return parts

    # Folding and finishing ------------------------------------------------------------------

    def _merge(self, step: Step) -> None:
        half = len(step.accesses) // 2
        sources, targets = step.accesses[:half], step.accesses[half:]
        fresh = set(step.creates)
        waiting: dict[tuple[int, tuple[int, ...], int], tuple[Access, torch.Tensor]] = {}
        for source, target in zip(sources, targets, strict=True):
            piece = source.piece
            value = self._read(source)
            rows, heads = (0, self.plan.tokens(piece)), (0, piece.heads.bit_count())
            if piece.tensor is Tensor.OUT_PART:
                waiting[piece.version, piece.chunks, piece.heads] = (target, value)
            elif piece.tensor is Tensor.LSE_PART:
                out_target, out = waiting.pop((piece.version, piece.chunks, piece.heads))
                self._accumulate_out((out_target, target), rows, heads, out, value, fresh)
            else:
                self._accumulate(target, rows, heads, value, fresh)

    def _finish(self, task: Finish, step: Step) -> None:
        count = len(task.parts)
        for part, result in zip(step.accesses[:count], step.accesses[count:], strict=True):
            slab = result.segments[0].slab
            dtype = self._dtype(result.piece.tensor)
            if len(part.segments) == 1:
                segment = part.segments[0]
                source = self.program.slabs[segment.slab]
                same = source.piece.heads == segment.heads == result.piece.heads
                if same and source.piece.chunks == segment.chunks == result.piece.chunks:
                    self.buffers[slab] = self._slab(segment.slab).to(dtype)
                    continue
            whole = self._neutral(result.piece)
            for target, segment in self._targets(part, whole):
                target.copy_(self._view(segment))
            self.buffers[slab] = whole

    def _delta(self, step: Step) -> None:
        out, dout, result = step.accesses
        self.buffers[result.segments[0].slab] = kernels.delta(self._read(out), self._read(dout))


def _cut(tensor: torch.Tensor, rows: _Range, heads: _Range) -> torch.Tensor:
    """Rows and heads of a slab-shaped tensor, as a view."""
    return tensor[:, heads[0] : heads[1], rows[0] : rows[1]]


def _positions(whole: int, part: int) -> _Range:
    """Where a set of heads lies in the ascending list of a larger set's heads.

    Raises:
        ValueError: The part is not a run of the whole.
    """
    low = (whole & ((part & -part) - 1)).bit_count()
    high = low + part.bit_count()
    inside = head_sets.members(whole)[low:high]
    if sum(1 << head for head in inside) != part:
        raise ValueError(
            f"heads {head_sets.text(part)} are no run of heads {head_sets.text(whole)}"
        )
    return low, high


@lru_cache(maxsize=1024)
def _head_runs(heads: int, group: int) -> tuple[tuple[_Range, _Range], ...]:
    """Split query heads into runs in which each KV head serves equally many.

    Returns:
        Per run, offsets into the ascending query heads and into their ascending KV heads.
    """
    counts: dict[int, int] = {}
    for head in head_sets.members(heads):
        counts[head // group] = counts.get(head // group, 0) + 1
    runs: list[tuple[_Range, _Range]] = []
    q, equal = 0, 0
    for kv, count in enumerate(counts.values()):
        if runs and count == equal:
            (q0, _), (kv0, _) = runs[-1]
            runs[-1] = ((q0, q + count), (kv0, kv + 1))
        else:
            runs.append(((q, q + count), (kv, kv + 1)))
        q, equal = q + count, count
    return tuple(runs)


def _runs(whole: Sequence[int], part: Sequence[int]) -> Iterator[list[int]]:
    """Split chunks into runs that lie side by side in `whole`."""
    run: list[int] = []
    for chunk in part:
        if run and whole.index(run[-1]) + 1 != whole.index(chunk):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run


def _scatter(source: torch.Tensor, targets: Sequence[tuple[torch.Tensor, _Range]]) -> None:
    for target, rows in targets:
        target.copy_(source[:, :, rows[0] : rows[1]])
