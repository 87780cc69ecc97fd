"""Writes one rank's program: places buffers, and orders lanes by records and waits.

A lane waits for another only where it touches bytes that the other touched, one of both writing,
and does not know yet that the other is past that: each lane carries a clock of all lanes (a vector
clock), which a wait brings up to date.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from harness.plan.problem import Dtype
from harness.plan.slices import Cut
from harness.plan.tasks import Memory
from harness.program.arena import Arena
from harness.program.operations import (
    ByteRange,
    ByteView,
    Group,
    Kernel,
    KernelLaunch,
    Lane,
    Operation,
    Post,
    PostEnd,
    RankProgram,
    Record,
    Wait,
)

_Access = tuple[Lane, bool, int, int]
"""Who touched which bytes of a buffer: lane, whether it wrote, first byte, last byte + 1."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Bytes that live together.

    Attributes:
        memory: Where.
        size: Bytes.
        users: How many hold it; it is freed when nobody does.
        offset: Its place in the arena; None before its first use.
        born: Number of the first operation that may touch it.
        accesses: Latest position of each kind of access in its lane.
    """

    memory: Memory
    size: int
    users: int = 1
    offset: int | None = None
    born: int = 0
    accesses: dict[_Access, int] = field(default_factory=dict)


class BufferView(NamedTuple):
    """A tensor in a buffer; `ByteView` once the buffer has its place."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype

    def cut(self, where: Cut | None) -> "BufferView":
        """Return some rows and heads of it; None = all."""
        if where is None:
            return self
        rows, heads = where
        batch, _, _, *wide = self.shape
        shape = (batch, heads[1] - heads[0], rows[1] - rows[0], *wide)
        if shape == self.shape:
            return self
        shift = heads[0] * self.strides[1] + rows[0] * self.strides[2]
        offset = self.offset + shift * self.dtype.bytes
        return BufferView(self.buffer, offset, shape, self.strides, self.dtype)

    @property
    def placed(self) -> ByteView:
        """The bytes of the arena; the buffer must have its place."""
        first = self.buffer.offset or 0
        return ByteView(
            self.buffer.memory, first + self.offset, self.shape, self.strides, self.dtype
        )


def whole_view(buffer: Buffer, shape: tuple[int, ...], dtype: Dtype) -> BufferView:
    """View a buffer as one dense tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return BufferView(buffer, 0, shape, tuple(reversed(strides)), dtype)


class BufferPost(NamedTuple):
    """A `Post` before its buffer has its place."""

    end: PostEnd
    peer: int
    view: BufferView


_Clock = dict[Lane, int]


class RankWriter:
    """One rank's program while it is written.

    Attributes:
        rank: Which.
        step: How often it moved something after it had computed or passed on something, so far.
    """

    def __init__(self, rank: int, ahead: int) -> None:
        self.rank = rank
        self._ahead = ahead
        self._arenas = {memory: Arena() for memory in Memory}
        self._written: list[
            KernelLaunch | Group | tuple[Lane, int]
        ] = []  # a pair: wait for a number
        self._ranges: list[ByteRange] = []
        self._clocks: dict[Lane, _Clock] = {lane: {} for lane in Lane}
        self._past: dict[Lane, list[tuple[int, _Clock]]] = {lane: [] for lane in Lane}
        self._live: list[Buffer] = []
        self.step = 0

    def place(self, buffer: Buffer) -> None:
        """Give a buffer that is there from the start its place."""
        self._place(buffer, Lane.COMPUTE)

    def launch(
        self,
        lane: Lane,
        kernel: Kernel,
        reads: tuple[BufferView, ...],
        writes: tuple[BufferView, ...],
        task: int | None,
        call: tuple[int, int] | None = None,
    ) -> None:
        """Add a launch; one that would write nothing is left out."""
        if not any(view.placed.elements for view in writes):
            return
        touched = [(view, False) for view in reads] + [(view, True) for view in writes]
        self._order(lane, touched)
        self._add(
            KernelLaunch(
                lane,
                kernel,
                tuple(view.placed for view in reads),
                tuple(view.placed for view in writes),
                task,
                call,
            )
        )

    def group(self, lane: Lane, posts: list[BufferPost]) -> None:
        """Add a group."""
        self._order(lane, [(post.view, post.end is PostEnd.RECEIVE) for post in posts])
        placed = tuple(Post(post.end, post.peer, post.view.placed) for post in posts)
        self._add(Group(lane, placed))

    def free(self, buffer: Buffer) -> None:
        """Let go of a buffer; nobody touches it from here on if nobody else holds it."""
        buffer.users -= 1
        if buffer.users or buffer.offset is None:
            return
        users: dict[Lane, int] = {}
        for (lane, *_), position in buffer.accesses.items():
            users[lane] = max(users.get(lane, 0), position)
        self._arenas[buffer.memory].give(buffer.offset, buffer.size, users, self.step)
        self._live.remove(buffer)
        self._close(buffer, max(buffer.born, len(self._written) - 1))

    def finish(
        self, inputs: list[tuple[int, BufferView]], outputs: list[tuple[int, BufferView]]
    ) -> RankProgram:
        """Close the program: records go where somebody waits for them."""
        for buffer in self._live:
            self._close(buffer, max(buffer.born, len(self._written) - 1))
        waited = {
            entry[1] for entry in self._written if not isinstance(entry, KernelLaunch | Group)
        }
        operations: list[Operation] = []
        number: list[int] = []
        events: dict[int, int] = {}
        for index, entry in enumerate(self._written):
            number.append(len(operations))
            if not isinstance(entry, KernelLaunch | Group):
                operations.append(Wait(entry[0], events[entry[1]]))
                continue
            operations.append(entry)
            if index in waited:
                events[index] = len(events)
                operations.append(Record(entry.lane, events[index]))
        return RankProgram(
            self.rank,
            tuple(operations),
            {memory: arena.size for memory, arena in self._arenas.items() if arena.size},
            tuple(
                each._replace(born=number[each.born], dies=number[each.dies])
                for each in (self._ranges if number else ())
            ),
            tuple((at, view.placed) for at, view in inputs),
            tuple((at, view.placed) for at, view in outputs),
        )

    # Order ----------------------------------------------------------------------------------

    def _order(self, lane: Lane, touched: list[tuple[BufferView, bool]]) -> None:
        """Let a lane wait for what it needs before it touches views, and note that it does."""
        for view, _ in touched:
            if view.buffer.offset is None:
                self._place(view.buffer, lane)
        needed: dict[Lane, int] = {}
        position = len(self._past[lane]) + 1
        found = [(view, writes, *_span(view)) for view, writes in touched]
        for view, writes, first, end in found:
            for (other, wrote, low, high), at in view.buffer.accesses.items():
                conflict = other is not lane and (writes or wrote) and low < end and first < high
                if conflict and at > needed.get(other, 0):
                    needed[other] = at
        self._wait(lane, needed)
        for view, writes, first, end in found:
            _touch(view.buffer, (lane, writes, first, end), position, dense=view.placed.is_dense)
        clock = self._clocks[lane]
        clock[lane] = position
        self._past[lane].append((len(self._written), dict(clock)))

    def _wait(self, lane: Lane, needed: dict[Lane, int]) -> None:
        clock = self._clocks[lane]
        unknown = {other: at for other, at in needed.items() if clock.get(other, 0) < at}
        then = {other: self._past[other][at - 1] for other, at in unknown.items()}
        for other, at in unknown.items():
            if any(then[o][1].get(other, 0) >= at for o in unknown if o is not other):
                continue  # whom it waits for has waited for that
            index, past = then[other]
            self._written.append((lane, index))
            for each, known in past.items():
                clock[each] = max(clock.get(each, 0), known)

    def _add(self, operation: KernelLaunch | Group) -> None:
        self._written.append(operation)

    def _place(self, buffer: Buffer, lane: Lane) -> None:
        arena = self._arenas[buffer.memory]
        # Messages of the step before are seldom over; computation of the step before mostly is.
        step = self.step - self._ahead - (lane is Lane.COMPUTE)
        buffer.offset, users = arena.take(buffer.size, self._clocks[lane], step)
        buffer.born = len(self._written)
        for user, position in users.items():
            buffer.accesses[user, True, 0, buffer.size] = position
        self._live.append(buffer)

    def _close(self, buffer: Buffer, dies: int) -> None:
        assert buffer.offset is not None  # it is live
        self._ranges.append(ByteRange(buffer.memory, buffer.offset, buffer.size, buffer.born, dies))


def _span(view: BufferView) -> tuple[int, int]:
    """First byte of a view in its buffer, and the byte after its last."""
    if 0 in view.shape:
        return view.offset, view.offset
    last = sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    return view.offset, view.offset + (last + 1) * view.dtype.bytes


def _touch(buffer: Buffer, access: _Access, position: int, *, dense: bool) -> None:
    """Note an access; what a write covers entirely came before it, and is known with it."""
    _, writes, first, end = access
    if writes and dense:
        for past in [p for p in buffer.accesses if first <= p[2] and p[3] <= end]:
            del buffer.accesses[past]
    buffer.accesses[access] = position
