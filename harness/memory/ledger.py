"""The memory ledger: what every rank holds while a plan runs, from the plan alone.

The ledger walks a resolved plan as the executor does and adds up bytes by the plan's own sizes. The
executor's account (`account.py`) measures the same from the allocator; the two are compared after
each checked run and must agree to the byte. What they count:

- inputs: the slabs that are there before the first task, held by the caller throughout;
- slabs: from the task that creates them to the last that touches them (outputs and saved pieces to
  the end), sharing storage where a finished result is its accumulator;
- joined reads: a piece that lies in several slabs is copied together for its task;
- packs: a piece that is not contiguous in its slab is copied to be sent, and the copy lives until
  its rank next sends;
- landings: what arrives for the middle of a larger slab waits in a buffer until the slab is
  touched;
- kernel results: out and lse, dq, dk and dv, or what a product adds, until they are in their
  accumulators; a sum that is rounded once (`Program.narrow`) has the precision of its values, and
  stays as a kernel left it until more is added or it becomes an output of the plan.

What a kernel allocates and frees inside is its own and not counted. A rank's host memory is counted
apart from its device.

That is one way to count (`EXECUTOR`). `Counting` says what else can be counted or left out, the
same for every strategy: what an algorithm needs (`ALGORITHM`), and what a GPU's kernels hold.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

from harness.memory.counting import ALGORITHM, EXECUTOR, Counting, Use
from harness.plan import heads as head_sets
from harness.plan.kernel_calls import lower
from harness.plan.problem import Direction
from harness.plan.residency import Access, Program, Segment, Step
from harness.plan.sizes import (
    batch_of,
    element_bytes,
    is_per_row,
    is_rounded,
    piece_bytes,
    width,
    wire_bytes,
)
from harness.plan.slices import Cut, OffsetRange, head_runs, positions, runs
from harness.plan.tasks import (
    GATHERED,
    AccessMode,
    Collective,
    Delta,
    Finish,
    Leg,
    Linear,
    Memory,
    Merge,
    Piece,
    Place,
    Tensor,
    Tile,
    Transfer,
    legs_of,
)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes per rank.

    Attributes:
        inputs_bytes: Bytes that the caller holds on the device.
        peak_bytes: The most that is held there at any time, inputs included.
        host_peak_bytes: As `peak_bytes`, in the rank's host memory.
        uses_bytes: `peak_bytes` by use, at the first moment that it is reached.
    """

    inputs_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    host_peak_bytes: tuple[int, ...]
    uses_bytes: tuple[Mapping[Use, int], ...]


def ledger(program: Program, counting: Counting = EXECUTOR) -> Ledger:
    """Add up what every rank holds while a plan runs."""
    return _Ledger(program, counting).run()


def peaks(program: Program) -> tuple[int, int]:
    """Peak of the fullest rank: as `execute` holds memory, and as the algorithm needs it."""
    held, needed = (ledger(program, counting) for counting in (EXECUTOR, ALGORITHM))
    return max(held.peak_bytes), max(needed.peak_bytes)


def trade_buffers(program: Program) -> tuple[int, ...]:
    """Bytes of q, k and v before and after the trade of tokens for heads, if stages share buffers.

    Per rank, for each of q, k and v, the largest piece that is made there and the largest that is
    gathered there. This counts what the UPipe paper calls QKV and all-to-all buffers.

    Source: arXiv:2602.21196, section 3.3.
    """
    sizes: dict[tuple[int, Tensor, bool], int] = {}
    for _, place, piece in program.slabs:
        if piece.tensor in (Tensor.Q, Tensor.K, Tensor.V) and place.memory is Memory.DEVICE:
            key = (place.rank, piece.tensor, piece.version == GATHERED)
            sizes[key] = max(sizes.get(key, 0), piece_bytes(program.plan, piece))
    ranks = range(program.plan.problem.cp)
    return tuple(sum(size for key, size in sizes.items() if key[0] == rank) for rank in ranks)


class _Result(NamedTuple):
    """Result of a kernel call, to be added to an accumulator.

    Attributes:
        cut: Where it belongs.
        size: Its bytes.
        exact: Whether it is laid out as a slab.
        wide: Whether it has the precision of its accumulator.
    """

    cut: Cut
    size: int
    exact: bool
    wide: bool


@dataclass(slots=True)
class _Loop:
    """Memory that the loop of released ring code holds at a place.

    Attributes:
        heads: Query heads that it is about.
        results: Bytes that kernels return into.
        receive: Bytes to receive dk and dv in.
        sums: Slabs that it adds to.
        reads: Slabs that kernels read; they wait for the end.
    """

    heads: int
    results: int = 0
    receive: int = 0
    sums: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


_Kernel = tuple[Direction, Cut, Cut]
"""A kernel call: its direction, its rows and columns, its query heads and KV heads."""
_TURNED = frozenset({Tensor.Q, Tensor.K, Tensor.DQ, Tensor.DK})
_SUMS = frozenset({Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART})


class _Ledger:
    """Mirror of the interpreter, in bytes."""

    def __init__(self, program: Program, counting: Counting) -> None:
        self.program = program
        self.counting = counting
        self.plan = program.plan
        self.problem = program.plan.problem
        cp = self.problem.cp
        places = [Place(rank, memory) for memory in Memory for rank in range(cp)]
        self.live = dict.fromkeys(places, 0)
        self.peak = dict.fromkeys(places, 0)
        self.inputs = dict.fromkeys(places, 0)
        self.packs: dict[int, list[tuple[Place, int]]] = {}
        self.uses = {place: dict.fromkeys(Use, 0) for place in places}
        self.peak_uses = {place: dict(self.uses[place]) for place in places}
        self.arrived = {
            slab
            for task, step in zip(self.plan.tasks, program.steps, strict=True)
            if legs_of(task)
            for slab in step.creates
        }
        self.use: dict[int, Use] = {}
        self.size: dict[int, int] = {}
        self.storage: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        self.landings: dict[int, int] = {}
        self.narrow = program.narrow if counting.narrow else frozenset()
        self.loose: set[int] = set()
        self.laid_out = {s.slab for r in self.plan.outputs for s in program.final[r]}
        self.made: set[int] = set()
        self._bytes: dict[Piece, int] = {}
        self._wire: dict[Piece, int] = {}
        self._kernels: dict[_Kernel, tuple[list[_Result], int]] = {}
        self._rows: dict[tuple[Tensor, tuple[int, ...]], dict[int, int]] = {}
        self._unbroken: dict[Hashable, bool] = {}
        self.loops: dict[Place, _Loop] = {}
        self.saved = {
            segment.slab for resident in program.plan.saved for segment in program.final[resident]
        }
        for slab in program.slabs[: program.initial]:
            self.inputs[slab.place] += self._piece_bytes(slab.piece)
            self._make(slab.id)
            self.holders[slab.id] += counting.held

    def run(self) -> Ledger:
        for task, step in zip(self.plan.tasks, self.program.steps, strict=True):
            match task:
                case Transfer() | Collective():
                    self._legs(legs_of(task), step)
                case Tile():
                    self._tile(task, step)
                case Merge():
                    self._merge(task.place, step)
                case Finish():
                    self._finish(task, step)
                case Delta():
                    self._delta(task.place, step)
                case Linear():
                    self._linear(task, step)
                case _:
                    pass
            for slab in step.frees:
                place = self.program.slabs[slab].place
                visits = self.use.get(self.storage.get(slab, -1)) is Use.RECEIVED
                if isinstance(task, Tile) and place in self.loops and not visits:
                    self.loops[place].reads.append(slab)
                else:
                    self._free(slab)
        saved = set(self.plan.saved)
        for resident in (*self.plan.outputs, *self.plan.saved):
            segments = self.program.final[resident]
            use = Use.SAVED if resident in saved else Use.RESULT
            self._joined(resident.place, resident.piece, segments, use)
        ranks = range(self.problem.cp)
        device, host = (
            tuple(self.peak[place] for place in places)
            for places in ([Place(rank, memory) for rank in ranks] for memory in Memory)
        )
        inputs = tuple(self.inputs[Place(rank)] for rank in ranks)
        return Ledger(inputs, device, host, tuple(self.peak_uses[Place(r)] for r in ranks))

    def _piece_bytes(self, piece: Piece) -> int:
        found = self._bytes.get(piece)
        if found is None:
            found = piece_bytes(self.plan, piece)
            if self._is_narrowed(piece.tensor):
                dtype = self.problem.dtype
                found = found // dtype.accumulator_bytes * dtype.bytes
            self._bytes[piece] = found
        return found

    def _wire_bytes(self, piece: Piece) -> int:
        found = self._wire.get(piece)
        if found is None:
            found = self._wire[piece] = wire_bytes(self.plan, piece)
        return found

    def _is_narrowed(self, tensor: Tensor) -> bool:
        """Whether a partial result is counted in the precision of values."""
        if not tensor.is_part or tensor.is_weight or is_per_row(tensor):
            return False
        return not (self.counting.wide_rows if tensor.is_headless else self.counting.wide_sums)

    # Bytes that come and go -----------------------------------------------------------------

    def _take(self, place: Place, size: int, use: Use) -> int:
        if use is Use.STAGING and not self.counting.staging:
            return 0
        self._change(place, size, use)
        return size

    def _give(self, place: Place, size: int, use: Use) -> None:
        self._change(place, -size, use)

    def _change(self, place: Place, size: int, use: Use) -> None:
        if not size or use in self.counting.apart:
            return
        live = self.live[place] = self.live[place] + size
        self.uses[place][use] += size
        if live > self.peak[place]:
            self.peak[place] = live
            self.peak_uses[place] = self.uses[place].copy()

    def _use_of(self, slab: int) -> Use:
        """Purpose for which a slab is held."""
        piece = self.program.slabs[slab].piece
        if piece.tensor.is_weight:
            return Use.WEIGHTS
        if slab < self.program.initial:
            backward = self.plan.direction is Direction.BACKWARD
            given = (Tensor.DOUT, Tensor.DY) if backward else tuple(Tensor)
            return Use.INPUT if piece.tensor in given else Use.SAVED
        if slab in self.program.kept:
            return Use.SAVED if slab in self.saved else Use.RESULT
        if slab in self.arrived and (piece.version != GATHERED or piece.tensor.is_part):
            return Use.RECEIVED
        if piece.tensor.is_part:
            return Use.ACCUMULATOR
        return Use.GATHERED if slab in self.arrived else Use.LOCAL

    def _now(self, storage: int, use: Use) -> None:
        """A storage is held for something else from now on."""
        place = self.program.slabs[storage].place
        self._change(place, -self.size[storage], self.use[storage])
        self._change(place, self.size[storage], use)
        self.use[storage] = use

    def _make(self, slab: int, shared: int | None = None) -> None:
        """Give a slab a storage of its own, or that of another slab."""
        self.made.add(slab)
        if shared is None:
            place, piece = self.program.slabs[slab].place, self.program.slabs[slab].piece
            self.storage[slab] = slab
            self.use[slab] = self._use_of(slab)
            size = self._piece_bytes(piece)
            if slab in self.narrow:
                dtype = self.problem.dtype
                size = size // dtype.accumulator_bytes * dtype.bytes
            self.size[slab] = self._take(place, size, self.use[slab])
            self.holders[slab] = 1
            if place in self.loops and piece.tensor in _SUMS and not piece.version:
                self.loops[place].sums.append(slab)
        elif shared in self.storage:
            self.storage[slab] = self.storage[shared]
            self.holders[self.storage[shared]] += 1
            self._now(self.storage[shared], self._use_of(slab))

    def _free(self, slab: int) -> None:
        if slab not in self.made:
            return
        self._touch(slab)
        storage = self.storage.pop(slab, None)
        if storage is None:
            return
        self.holders[storage] -= 1
        if self.holders[storage] == 0:
            place, use = self.program.slabs[slab].place, self.use.pop(storage)
            self._give(place, self.size.pop(storage), use)

    def _touch(self, slab: int) -> None:
        """Move what has landed for a slab into it."""
        if slab in self.landings:
            self._give(self.program.slabs[slab].place, self.landings.pop(slab), Use.STAGING)

    def _joined(
        self, place: Place, piece: Piece, segments: Sequence[Segment], use: Use = Use.STAGING
    ) -> int:
        """Read a piece: bytes of the copy that joins several slabs, else 0."""
        size = 0
        if len(segments) > 1 and self.counting.staging:
            size = self._take(place, self._piece_bytes(piece), use)
        for segment in segments:
            self._touch(segment.slab)
        return size

    def _read(self, access: Access) -> int:
        return self._joined(access.place, access.piece, access.segments)

    # Moving ---------------------------------------------------------------------------------

    def _legs(self, legs: Sequence[Leg], step: Step) -> None:
        for rank in {leg.src.rank for leg in legs if leg.src.rank != leg.dst.rank}:
            for place, size in self.packs.pop(rank, ()):
                self._give(place, size, Use.STAGING)
        accesses = iter(step.accesses)
        reads = [[next(accesses) for _ in leg.pieces] for leg in legs]
        creates = {(a.place, a.piece.tensor, a.piece.version): a for a in accesses}
        for leg, pieces in zip(legs, reads, strict=True):
            for access in pieces:
                self._leg(leg, access, creates)

    def _leg(
        self, leg: Leg, access: Access, creates: Mapping[tuple[Place, Tensor, int], Access]
    ) -> None:
        src, dst, piece = leg.src, leg.dst, access.piece
        size, wire = self._piece_bytes(piece), self._wire_bytes(piece)
        if src.rank != dst.rank:
            copied = self._read(access)
            if is_rounded(self.plan, piece.tensor):
                joined, copied = copied, self._take(src, wire, Use.STAGING)
                self._give(src, joined, Use.STAGING)
            elif not copied and not self._contiguous(access.segments[0]):
                copied = self._take(src, size, Use.STAGING)
            self.packs.setdefault(src.rank, []).append((src, copied))
        slab = creates[leg.dst, piece.tensor, leg.version].segments[0].slab
        if slab not in self.made:
            self._make(slab)
        if src.rank == dst.rank:
            self._give(src, self._read(access), Use.STAGING)
            return
        whole = self.program.slabs[slab].piece
        if wire == size and self._lands_unbroken(whole, piece):
            self.landings.setdefault(slab, 0)
        else:
            landed = self._take(dst, wire, Use.STAGING)
            self.landings[slab] = self.landings.get(slab, 0) + landed

    def _lands_unbroken(self, whole: Piece, piece: Piece) -> bool:
        """Whether a piece is one contiguous part of a slab."""
        if piece.chunks == whole.chunks and piece.heads == whole.heads:
            return True
        parts = list(runs(whole.chunks, piece.chunks))
        spans = head_sets.heads_side_by_side(piece.heads, whole.heads)
        if not len(parts) == len(spans) == 1:
            return False
        return self._is_contiguous(whole, parts[0], positions(whole.heads, piece.heads))

    def _contiguous(self, segment: Segment) -> bool:
        whole = self.program.slabs[segment.slab].piece
        if segment.slab in self.loose:  # of it one token alone is
            tokens = self.plan.tokens(whole._replace(chunks=segment.chunks))
            return tokens == 1 and batch_of(self.plan, whole.tensor) == 1
        if segment.chunks == whole.chunks and segment.heads == whole.heads:
            return True
        return self._is_contiguous(whole, segment.chunks, positions(whole.heads, segment.heads))

    def _is_contiguous(self, whole: Piece, chunks: Sequence[int], heads: OffsetRange) -> bool:
        """Whether a part of a contiguous slab is contiguous itself."""
        key = whole.tensor, whole.heads, whole.chunks, tuple(chunks), heads
        found = self._unbroken.get(key)
        if found is None:
            found = self._unbroken[key] = self._is_unbroken(whole, chunks, heads)
        return found

    def _is_unbroken(self, whole: Piece, chunks: Sequence[int], heads: OffsetRange) -> bool:
        tokens = self.plan.tokens(whole)
        part = self.plan.tokens(whole._replace(chunks=tuple(chunks)))
        sizes = (
            batch_of(self.plan, whole.tensor),
            heads[1] - heads[0],
            part,
            width(self.plan, whole.tensor),
        )
        wide = sizes[3]
        strides = (whole.heads.bit_count() * tokens * wide, tokens * wide, wide, 1)
        expected = 1
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    # Attention ------------------------------------------------------------------------------

    def _tile(self, tile: Tile, step: Step) -> None:
        place, problem = tile.place, self.problem
        joined = sum(self._read(access) for access in step.accesses[: len(tile.reads)])
        writes = step.accesses[len(tile.reads) :]
        fresh = set(step.creates)
        if self.counting.loop and tile.direction is Direction.BACKWARD:
            self._loop(place, tile)
        q_chunks, kv_chunks = (self.plan.chunks(piece) for piece in tile.reads[:2])
        calls = lower(problem.pattern, q_chunks, kv_chunks)
        by_heads = head_runs(tile.heads, problem.group)
        for call in calls:
            for cuts in by_heads:
                results, scratch = self._kernel(tile.direction, (call.rows, call.cols), cuts)
                if not self.counting.results or place in self.loops:
                    results = [result._replace(size=0, exact=False) for result in results]
                self._take(place, sum([result.size for result in results]), Use.WORKSPACE)
                if self.counting.results:
                    self._run(place, scratch)
                self._add_all(place, writes, results, fresh)
                if not self.counting.results:  # it writes into the accumulators
                    self._run(place, scratch)
        self._begin(fresh)
        self._give(place, joined, Use.STAGING)

    def _kernel(self, direction: Direction, spans: Cut, heads: Cut) -> tuple[list[_Result], int]:
        """Results of a kernel call of some rows and columns, and the bytes that it holds inside."""
        found = self._kernels.get((direction, spans, heads))
        if found is None:
            (rows, cols), (q_heads, kv_heads) = spans, heads
            row, col = (rows, q_heads), (cols, kv_heads)
            problem = self.problem
            if direction is Direction.FORWARD:
                found = [self._forward(row, problem.head_dim_v), self._lse(row)], 0
            else:
                results = [
                    self._backward(row, problem.head_dim),
                    self._backward(col, problem.head_dim),
                    self._backward(col, problem.head_dim_v),
                ]
                shared = q_heads[1] - q_heads[0] > kv_heads[1] - kv_heads[0]
                found = results, self._scratch(results if shared else results[:1])
            self._kernels[direction, spans, heads] = found
        return found

    def _run(self, place: Place, scratch: int) -> None:
        """Let a kernel run that holds some bytes inside."""
        self._give(place, self._take(place, scratch, Use.WORKSPACE), Use.WORKSPACE)

    def _scratch(self, results: Sequence[_Result]) -> int:
        """Bytes that a backward kernel sums these results in, before it rounds them."""
        dtype = self.problem.dtype
        if not self.counting.scratch or dtype.bytes == dtype.accumulator_bytes:
            return 0
        return sum(result.size for result in results) // dtype.bytes * dtype.accumulator_bytes

    def _loop(self, place: Place, tile: Tile) -> None:
        """Enter the loop of released ring code for some heads, or widen its buffers."""
        if place in self.loops and self.loops[place].heads != tile.heads:
            self._end_of_loop(place)
        loop = self.loops.setdefault(place, _Loop(tile.heads))
        dtype = self.problem.dtype
        counts = [self._count(piece) for piece in tile.writes]
        grown = max(0, sum(counts) * dtype.bytes - loop.results)
        loop.results += self._take(place, grown, Use.WORKSPACE)
        grown = max(0, sum(counts[1:]) * dtype.accumulator_bytes - loop.receive)
        loop.receive += self._take(place, grown, Use.RECEIVED)

    def _count(self, piece: Piece) -> int:
        return piece_bytes(self.plan, piece) // element_bytes(self.plan, piece.tensor)

    def _end_of_loop(self, place: Place) -> None:
        """Cast all sums, then let go what the loop held."""
        loop = self.loops.pop(place)
        sums = (self.program.slabs[slab].piece for slab in loop.sums if slab in self.storage)
        casts = sum(map(self._count, sums)) * self.problem.dtype.bytes
        self._give(place, self._take(place, casts, Use.LOCAL), Use.LOCAL)
        self._give(place, loop.results, Use.WORKSPACE)
        self._give(place, loop.receive, Use.RECEIVED)
        for read in loop.reads:
            self._free(read)

    def _forward(self, cut: Cut, wide: int) -> _Result:
        size = self._elements(cut, wide) * self.problem.dtype.bytes
        (first, last), (low, high) = cut
        exact = self._is_wide or last - first == 1 or high - low == 1
        return _Result(cut, size, exact=exact, wide=self._is_wide)

    def _lse(self, cut: Cut) -> _Result:
        size = self._elements(cut, 1) * self.problem.dtype.accumulator_bytes
        return _Result(cut, size, exact=True, wide=True)

    def _backward(self, cut: Cut, wide: int) -> _Result:
        # A kernel leaves its gradients token by token, all heads of a token side by side; as slabs
        # go head by head, only one head or one token needs no copy.
        (first, last), (low, high) = cut
        exact = last - first == 1 or high - low == 1 or not self.counting.staging
        size = self._elements(cut, wide) * self.problem.dtype.bytes
        return _Result(cut, size, exact=exact, wide=self._is_wide)

    @property
    def _is_wide(self) -> bool:
        """Whether values have the precision in which their sums are counted."""
        dtype = self.problem.dtype
        return dtype.bytes == dtype.accumulator_bytes or not self.counting.wide_sums

    def _elements(self, cut: Cut, wide: int) -> int:
        (first, last), (low, high) = cut
        return self.problem.batch * (high - low) * (last - first) * wide

    def _add_all(
        self,
        place: Place,
        writes: Sequence[Access],
        results: Sequence[_Result],
        fresh: set[int],
        *,
        use: Use = Use.WORKSPACE,
    ) -> None:
        """Put a kernel's results into accumulators; they go when all are in."""
        adopted: set[int] = set()
        cuts = [result.cut for result in results]
        for number, slab, everything, fills in self._parts_of(writes, cuts):
            result = results[number]
            if slab in fresh and everything:
                fresh.discard(slab)
                # A result that fills the slab in its precision becomes the slab; one that is
                # laid out otherwise only if the slab may be as it came.
                narrow = slab in self.narrow
                if fills and (narrow or (result.exact and result.wide)):
                    adopted.add(number)
                    self._adopt(slab, result.size, use)
                    if not result.exact:
                        self.loose.add(slab)
                else:
                    self._make(slab)
                continue
            if slab in fresh:
                fresh.discard(slab)
                self._make(slab)
            self._touch(slab)
            self._lay_out(slab)
        held = sum(result.size for number, result in enumerate(results) if number not in adopted)
        self._give(place, held, use)

    def _begin(self, fresh: set[int]) -> None:
        """Make the accumulators that a task names and adds nothing to, such as of masked rows."""
        for slab in sorted(fresh):
            self._make(slab)

    def _adopt(self, slab: int, size: int, use: Use) -> None:
        self.made.add(slab)
        self.storage[slab] = slab
        self.size[slab] = size
        self.holders[slab] = 1
        self.use[slab] = use
        self._now(slab, self._use_of(slab))

    def _lay_out(self, slab: int) -> None:
        """Move a loose slab into a new one, with the contribution that is added to it."""
        if slab in self.loose:
            self.loose.discard(slab)
            place, size = self.program.slabs[slab].place, self.size[slab]
            self._give(place, self._take(place, size, self.use[slab]), self.use[slab])

    def _parts_of(
        self, accesses: Sequence[Access], cuts: Sequence[Cut]
    ) -> Iterator[tuple[int, int, bool, bool]]:
        """Yield the parts of some accesses (see `_parts`), each with the number of its access.

        In the order in which they are added to: an output and its lse, which are merged together,
        part by part; gradients one after the other.
        """
        parts = [
            [(number, *part) for part in self._parts(access, cut)]
            for number, (access, cut) in enumerate(zip(accesses, cuts, strict=True))
        ]
        merged = accesses[0].piece.tensor is Tensor.OUT_PART
        return chain.from_iterable(zip(*parts, strict=True) if merged else parts)

    def _parts(self, access: Access, cut: Cut) -> Iterator[tuple[int, bool, bool]]:
        """Yield (slab, whether the cut is all of it, whether it is all of the cut)."""
        rows, heads = cut
        piece = access.piece
        slab, chunks, inner = access.segments[0]
        if self._all_of(access) and (chunks, inner) == (piece.chunks, piece.heads):
            # As for most: the piece is one slab, so that a cut of it lies in that.
            (first, last), (low, high) = cut
            if first < last and low < high:
                size = (last - first, high - low)
                yield slab, size == (self.plan.tokens(piece), piece.heads.bit_count()), True
            return
        starts = self._starts(piece)
        for segment in access.segments:
            whole = self.program.slabs[segment.slab].piece
            tokens = self.plan.tokens(whole._replace(chunks=segment.chunks))
            row = starts[segment.chunks[0]]
            first, last = max(rows[0], row), min(rows[1], row + tokens)
            low, high = positions(piece.heads, segment.heads)
            h0, h1 = max(heads[0], low), min(heads[1], high)
            if first >= last or h0 >= h1:
                continue
            everything = (last - first, h1 - h0) == (
                self.plan.tokens(whole),
                whole.heads.bit_count(),
            )
            yield segment.slab, everything, ((first, last), (h0, h1)) == cut

    def _starts(self, piece: Piece) -> dict[int, int]:
        key = (piece.tensor, piece.chunks)
        starts = self._rows.get(key)
        if starts is None:
            lengths = [len(tokens) for tokens in self.plan.chunks(piece)]
            rows = accumulate(lengths, initial=0)
            starts = self._rows[key] = dict(zip(piece.chunks, rows, strict=False))
        return starts

    # Folding and finishing ------------------------------------------------------------------

    def _merge(self, place: Place, step: Step) -> None:
        half = len(step.accesses) // 2
        fresh = set(step.creates)
        pairs = list(zip(step.accesses[:half], step.accesses[half:], strict=True))
        at = 0
        while at < len(pairs):
            both = pairs[at : at + (2 if pairs[at][0].piece.tensor is Tensor.OUT_PART else 1)]
            joined = [self._read(source) for source, _ in both]
            self._fold(both, joined, fresh)
            self._give(place, sum(joined), Use.STAGING)
            at += len(both)
        self._begin(fresh)

    def _fold(
        self, pairs: Sequence[tuple[Access, Access]], joined: Sequence[int], fresh: set[int]
    ) -> None:
        """Add pieces to accumulators: pairs of (source, target), and what joining each took."""
        pieces = [source.piece for source, _ in pairs]
        cuts = [((0, self.plan.tokens(each)), (0, each.heads.bit_count())) for each in pieces]
        targets = [target for _, target in pairs]
        for number, slab, everything, fills in self._parts_of(targets, cuts):
            source = pairs[number][0]
            whole = everything and fills and not joined[number] and self._all_of(source)
            if slab in fresh:
                self._make(slab, shared=source.segments[0].slab if whole else None)
            fresh.discard(slab)
            self._touch(slab)
            self._lay_out(slab)

    def _all_of(self, access: Access) -> bool:
        """Whether a piece is exactly one slab."""
        if len(access.segments) != 1:
            return False
        segment = access.segments[0]
        whole = self.program.slabs[segment.slab].piece
        return (whole.chunks, whole.heads) == (segment.chunks, segment.heads)

    def _finish(self, task: Finish, step: Step) -> None:
        if task.place in self.loops and any(part.tensor in _SUMS for part in task.parts):
            self._end_of_loop(task.place)
        count = len(task.parts)
        for part, result in zip(step.accesses[:count], step.accesses[count:], strict=True):
            slab = result.segments[0].slab
            piece = result.piece
            for segment in part.segments:
                self._touch(segment.slab)
            same = (
                self._all_of(part)
                and (part.segments[0].chunks, part.segments[0].heads) == (piece.chunks, piece.heads)
                and self._may_be(part, slab)
            )
            self._make(slab, shared=part.segments[0].slab if same else None)

    def _may_be(self, part: Access, result: int) -> bool:
        """Whether an accumulator that is all of a result may be the result itself."""
        source = part.segments[0].slab
        if source not in self.loose:
            tensor = self.program.slabs[result].piece.tensor
            wide = element_bytes(self.plan, part.piece.tensor)
            return source in self.narrow or element_bytes(self.plan, tensor) == wide
        self.loose.discard(source)
        if result in self.laid_out:
            return False
        self.loose.add(result)
        return True

    def _delta(self, place: Place, step: Step) -> None:
        joined = sum(self._read(access) for access in step.accesses[:2])
        self._make(step.accesses[2].segments[0].slab)
        self._give(place, joined, Use.STAGING)

    def _linear(self, task: Linear, step: Step) -> None:
        joined = sum(self._read(access) for access in step.accesses[:2])
        write = step.accesses[2]
        turned = 0
        if task.rotary and self.counting.rotary:
            piece = next(p for p in (*task.writes, *task.reads) if p.tensor in _TURNED)
            turned = self._count(piece) * self.problem.dtype.accumulator_bytes
        self._take(task.place, turned, Use.WORKSPACE)
        if write.mode is AccessMode.CREATE:
            self._make(write.segments[0].slab)
        elif self._all_of(write) and not step.creates:
            self._touch(write.segments[0].slab)  # it is added to in place
        else:
            piece = write.piece
            whole = ((0, self.plan.tokens(piece)), (0, piece.heads.bit_count()))
            results = self._piece_bytes(piece) if self.counting.results else 0
            use = Use.WEIGHTS if piece.tensor.is_weight else Use.WORKSPACE
            size = self._take(task.place, results, use)
            added = _Result(whole, size, exact=self.counting.results, wide=True)
            fresh = set(step.creates)
            self._add_all(task.place, [write], [added], fresh, use=use)
            self._begin(fresh)
        self._give(task.place, turned, Use.WORKSPACE)
        self._give(task.place, joined, Use.STAGING)
