"""One rank's computing tasks as launches: tiles, merges, products, and what they add up.

As in `harness.execute`, a contribution to all of a fresh accumulator begins it, others are merged
or added in the order of the tile's kernel calls. Where the accumulator has the precision and the
shape of the result, the kernel writes it; else a tensor of its own, which is copied or added.
"""

from collections.abc import Sequence
from typing import NamedTuple

from harness.plan.kernel_calls import lower
from harness.plan.problem import Direction, Dtype
from harness.plan.residency import Access, Program, Step
from harness.plan.slices import Cut, head_runs
from harness.plan.tasks import (
    AccessMode,
    Delta,
    Finish,
    Linear,
    LinearOp,
    Merge,
    Task,
    Tensor,
    Tile,
)
from harness.program.operations import Kernel, Lane
from harness.program.slabs import RankSlabs, everything
from harness.program.writer import Buffer, BufferView, RankWriter


class _Target(NamedTuple):
    """Where a part of a kernel's result is added.

    Attributes:
        slab: The accumulator.
        cut: Its rows and heads; None = all.
        inner: Those of the result.
    """

    slab: int
    cut: Cut | None
    inner: Cut


class TaskEmitter:
    """Emits the launches of one rank's tasks.

    Args:
        program: The resolved plan.
        writer: Where operations go.
        slabs: The rank's slabs.
    """

    def __init__(self, program: Program, writer: RankWriter, slabs: RankSlabs) -> None:
        self.program = program
        self.plan = program.plan
        self.writer = writer
        self.slabs = slabs
        self.task = 0
        self.fresh: set[int] = set()

    def emit(self, index: int, task: Task, step: Step) -> None:
        """Emit one task that computes."""
        self.task = index
        self.fresh = set(step.creates)
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
            case _:
                return
        for slab in sorted(self.fresh):
            self._fill(slab)

    def _launch(
        self,
        kernel: Kernel,
        reads: Sequence[BufferView],
        writes: Sequence[BufferView],
        call: tuple[int, int] | None = None,
    ) -> None:
        self.writer.launch(Lane.COMPUTE, kernel, tuple(reads), tuple(writes), self.task, call)

    def _read(self, accesses: Sequence[Access], held: list[Buffer]) -> list[BufferView]:
        """Read pieces; what was made to join them is to be released after use."""
        views = []
        for access in accesses:
            view, joined = self.slabs.read(access, self.task)
            views.append(view)
            if joined is not None:
                held.append(joined)
        return views

    def _release(self, held: Sequence[Buffer]) -> None:
        for buffer in held:
            self.slabs.release(buffer)

    # Attention ------------------------------------------------------------------------------

    def _tile(self, tile: Tile, step: Step) -> None:
        held: list[Buffer] = []
        views = self._read(step.accesses[: len(tile.reads)], held)
        reads = {piece.tensor: view for piece, view in zip(tile.reads, views, strict=True)}
        writes = step.accesses[len(tile.reads) :]
        q, kv = (self.plan.chunks(piece) for piece in tile.reads[:2])
        by_heads = head_runs(tile.heads, self.plan.problem.group)
        work = self._forward if tile.direction is Direction.FORWARD else self._backward
        for number, call in enumerate(lower(self.plan.problem.pattern, q, kv)):
            for at, (q_heads, kv_heads) in enumerate(by_heads):
                on_q, on_kv = (call.rows, q_heads), (call.cols, kv_heads)
                work(reads, writes, on_q, on_kv, (number, at))
        self._release(held)

    def _forward(
        self,
        reads: dict[Tensor, BufferView],
        writes: Sequence[Access],
        on_q: Cut,
        on_kv: Cut,
        call: tuple[int, int],
    ) -> None:
        q, k, v = reads[Tensor.Q].cut(on_q), reads[Tensor.K].cut(on_kv), reads[Tensor.V].cut(on_kv)
        outs, lses = (self._targets(access, on_q) for access in writes)
        shape = (*q.shape[:3], v.shape[3])
        held: list[Buffer] = []
        out = self._room(outs, shape, q, held)
        lse = self._room(lses, q.shape[:3], q, held, self.slabs.acc)
        self._launch(Kernel.ATTEND, (q, k, v), (out, lse), call)
        self._merge_into(outs, lses, out, lse)
        self._release(held)

    def _backward(
        self,
        reads: dict[Tensor, BufferView],
        writes: Sequence[Access],
        on_q: Cut,
        on_kv: Cut,
        call: tuple[int, int],
    ) -> None:
        by_delta = Tensor.DELTA in reads
        row = Tensor.DELTA if by_delta else Tensor.OUT
        q, k, v = reads[Tensor.Q].cut(on_q), reads[Tensor.K].cut(on_kv), reads[Tensor.V].cut(on_kv)
        dout, given, lse = (reads[t].cut(on_q) for t in (Tensor.DOUT, row, Tensor.LSE))
        targets = [
            self._targets(access, where)
            for access, where in zip(writes, (on_q, on_kv, on_kv), strict=True)
        ]
        held: list[Buffer] = []
        grads = [
            self._room(each, like.shape, like, held)
            for each, like in zip(targets, (q, k, v), strict=True)
        ]
        kernel = Kernel.ATTEND_BACKWARD_DELTA if by_delta else Kernel.ATTEND_BACKWARD
        self._launch(kernel, (dout, q, k, v, given, lse), grads, call)
        for each, grad in zip(targets, grads, strict=True):
            self._add_into(each, grad)
        self._release(held)

    # Accumulators ---------------------------------------------------------------------------

    def _targets(self, access: Access, where: Cut) -> list[_Target]:
        return [_Target(*part) for part in self.slabs.parts(access, where)]

    def _room(
        self,
        targets: Sequence[_Target],
        shape: Sequence[int],
        like: BufferView,
        held: list[Buffer],
        dtype: Dtype | None = None,
    ) -> BufferView:
        """Where a kernel's result goes: the accumulator that it begins, or a tensor of its own."""
        wanted = dtype or like.dtype
        if len(targets) == 1 and targets[0].slab in self.fresh and targets[0].cut is None:
            begun = self.slabs.begin(targets[0].slab)
            if begun.dtype is wanted and begun.shape == tuple(shape):
                return begun
            del self.slabs.views[targets[0].slab]
        made = self.slabs.new(tuple(shape), wanted)
        held.append(made.buffer)
        return made

    def _merge_into(
        self,
        outs: Sequence[_Target],
        lses: Sequence[_Target],
        out: BufferView,
        lse: BufferView,
    ) -> None:
        """Merge a partial output into accumulators; one that it fills begins with it."""
        for target, lse_target in zip(outs, lses, strict=True):
            part, lse_part = out.cut(target.inner), lse.cut(lse_target.inner)
            if target.slab in self.fresh and target.cut is None:
                self.fresh -= {target.slab, lse_target.slab}
                self._begun(target.slab, part)
                self._begun(lse_target.slab, lse_part)
                continue
            self._fill(target.slab)
            self._fill(lse_target.slab)
            total = self.slabs.slab(target.slab).cut(target.cut)
            lse_total = self.slabs.slab(lse_target.slab).cut(lse_target.cut)
            self._launch(Kernel.MERGE, (total, lse_total, part, lse_part), (total, lse_total))

    def _add_into(self, targets: Sequence[_Target], grad: BufferView) -> None:
        """Add a partial gradient to accumulators; one that it fills begins with it."""
        for target in targets:
            part = grad.cut(target.inner)
            if target.slab in self.fresh and target.cut is None:
                self.fresh.discard(target.slab)
                self._begun(target.slab, part)
                continue
            if target.slab in self.fresh:
                self._fill(target.slab)
                total = self.slabs.slab(target.slab).cut(target.cut)
                self._launch(Kernel.COPY, (part,), (total,))
                continue
            total = self.slabs.slab(target.slab).cut(target.cut)
            self._launch(Kernel.ADD, (total, part), (total,))

    def _begun(self, slab: int, part: BufferView) -> None:
        """Begin an accumulator with a contribution to all of it, which may lie there already."""
        if slab not in self.slabs.views:
            self._launch(Kernel.COPY, (part,), (self.slabs.begin(slab),))

    def _fill(self, slab: int) -> None:
        """Begin a fresh accumulator without contributions."""
        if slab in self.fresh:
            self.fresh.discard(slab)
            tensor = self.program.slabs[slab].piece.tensor
            self._neutral(tensor, self.slabs.begin(slab))

    def _neutral(self, tensor: Tensor, view: BufferView) -> None:
        empty = tensor in (Tensor.LSE, Tensor.LSE_PART)
        self._launch(Kernel.NO_KEYS if empty else Kernel.ZERO, (), (view,))

    # Products -------------------------------------------------------------------------------

    def _linear(self, task: Linear, step: Step) -> None:
        held: list[Buffer] = []
        left, right = self._read(step.accesses[:2], held)
        write = step.accesses[2]
        match task.op:
            case LinearOp.PROJECT:
                kernel = Kernel.PROJECT
            case LinearOp.INPUT_GRAD if write.piece.tensor is Tensor.DOUT:
                kernel = Kernel.PROJECT
            case LinearOp.OUTPUT | LinearOp.INPUT_GRAD:
                kernel = Kernel.TO_MODEL
            case LinearOp.WEIGHT_GRAD:
                kernel = Kernel.WEIGHT_GRADIENT
                if task.reads[0].tensor is Tensor.X:
                    left, right = right, left
        self._product(kernel, (left, right), write)
        self._release(held)

    def _product(self, kernel: Kernel, factors: tuple[BufferView, ...], write: Access) -> None:
        if write.mode is AccessMode.CREATE:
            slab = write.segments[0].slab
            self.fresh.discard(slab)
            self._launch(kernel, factors, (self.slabs.begin(slab),))
            return
        total = self._whole_target(write)
        if total is not None:
            adding = {
                Kernel.TO_MODEL: Kernel.TO_MODEL_ADD,
                Kernel.WEIGHT_GRADIENT: Kernel.WEIGHT_GRADIENT_ADD,
            }[kernel]
            self._launch(adding, (*factors, total), (total,))
            return
        targets = self._targets(write, everything(self.plan, write.piece))
        held: list[Buffer] = []
        made = self._room(targets, self.slabs.shape(write.piece), factors[0], held, self.slabs.acc)
        self._launch(kernel, factors, (made,))
        self._add_into(targets, made)
        self._release(held)

    def _whole_target(self, write: Access) -> BufferView | None:
        """The accumulator that a product may add to in place: one slab that is there, all of it."""
        if len(write.segments) != 1:
            return None
        slab = self.program.slabs[write.segments[0].slab]
        if slab.id in self.fresh or slab.piece != write.piece:
            return None
        return self.slabs.slab(slab.id)

    # Folding and finishing ------------------------------------------------------------------

    def _merge(self, step: Step) -> None:
        half = len(step.accesses) // 2
        pairs = list(zip(step.accesses[:half], step.accesses[half:], strict=True))
        for at, (source, target) in enumerate(pairs):
            whole = everything(self.plan, source.piece)
            held: list[Buffer] = []
            match source.piece.tensor:
                case Tensor.OUT_PART:
                    lse, lse_target = pairs[at + 1]  # the builder puts them next to one another
                    out_view, lse_view = self._read((source, lse), held)
                    outs, lses = self._targets(target, whole), self._targets(lse_target, whole)
                    self._adopt(source, outs, step)
                    self._adopt(lse, lses, step)
                    self._merge_into(outs, lses, out_view, lse_view)
                case Tensor.LSE_PART:
                    pass
                case _:
                    (view,) = self._read((source,), held)
                    targets = self._targets(target, whole)
                    self._adopt(source, targets, step)
                    self._add_into(targets, view)
            self._release(held)

    def _adopt(self, source: Access, targets: Sequence[_Target], step: Step) -> None:
        """Let a source that is gone afterwards become the accumulator that it begins."""
        if len(targets) != 1 or len(source.segments) != 1:
            return
        (target,), (segment,) = targets, source.segments
        alone = self.program.slabs[segment.slab].piece == source.piece
        begins = target.slab in self.fresh and target.cut is None
        if alone and begins and segment.slab in step.frees:
            view = self.slabs.slab(segment.slab)
            if view.shape == self.slabs.shape(self.program.slabs[target.slab].piece):
                self.slabs.become(target.slab, view)

    def _finish(self, task: Finish, step: Step) -> None:
        count = len(task.parts)
        for part, result in zip(step.accesses[:count], step.accesses[count:], strict=True):
            slab = result.segments[0].slab
            self.fresh.discard(slab)
            if self._same_cells(part, result):
                source = self.slabs.slab(part.segments[0].slab)
                if source.dtype is self.slabs.dtype_of(result.piece.tensor):
                    self.slabs.become(slab, source)
                    continue
                self._launch(Kernel.COPY, (source,), (self.slabs.begin(slab),))
                continue
            whole = self.slabs.begin(slab)
            self._neutral(result.piece.tensor, whole)
            self.slabs.gather(part, everything(self.plan, part.piece), whole, self.task)

    def _same_cells(self, part: Access, result: Access) -> bool:
        """Whether a part is just one slab, and all of the result."""
        if len(part.segments) != 1:
            return False
        (segment,) = part.segments
        source = self.program.slabs[segment.slab].piece
        return (source.heads, source.chunks) == (segment.heads, segment.chunks) and (
            (segment.heads, segment.chunks) == (result.piece.heads, result.piece.chunks)
        )

    def _delta(self, step: Step) -> None:
        held: list[Buffer] = []
        out, dout = self._read(step.accesses[:2], held)
        slab = step.accesses[2].segments[0].slab
        self.fresh.discard(slab)
        self._launch(Kernel.DELTA, (out, dout), (self.slabs.begin(slab),))
        self._release(held)
