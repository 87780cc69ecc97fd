"""The interpreter: run a verified plan on tensors.

One interpreter serves every strategy and transport. It walks the tasks in the plan's order, does
the part of the ranks that live in this process, and keeps one tensor per slab of the resolved
plan. Transfers start when their task is reached and are waited for when a task first touches what
they bring, so they run beside the kernels in between. Merges happen in the plan's order, never in
order of arrival, so equal plans give equal bits on every transport.

A slab is a contiguous tensor `(batch, heads, tokens, width)`; lse and delta lack the last axis, and
a weight has batch and tokens 1 and per head a matrix for its width (see `linear`). A rank's host
memory is another place: what moves there and back is copied, and crosses no transport.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import torch

from harness.execute import kernels, projections
from harness.execute.rotary import TurnsOf
from harness.execute.task_arguments import score_change, turns_of_task
from harness.execute.transport import Handle, Transport
from harness.plan.kernel_calls import Call, lower
from harness.plan.problem import Direction
from harness.plan.residency import Access, Program, Segment, Step
from harness.plan.sizes import batch_of, is_accumulated, is_per_row, is_rounded, width
from harness.plan.slices import Cut, OffsetRange, head_runs, landing, parts_of, positions
from harness.plan.tasks import (
    AccessMode,
    Collective,
    Delta,
    Finish,
    Free,
    Leg,
    Linear,
    LinearOp,
    Memory,
    Merge,
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


class TaskSpan(NamedTuple):
    """Start and end of a task on a rank, in seconds since the run began."""

    task: int
    rank: int
    stream: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class Run:
    """Result of an execution: tensors by place and piece, and the times of tasks."""

    results: dict[Resident, torch.Tensor]
    spans: list[TaskSpan] = field(default_factory=list)


class Watch(Protocol):
    """Someone who follows the run, such as the memory account."""

    def on_place(self, place: Place) -> None:
        """Hear that what follows is done for a rank, in one of its memories."""

    def in_kernel(self) -> AbstractContextManager[object]:
        """Bracket a kernel call: what it allocates and frees inside is scratch."""


class _Nobody:
    def on_place(self, place: Place) -> None:
        """Hear nothing."""

    def in_kernel(self) -> AbstractContextManager[object]:
        return nullcontext()


def execute(
    program: Program,
    inputs: Mapping[Resident, torch.Tensor],
    transport: Transport,
    *,
    timed: bool = False,
    watch: Watch | None = None,
    turns: TurnsOf | None = None,
) -> Run:
    """Run a plan.

    Args:
        program: A verified, resolved plan (see `verify`).
        inputs: A tensor for each initial resident of the ranks in this process, shaped as a slab.
            Tensors are read, never written.
        transport: Where the ranks are.
        timed: Record spans.
        watch: See `Watch`.
        turns: How tokens of q and k of a layer turn; None = neighbouring pairs, by positions in the
            whole sequence and the problem's base.

    Returns:
        Tensors of the outputs and saved pieces of the ranks in this process.

    Raises:
        ValueError: An input is missing or has the wrong shape, dtype or device.
    """
    return _Interpreter(program, inputs, transport, timed, watch, turns).run()


class _Work(NamedTuple):
    """One kernel call of a tile, with what it reads and where its results go."""

    call: Call
    change: tuple[kernels.ScoreChange, ...]
    q_heads: OffsetRange
    kv_heads: OffsetRange
    reads: Mapping[Tensor, torch.Tensor]
    writes: Sequence[Access]
    fresh: set[int]

    def q(self, tensor: Tensor) -> torch.Tensor:
        """The call's rows of a query tensor."""
        return _cut(self.reads[tensor], self.call.rows, self.q_heads)

    def kv(self, tensor: Tensor) -> torch.Tensor:
        """The call's columns of a key tensor."""
        return _cut(self.reads[tensor], self.call.cols, self.kv_heads)


_Mark: TypeAlias = "float | torch.cuda.Event"


class _Clock:
    """Marks moments: on a CPU by the host's clock, on a GPU by events of the current stream.

    Seconds are those of the host's monotonic clock, which all processes of a machine share. A GPU's
    event is placed on it by one common moment, when the clock is made.
    """

    def __init__(self, device: torch.device) -> None:
        self._first: torch.cuda.Event | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._first = self._event()
        self._begin_s = time.perf_counter()

    def mark(self) -> "_Mark":
        """Mark this moment."""
        return time.perf_counter() if self._first is None else self._event()

    def seconds(self, mark: "_Mark") -> float:
        """Time of a mark; waits until the GPU has passed it."""
        if self._first is None or isinstance(mark, float):
            assert isinstance(mark, float)
            return mark
        mark.synchronize()
        return self._begin_s + float(self._first.elapsed_time(mark)) / 1e3  # milliseconds

    @staticmethod
    def _event() -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch: no annotations
        event.record()
        return event


class _Interpreter:
    def __init__(
        self,
        program: Program,
        inputs: Mapping[Resident, torch.Tensor],
        transport: Transport,
        timed: bool,
        watch: Watch | None,
        turns: TurnsOf | None,
    ) -> None:
        self.program = program
        self.plan = program.plan
        self.problem = program.plan.problem
        self.transport = transport
        self.local = frozenset(transport.ranks)
        self.dtype = getattr(torch, self.problem.dtype.value)
        self.acc = kernels.accumulator_dtype(self.dtype)
        self.timed = timed
        self.watch: Watch = watch or _Nobody()
        self.turns = turns
        self.marks: list[tuple[int, int, str, _Mark, _Mark]] = []
        self.buffers: dict[int, torch.Tensor] = {}
        self.arriving: dict[int, list[Callable[[], None]]] = {}
        self.leaving: dict[int, list[Handle]] = {}
        self.packed: dict[int, list[Handle]] = {}
        self.loose: set[int] = set()  # slabs as a kernel left them: all heads of a token in a row
        self.laid_out = {s.slab for r in self.plan.outputs for s in program.final[r]}
        self.device = torch.device("cpu")
        self.created = (
            {slab: index for index, step in enumerate(program.steps) for slab in step.creates}
            if timed
            else {}
        )
        self._adopt(inputs)
        self.clock = _Clock(self.device)

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
            if slab.place.memory is Memory.DEVICE:
                self.device = tensor.device

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        batch = batch_of(self.plan, piece.tensor)
        rows = (batch, piece.heads.bit_count(), self.plan.tokens(piece))
        wide = width(self.plan, piece.tensor)
        return rows if is_per_row(piece.tensor) else (*rows, wide)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return self.acc if is_accumulated(tensor) else self.dtype

    def _empty(
        self, piece: Piece, memory: Memory = Memory.DEVICE, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        host = memory is Memory.HOST
        return torch.empty(
            self._shape(piece),
            dtype=dtype or self._dtype(piece.tensor),
            device=torch.device("cpu") if host else self.device,
            pin_memory=host and self.device.type == "cuda",
        )

    def _neutral(self, piece: Piece, dtype: torch.dtype | None = None) -> torch.Tensor:
        fill = -torch.inf if piece.tensor in (Tensor.LSE, Tensor.LSE_PART) else 0.0
        return torch.full(
            self._shape(piece), fill, dtype=dtype or self._dtype(piece.tensor), device=self.device
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
            results: dict[Resident, torch.Tensor] = {}
            for resident in (*self.plan.outputs, *self.plan.saved):
                if resident.place.rank in self.local:
                    self.watch.on_place(resident.place)
                    results[resident] = self._result(resident)
            for slab in list(self.leaving):
                self._sent(slab)
            for rank in list(self.packed):
                self._unpack(rank)
        spans = [
            TaskSpan(task, rank, stream, self.clock.seconds(begin), self.clock.seconds(end))
            for task, rank, stream, begin, end in self.marks
        ]
        return Run(results, spans)

    def _task(self, index: int, task: Task, step: Step, tag: int) -> None:
        match task:
            case Transfer():
                self._legs(index, (task.leg,), step, tag)
            case Collective():
                self._legs(index, task.legs, step, tag)
            case _:
                self.watch.on_place(task.place)
                begin = self.clock.mark() if self.timed else 0.0
                match task:
                    case Tile():
                        self._tile(task, step)
                    case Merge():
                        self._merge(step)
                    case Finish():
                        self._finish(task, step)
                    case Delta():
                        self._delta(step)
                    case Linear():
                        self._linear(task, step)
                    case Free():
                        pass
                if self.timed:
                    self._span(index, task.place.rank, "compute", begin)

    def _span(self, index: int, rank: int, stream: str, begin: "_Mark") -> None:
        self.marks.append((index, rank, stream, begin, self.clock.mark()))

    # Buffers --------------------------------------------------------------------------------

    def _slab(self, slab: int) -> torch.Tensor:
        """Return a slab's tensor, once it is all there."""
        pending = self.arriving.pop(slab, None)
        if pending is not None:
            begin = self.clock.mark() if self.timed else 0.0
            for arrive in pending:
                arrive()
            if self.timed:
                rank = self.program.slabs[slab].place.rank
                self._span(self.created[slab], rank, "wait", begin)
        return self.buffers[slab]

    def _free(self, slab: int) -> None:
        if slab in self.buffers:
            self._sent(slab)
            self._slab(slab)
            del self.buffers[slab]

    def _sent(self, slab: int) -> None:
        for handle in self.leaving.pop(slab, ()):
            handle.wait()

    def _view(self, segment: Segment) -> torch.Tensor:
        """The part of a slab's tensor that a segment names: a view where heads are a range."""
        slab = self.program.slabs[segment.slab]
        return _cut(
            self._slab(segment.slab),
            self.plan.rows(slab.piece, segment.chunks),
            positions(slab.piece.heads, segment.heads),
        )

    def _read(self, access: Access) -> torch.Tensor:
        """A piece as one tensor: a view of one slab, or a copy that joins several."""
        if len(access.segments) == 1:
            return self._view(access.segments[0])
        joined = self._empty(access.piece, access.place.memory)
        for target, segment in self._targets(access, joined):
            target.copy_(self._view(segment))
        return joined

    def _targets(
        self, access: Access, whole: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Segment]]:
        """The parts of a piece-shaped tensor that its segments fill."""
        for segment in access.segments:
            rows = self.plan.rows(access.piece, segment.chunks)
            heads = positions(access.piece.heads, segment.heads)
            yield _cut(whole, rows, heads), segment

    def _result(self, resident: Resident) -> torch.Tensor:
        segments = self.program.final[resident]
        return self._read(Access(resident.place, resident.piece, AccessMode.READ, segments))

    # Moving ---------------------------------------------------------------------------------

    def _legs(self, index: int, legs: Sequence[Leg], step: Step, tag: int) -> None:
        begin = self.clock.mark() if self.timed else 0.0
        accesses = iter(step.accesses)
        reads = [[next(accesses) for _ in leg.pieces] for leg in legs]
        creates = {
            (access.place, access.piece.tensor, access.piece.version): access for access in accesses
        }
        for rank in {leg.src.rank for leg in legs if leg.src.rank != leg.dst.rank}:
            self._unpack(rank)
        number = tag
        with self.transport.batch():
            for leg, pieces in zip(legs, reads, strict=True):
                for access in pieces:
                    if leg.src.rank != leg.dst.rank and leg.src.rank in self.local:
                        self.watch.on_place(leg.src)
                        self._send(leg, access, number)
                    if leg.dst.rank in self.local:
                        self.watch.on_place(leg.dst)
                        key = (leg.dst, access.piece.tensor, leg.version)
                        self._arrive(leg, access, creates[key], number)
                    number += 1
        if self.timed:
            for rank in self.local.intersection(ranks_of(self.plan.tasks[index])):
                self._span(index, rank, "transfer", begin)

    def _send(self, leg: Leg, access: Access, tag: int) -> None:
        """Start to send a piece, from its slab where that is contiguous, else from a copy.

        A slab waits for its sends before it is freed; copies live until the rank next sends.
        """
        piece = self._read(access)
        if is_rounded(self.plan, access.piece.tensor):
            buffer = torch.empty_like(
                piece, dtype=self.dtype, memory_format=torch.contiguous_format
            )
            buffer.copy_(piece)
        else:
            buffer = piece.contiguous()
        handle = self.transport.send(buffer, leg.src.rank, leg.dst.rank, tag)
        if buffer is piece and len(access.segments) == 1:
            self.leaving.setdefault(access.segments[0].slab, []).append(handle)
        else:
            self.packed.setdefault(leg.src.rank, []).append(handle)

    def _unpack(self, rank: int) -> None:
        for handle in self.packed.pop(rank, ()):
            handle.wait()

    def _arrive(self, leg: Leg, access: Access, create: Access, tag: int) -> None:
        slab = self.program.slabs[create.segments[0].slab]
        if slab.id not in self.buffers:
            self.buffers[slab.id] = self._empty(slab.piece, slab.place.memory)
        piece = access.piece
        whole = self.buffers[slab.id]
        targets = list(self._landing(slab.piece, piece, whole))
        if leg.src.rank == leg.dst.rank:
            self.watch.on_place(leg.src)
            _scatter(self._read(access), targets)
            return
        rounded = is_rounded(self.plan, piece.tensor)
        direct = len(targets) == 1 and targets[0][0].is_contiguous() and not rounded
        narrow = self.dtype if rounded else None
        buffer = targets[0][0] if direct else self._empty(piece, dtype=narrow)
        handle = self.transport.receive(buffer, leg.src.rank, leg.dst.rank, tag)

        def arrive() -> None:
            handle.wait()
            if not direct:
                _scatter(buffer, targets)

        self.arriving.setdefault(slab.id, []).append(arrive)

    def _landing(
        self, whole: Piece, piece: Piece, tensor: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, Cut]]:
        """Where a piece goes in the tensor of a larger one: views, and what each takes of it."""
        for cut, own in landing(self.plan, whole, piece):
            yield _cut(tensor, *cut), own

    # Attention ------------------------------------------------------------------------------

    def _tile(self, tile: Tile, step: Step) -> None:
        reads = {a.piece.tensor: self._read(a) for a in step.accesses[: len(tile.reads)]}
        writes = step.accesses[len(tile.reads) :]
        fresh = set(step.creates)
        q_chunks, kv_chunks = (self.plan.chunks(piece) for piece in tile.reads[:2])
        calls = lower(self.problem.pattern, q_chunks, kv_chunks)
        by_heads = head_runs(tile.heads, self.problem.group)
        # A method of its own, so that a call's tensors are gone before the next one's.
        work = self._forward if tile.direction is Direction.FORWARD else self._backward
        for call in calls:
            for q_heads, kv_heads in by_heads:
                change = score_change(self.plan, tile, call, q_heads, self.device)
                work(_Work(call, change, q_heads, kv_heads, reads, writes, fresh))
        self._begin(fresh)

    def _forward(self, work: _Work) -> None:
        q, k, v = work.q(Tensor.Q), work.kv(Tensor.K), work.kv(Tensor.V)
        with self.watch.in_kernel():
            out, lse = kernels.attend_call(
                q, k, v, work.call.mask, self.problem.softmax_scale, *work.change
            )
        cut = (work.call.rows, work.q_heads)
        self._accumulate_out(work.writes, cut, out, lse, work.fresh)

    def _backward(self, work: _Work) -> None:
        q, k, v = work.q(Tensor.Q), work.kv(Tensor.K), work.kv(Tensor.V)
        dout, lse = work.q(Tensor.DOUT), work.q(Tensor.LSE)
        by_delta = Tensor.DELTA in work.reads
        row = work.q(Tensor.DELTA if by_delta else Tensor.OUT)
        kernel = kernels.attend_backward_delta if by_delta else kernels.attend_backward
        mask, scale = work.call.mask, self.problem.softmax_scale
        with self.watch.in_kernel():
            dq, dk, dv = kernel(dout, q, k, v, row, lse, mask, scale, *work.change)
        on_q, on_kv = (work.call.rows, work.q_heads), (work.call.cols, work.kv_heads)
        self._accumulate(work.writes[0], on_q, dq, work.fresh)
        self._accumulate(work.writes[1], on_kv, dk, work.fresh)
        self._accumulate(work.writes[2], on_kv, dv, work.fresh)

    def _accumulate_out(
        self,
        writes: Sequence[Access],
        where: Cut,
        out: torch.Tensor,
        lse: torch.Tensor,
        fresh: set[int],
    ) -> None:
        """Merge a partial output into the accumulators; a fresh slab that it fills becomes it."""
        outs = self._parts(writes[0], where)
        lses = self._parts(writes[1], where)
        for (slab, cut, inner), (lse_slab, lse_cut, _) in zip(outs, lses, strict=True):
            part, lse_part = _cut(out, *inner), _cut(lse, *inner)
            if slab in fresh and cut is None:
                fresh -= {slab, lse_slab}
                self.buffers[slab] = self._begun(slab, part, out)
                self.buffers[lse_slab] = _owned(lse_part, self.acc)
                continue
            self._fill(slab, fresh)
            self._fill(lse_slab, fresh)
            target, into = self._room(slab, cut)
            lse_target, _ = self._room(lse_slab, lse_cut)
            with self.watch.in_kernel():
                kernels.merge_(target, lse_target, part, lse_part, into)
            del target, into  # free the copy before the next is made

    def _accumulate(self, write: Access, where: Cut, grad: torch.Tensor, fresh: set[int]) -> None:
        """Add a partial gradient to the accumulators; a fresh slab that it fills becomes it."""
        for slab, cut, inner in self._parts(write, where):
            part = _cut(grad, *inner)
            if slab in fresh:
                fresh.discard(slab)
                if cut is None:
                    self.buffers[slab] = self._begun(slab, part, grad)
                else:
                    self.buffers[slab] = self._begun_in_part(slab, part, cut)
                continue
            target, into = self._room(slab, cut)
            kernels.add(target, part, into)
            del target, into  # as above

    def _begun(self, slab: int, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The accumulator that a first contribution makes, which is all or part of a result."""
        if slab not in self.program.narrow:
            return _owned(part, self.acc)
        if part.shape != whole.shape or part.dtype != self.dtype:
            return _owned(part, self.dtype)
        if 1 not in part.shape[1:3]:  # with one head or one token it is laid out as a slab
            self.loose.add(slab)
        return part

    def _begun_in_part(self, slab: int, part: torch.Tensor, cut: Cut) -> torch.Tensor:
        """As `_begun`, where the contribution is not to all of it: zeros around it."""
        piece = self.program.slabs[slab].piece
        dtype = self.dtype if slab in self.program.narrow else self.acc
        rows, heads = cut
        whole = torch.empty(self._shape(piece), dtype=dtype, device=self.device)
        _cut(whole, *cut).copy_(part)
        for rest in (
            whole[:, :, : rows[0]],
            whole[:, :, rows[1] :],
            whole[:, : heads[0], rows[0] : rows[1]],
            whole[:, heads[1] :, rows[0] : rows[1]],
        ):
            rest.zero_()
        return whole

    def _room(self, slab: int, cut: Cut | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the addend of a contribution and the target of the sum; lay out a loose slab."""
        total = into = self._slab(slab)
        if slab in self.loose:
            self.loose.discard(slab)
            into = torch.empty(total.shape, dtype=total.dtype, device=total.device)
            self.buffers[slab] = into
            if cut is not None:
                total = into.copy_(total)
        return (total, into) if cut is None else (_cut(total, *cut), _cut(into, *cut))

    def _fill(self, slab: int, fresh: set[int]) -> None:
        """Start a fresh accumulator that is filled part by part."""
        if slab in fresh:
            fresh.discard(slab)
            narrow = self.dtype if slab in self.program.narrow else None
            self.buffers[slab] = self._neutral(self.program.slabs[slab].piece, narrow)

    def _begin(self, fresh: set[int]) -> None:
        """Start the accumulators that a task names and adds nothing to, such as of masked rows."""
        for slab in sorted(fresh):
            self._fill(slab, fresh)

    def _parts(self, access: Access, where: Cut) -> list[tuple[int, Cut | None, Cut]]:
        return parts_of(self.plan, self.program.slabs, access, where)

    # Products -------------------------------------------------------------------------------

    def _linear(self, task: Linear, step: Step) -> None:
        left, right = (self._read(access) for access in step.accesses[:2])
        write = step.accesses[2]
        into = self._whole_target(write, step)
        with self.watch.in_kernel():
            turns = turns_of_task(self.plan, task, self.device, self.turns) if task.rotary else None
            match task.op:
                case LinearOp.PROJECT:
                    made = projections.project_tensors(left, right, turns)
                case LinearOp.INPUT_GRAD if write.piece.tensor is Tensor.DOUT:
                    made = projections.from_model(left, right)
                case LinearOp.OUTPUT | LinearOp.INPUT_GRAD:
                    made = projections.to_model(left, right, turns, into)
                case LinearOp.WEIGHT_GRAD:
                    x_first = task.reads[0].tensor is Tensor.X
                    rows, heads = (left, right) if x_first else (right, left)
                    made = projections.weight_gradient(heads, rows, turns, into)
            del turns
        if write.mode is AccessMode.CREATE:
            self.buffers[write.segments[0].slab] = made
        elif into is None:
            piece, fresh = write.piece, set(step.creates)
            whole = ((0, self.plan.tokens(piece)), (0, piece.heads.bit_count()))
            self._accumulate(write, whole, made, fresh)
            self._begin(fresh)

    def _whole_target(self, write: Access, step: Step) -> torch.Tensor | None:
        """The accumulator that a product may add to in place: one slab that is there, all of it."""
        if write.mode is AccessMode.CREATE or len(write.segments) != 1:
            return None
        (segment,) = write.segments
        slab = self.program.slabs[segment.slab]
        if slab.id in step.creates or slab.piece != write.piece:
            return None
        return self._slab(slab.id)

    # Folding and finishing ------------------------------------------------------------------

    def _merge(self, step: Step) -> None:
        half = len(step.accesses) // 2
        sources, targets = step.accesses[:half], step.accesses[half:]
        fresh = set(step.creates)
        pairs = list(zip(sources, targets, strict=True))
        for at, (source, target) in enumerate(pairs):
            piece = source.piece
            whole = ((0, self.plan.tokens(piece)), (0, piece.heads.bit_count()))
            match piece.tensor:
                case Tensor.OUT_PART:
                    # The builder puts the lse that belongs to a partial output next to it.
                    lse, lse_target = pairs[at + 1]
                    out_value, lse_value = self._read(source), self._read(lse)
                    self._accumulate_out((target, lse_target), whole, out_value, lse_value, fresh)
                case Tensor.LSE_PART:
                    pass
                case _:
                    self._accumulate(target, whole, self._read(source), fresh)
        self._begin(fresh)

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
                    self.buffers[slab] = self._finished(segment.slab, slab, dtype)
                    continue
            whole = self._neutral(result.piece)
            for target, segment in self._targets(part, whole):
                target.copy_(self._view(segment))
            self.buffers[slab] = whole

    def _finished(self, part: int, result: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a result: its accumulator where that will do, else a copy."""
        tensor = self._slab(part)
        if part not in self.loose:
            return _owned(tensor, dtype)
        self.loose.discard(part)
        if result not in self.laid_out:
            self.loose.add(result)
            return tensor
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)

    def _delta(self, step: Step) -> None:
        out, dout, result = step.accesses
        with self.watch.in_kernel():
            delta = kernels.delta(self._read(out), self._read(dout))
        self.buffers[result.segments[0].slab] = delta


def _cut(tensor: torch.Tensor, rows: OffsetRange, heads: OffsetRange) -> torch.Tensor:
    """Rows and heads of a slab-shaped tensor, as a view; the tensor itself if that is all of it."""
    if rows == (0, tensor.shape[2]) and heads == (0, tensor.shape[1]):
        return tensor
    return tensor[:, heads[0] : heads[1], rows[0] : rows[1]]


def _owned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor of a dtype that fills its storage: the same one, or a copy."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if whole and tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def _scatter(source: torch.Tensor, targets: Sequence[tuple[torch.Tensor, Cut]]) -> None:
    for target, (rows, heads) in targets:
        target.copy_(_cut(source, rows, heads))
