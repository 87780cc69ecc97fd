"""One rank's slabs while its program is emitted: where they are, what arrives, what is sent.

Transfers that follow one another with no computation of this rank between them form a round: one
group for each communicator. A piece that does not lie side by side in its slab, or is rounded on
its way, goes through a staging buffer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.cluster.machine import node_of
from harness.plan.plan import Plan
from harness.plan.problem import Dtype
from harness.plan.residency import Access, Program
from harness.plan.sizes import batch_of, is_accumulated, is_per_row, is_rounded, width
from harness.plan.slices import Cut, landing, parts_of
from harness.plan.tasks import Leg, Memory, Piece, Tensor
from harness.program.operations import COMMUNICATORS, MOST_POSTS, Kernel, Lane, PostEnd
from harness.program.sides import Lanes
from harness.program.writer import Buffer, BufferPost, BufferView, RankWriter, whole_view


def everything(plan: Plan, piece: Piece) -> Cut:
    """All rows and heads of a piece."""
    return (0, plan.tokens(piece)), (0, piece.heads.bit_count())


class _Arrival(NamedTuple):
    """A piece that is received beside its slab, and where it goes in it."""

    staging: BufferView
    targets: tuple[tuple[Cut, Cut], ...]
    task: int


@dataclass(slots=True)
class _Round:
    """Posts that were not issued yet, by communicator.

    Attributes:
        posts: In the plan's order.
        arriving: Slabs that they bring, or bring a part of.
        free: Buffers to let go once they are issued.
    """

    posts: dict[Lane, list[BufferPost]] = field(default_factory=dict)
    arriving: set[int] = field(default_factory=set)
    free: list[Buffer] = field(default_factory=list)


class RankSlabs:
    """See the module.

    Args:
        program: The resolved plan.
        writer: Where operations go.
        lanes: The communicator of each source.
        gpus_per_node: Ranks that share NVLink.
    """

    def __init__(
        self, program: Program, writer: RankWriter, lanes: Lanes, gpus_per_node: int
    ) -> None:
        self.program = program
        self.plan = program.plan
        self.writer = writer
        self.lanes = lanes
        self.gpus_per_node = gpus_per_node
        dtype = self.plan.problem.dtype
        self.dtype = dtype
        self.acc = Dtype.FLOAT64 if dtype is Dtype.FLOAT64 else Dtype.FLOAT32
        self.views: dict[int, BufferView] = {}
        self._landings: dict[int, list[_Arrival]] = {}
        self._round = _Round()

    # Buffers --------------------------------------------------------------------------------

    def shape(self, piece: Piece) -> tuple[int, ...]:
        """Shape of a tensor that holds just a piece."""
        batch, heads = batch_of(self.plan, piece.tensor), piece.heads.bit_count()
        rows = (batch, heads, self.plan.tokens(piece))
        return rows if is_per_row(piece.tensor) else (*rows, width(self.plan, piece.tensor))

    def dtype_of(self, tensor: Tensor) -> Dtype:
        """Precision in which a tensor is kept."""
        return self.acc if is_accumulated(tensor) else self.dtype

    def new(
        self, shape: tuple[int, ...], dtype: Dtype, memory: Memory = Memory.DEVICE
    ) -> BufferView:
        """Make a buffer for a tensor."""
        size = dtype.bytes
        for length in shape:
            size *= length
        return whole_view(Buffer(memory, size), shape, dtype)

    def begin(self, slab: int) -> BufferView:
        """Make the buffer of a slab."""
        _, place, piece = self.program.slabs[slab]
        narrow = slab in self.program.narrow
        dtype = self.dtype if narrow else self.dtype_of(piece.tensor)
        made = self.new(self.shape(piece), dtype, place.memory)
        self.views[slab] = made
        return made

    def become(self, slab: int, view: BufferView) -> None:
        """Let a slab hold a buffer that another one holds as well."""
        view.buffer.users += 1
        self.views[slab] = view

    def slab(self, slab: int) -> BufferView:
        """A slab's tensor, once it is all there."""
        if slab in self._round.arriving:
            self.flush()
            self.writer.step += 1  # it passes on what it has not computed with
        for staging, targets, task in self._landings.pop(slab, ()):
            whole = self.views[slab]
            for cut, own in targets:
                self.copy(staging.cut(own), whole.cut(cut), task)
            self.writer.free(staging.buffer)
        return self.views[slab]

    def free(self, slab: int) -> None:
        """Let go of a slab after its last use."""
        view = self.views.pop(slab, None)
        if view is None:
            return
        buffers = [view.buffer, *(each.staging.buffer for each in self._landings.pop(slab, ()))]
        for buffer in buffers:
            self.release(buffer)

    def release(self, buffer: Buffer) -> None:
        """Let go of a buffer, once the round is issued that may use it."""
        if self._round.posts:
            self._round.free.append(buffer)
        else:
            self.writer.free(buffer)

    # Reading --------------------------------------------------------------------------------

    def parts(self, access: Access, where: Cut) -> Iterator[tuple[int, Cut | None, Cut]]:
        """See `parts_of`."""
        yield from parts_of(self.plan, self.program.slabs, access, where)

    def read(self, access: Access, task: int | None) -> tuple[BufferView, Buffer | None]:
        """A piece as one tensor: part of a slab, or a copy that joins several.

        Returns:
            The view, and the buffer to release after its use, if there is one.
        """
        whole = everything(self.plan, access.piece)
        if len(access.segments) == 1:
            found = list(self.parts(access, whole))
            if found:
                slab, cut, _ = found[0]
                return self.slab(slab).cut(cut), None
        joined = self.new(
            self.shape(access.piece),
            self.dtype_of(access.piece.tensor),
            access.place.memory,
        )
        self.gather(access, whole, joined, task)
        return joined, joined.buffer

    def gather(self, access: Access, where: Cut, target: BufferView, task: int | None) -> None:
        """Copy some rows and heads of a piece into a tensor of just those."""
        for slab, cut, inner in self.parts(access, where):
            self.copy(self.slab(slab).cut(cut), target.cut(inner), task)

    def copy(self, source: BufferView, target: BufferView, task: int | None) -> None:
        """Copy, on the lane between the two memories."""
        to_host = target.buffer.memory is Memory.HOST
        if source.buffer.memory is target.buffer.memory:
            lane = Lane.COMPUTE
        else:
            lane = Lane.TO_HOST if to_host else Lane.TO_DEVICE
        self.writer.launch(lane, Kernel.COPY, (source,), (target,), task)

    # Moving ---------------------------------------------------------------------------------

    def send(self, leg: Leg, access: Access, task: int) -> None:
        """Post one piece to another rank."""
        piece = access.piece
        rounded = is_rounded(self.plan, piece.tensor)
        whole = everything(self.plan, piece)
        found = list(self.parts(access, whole))
        if not found:
            return
        if len(found) == 1 and not rounded:
            slab, cut, _ = found[0]
            view = self.slab(slab).cut(cut)
            if view.placed.is_dense:
                self._post(PostEnd.SEND, leg.src.rank, leg.dst.rank, view)
                return
        dtype = self.dtype if rounded else self.dtype_of(piece.tensor)
        packed = self.new(self.shape(piece), dtype)
        self.gather(access, whole, packed, task)
        self._post(PostEnd.SEND, leg.src.rank, leg.dst.rank, packed)
        self.release(packed.buffer)

    def receive(self, leg: Leg, access: Access, create: Access, task: int) -> None:
        """Post the arrival of one piece from another rank."""
        slab, piece = create.segments[0].slab, access.piece
        whole = self._arriving(slab)
        targets = tuple(landing(self.plan, self.program.slabs[slab].piece, piece))
        rounded = is_rounded(self.plan, piece.tensor)
        if len(targets) == 1 and not rounded:
            view = whole.cut(targets[0][0])
            if view.placed.is_dense:
                self._post(PostEnd.RECEIVE, leg.src.rank, leg.dst.rank, view, slab)
                return
        staging = self.new(
            self.shape(piece), self.dtype if rounded else self.dtype_of(piece.tensor)
        )
        self._post(PostEnd.RECEIVE, leg.src.rank, leg.dst.rank, staging, slab)
        self._landings.setdefault(slab, []).append(_Arrival(staging, targets, task))

    def move(self, access: Access, create: Access, task: int) -> None:
        """Copy one piece within the rank, between its memories or within one."""
        slab = create.segments[0].slab
        whole = self._arriving(slab)
        for cut, own in landing(self.plan, self.program.slabs[slab].piece, access.piece):
            self.gather(access, own, whole.cut(cut), task)

    def _arriving(self, slab: int) -> BufferView:
        found = self.views.get(slab)
        return self.begin(slab) if found is None else found

    def _post(
        self, way: PostEnd, src: int, dst: int, view: BufferView, slab: int | None = None
    ) -> None:
        if not view.placed.elements:
            return
        near = node_of(src, self.gpus_per_node) == node_of(dst, self.gpus_per_node)
        lane = self.lanes[src, near]
        peer = dst if way is PostEnd.SEND else src
        self._round.posts.setdefault(lane, []).append(BufferPost(way, peer, view))
        if slab is not None:
            self._round.arriving.add(slab)

    def flush(self) -> None:
        """Issue the round."""
        round_, self._round = self._round, _Round()
        for lane in Lane:
            posts: Sequence[BufferPost] = round_.posts.get(lane, ())
            for first in range(0, len(posts), MOST_POSTS):
                assert lane in COMMUNICATORS
                self.writer.group(lane, list(posts[first : first + MOST_POSTS]))
        for buffer in round_.free:
            self.writer.free(buffer)
