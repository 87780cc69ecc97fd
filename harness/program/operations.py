"""The device program: per rank a tuple of operations on lanes, as a frozen, hashable value.

A lane is a queue of the device that works in order (a CUDA stream); lanes know nothing of one
another but what a record and a wait say. All memory is bytes of one arena for each of a rank's
memories. The host issues the operations in their order here and never waits. A program holds no
tensors: what a launch computes is said by a kernel, views of bytes, and a task of the plan.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeAlias

from harness.plan.problem import Dtype
from harness.plan.tasks import Memory

MOST_POSTS = 256
"""Sends and receives of one group: NCCL may cut a larger one at other places on each rank, which
then wait for one another (pytorch#174288; #174942 proposes this bound)."""

MOST_LANES = 8
"""Queues that a GPU serves without mixing them: CUDA_DEVICE_MAX_CONNECTIONS is 8 unless it is set
(CUDA C++ programming guide, environment variables)."""


class Lane(StrEnum):
    """A queue of one rank's device; each of the last four has a communicator of its own.

    A message goes over the communicator of its source's side; see `sides`.
    """

    __hash__ = str.__hash__  # an enum's own hash is a python function, and these are hashed a lot

    COMPUTE = "compute"
    TO_HOST = "to-host"
    TO_DEVICE = "to-device"
    NVLINK_EVEN = "nvlink-even"
    NVLINK_ODD = "nvlink-odd"
    NIC_EVEN = "nic-even"
    NIC_ODD = "nic-odd"


COPY_LANES = frozenset({Lane.TO_HOST, Lane.TO_DEVICE})
"""Lanes of copies between a rank's memories."""

COMMUNICATORS = frozenset({Lane.NVLINK_EVEN, Lane.NVLINK_ODD, Lane.NIC_EVEN, Lane.NIC_ODD})
"""Lanes of messages between ranks."""


class Kernel(StrEnum):
    """What a launch computes. Reads and writes, in order, are in brackets.

    `*_ADD` add to what they write, MERGE and ADD to the first they read, which they write.
    """

    __hash__ = str.__hash__  # as for lanes

    COPY = "copy"  # (from) (to), converted to the precision of the target
    ZERO = "zero"  # () (to)
    NO_KEYS = "no-keys"  # () (to): the log-sum-exp of no keys, -inf
    ATTEND = "attend"  # (q, k, v) (out, lse)
    ATTEND_BACKWARD = "attend-backward"  # (dout, q, k, v, out, lse) (dq, dk, dv)
    ATTEND_BACKWARD_DELTA = "attend-backward-delta"  # (dout, q, k, v, delta, lse) (dq, dk, dv)
    MERGE = "merge"  # (out so far, lse so far, out, lse) (out so far, lse so far)
    ADD = "add"  # (sum so far, addend) (sum so far)
    DELTA = "delta"  # (out, dout) (delta)
    PROJECT = "project"  # (x, weight) (q, k, v or dout)
    TO_MODEL = "to-model"  # (values, weight) (rows)
    TO_MODEL_ADD = "to-model-add"  # (values, weight, rows) (rows)
    WEIGHT_GRADIENT = "weight-gradient"  # (values, rows) (gradient)
    WEIGHT_GRADIENT_ADD = "weight-gradient-add"  # (values, rows, gradient) (gradient)


class ByteView(NamedTuple):
    """A tensor in an arena.

    Attributes:
        memory: Which arena.
        offset: Its first byte.
        shape: As that of a slab: (batch, heads, tokens, width), or without the last axis.
        strides: In elements.
        dtype: Of its elements.
    """

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Dtype

    @property
    def elements(self) -> int:
        """How many elements it has."""
        found = 1
        for length in self.shape:
            found *= length
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return self.elements * self.dtype.bytes

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie side by side, in order."""
        step = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != step:
                return False
            step *= length
        return True

    @property
    def end(self) -> int:
        """The byte after its last; its offset if it is empty."""
        last = 0
        for length, stride in zip(self.shape, self.strides, strict=True):
            if not length:
                return self.offset
            last += (length - 1) * stride
        return self.offset + (last + 1) * self.dtype.bytes

    def __str__(self) -> str:
        """Print as `device[256:512]`."""
        return f"{self.memory.value}[{self.offset}:{self.end}]"


class KernelLaunch(NamedTuple):
    """A kernel on a lane.

    Attributes:
        lane: COMPUTE, or a lane of copies.
        kernel: What it computes.
        reads: Its inputs.
        writes: Its outputs.
        task: The plan's task that it is part of; None for results put together at the end.
        call: Of attention, which of the tile's kernel calls, and of its runs of heads.
    """

    lane: Lane
    kernel: Kernel
    reads: tuple[ByteView, ...]
    writes: tuple[ByteView, ...]
    task: int | None
    call: tuple[int, int] | None = None


class PostEnd(StrEnum):
    """What a rank does with a message."""

    __hash__ = str.__hash__  # as for lanes

    SEND = "send"
    RECEIVE = "receive"


class Post(NamedTuple):
    """One end of a message; messages of a pair on a communicator match by their order."""

    end: PostEnd
    peer: int
    view: ByteView


class Group(NamedTuple):
    """Posts that a communicator works on together: a round. It ends when all of them have."""

    lane: Lane
    posts: tuple[Post, ...]


class Record(NamedTuple):
    """Note the end of what its lane was told so far."""

    lane: Lane
    event: int


class Wait(NamedTuple):
    """Hold its lane until an event that was recorded before has come."""

    lane: Lane
    event: int


Operation: TypeAlias = KernelLaunch | Group | Record | Wait


class ByteRange(NamedTuple):
    """What one buffer occupies, from the first operation that may touch it to the last."""

    memory: Memory
    offset: int
    size_bytes: int
    born: int
    dies: int


@dataclass(frozen=True, slots=True)
class RankProgram:
    """What one rank is told.

    Attributes:
        rank: Which.
        operations: In the order in which the host issues them.
        arena_bytes: Size of each memory's arena.
        ranges: Its buffers.
        inputs: Numbers of the plan's initial residents, and where they are at the start.
        outputs: The same of the plan's outputs, saved pieces after them, at the end.
    """

    rank: int
    operations: tuple[Operation, ...]
    arena_bytes: Mapping[Memory, int]
    ranges: tuple[ByteRange, ...]
    inputs: tuple[tuple[int, ByteView], ...]
    outputs: tuple[tuple[int, ByteView], ...]


@dataclass(frozen=True)
class DeviceProgram:
    """The programs of all ranks of a plan.

    Attributes:
        plan: Hash of the plan.
        gpus_per_node: Ranks that share NVLink.
        ranks: In order.
    """

    plan: str
    gpus_per_node: int
    ranks: tuple[RankProgram, ...]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the JSON form, 16 hex digits; equal programs have equal hashes."""
        from harness.program.program_json import program_json

        return hashlib.sha256(program_json(self).encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        """Hash by content."""
        return int(self.hash, 16)

    def __str__(self) -> str:
        """List the operations of each rank, a line each."""
        return "\n".join(line for rank in self.ranks for line in _lines(rank))


def _lines(program: RankProgram) -> Iterator[str]:
    sizes = ", ".join(f"{size} B of {memory}" for memory, size in program.arena_bytes.items())
    yield f"rank {program.rank}: {sizes}"
    for operation in program.operations:
        yield f"  {operation.lane.value:11} {_said(operation)}"


def _said(operation: Operation) -> str:
    match operation:
        case KernelLaunch(kernel=kernel, reads=reads, writes=writes, task=task):
            of = "" if task is None else f" of task {task}"
            targets = ", ".join(map(str, writes))
            return f"{kernel.value}{of}: {', '.join(map(str, reads))} -> {targets}"
        case Group(posts=posts):
            return ", ".join(
                f"{post.end.value} {post.view} {'to' if post.end is PostEnd.SEND else 'from'} "
                f"{post.peer}"
                for post in posts
            )
        case Record(event=event):
            return f"record {event}"
        case Wait(event=event):
            return f"wait {event}"
