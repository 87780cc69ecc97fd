"""Proof that no timing changes what bytes hold: races and lifetimes are one rule.

Any two operations that touch the same bytes, one of them writing, are ordered: by their lane, or by
records and waits between lanes. A group touches bytes from its start to its end. Bytes that one
buffer had before another are no special case: they are the same bytes.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product

from harness.errors import DeviceProgramError
from harness.plan.tasks import Memory
from harness.program.operations import (
    ByteView,
    Group,
    KernelLaunch,
    Lane,
    Operation,
    PostEnd,
    RankProgram,
    Record,
    Wait,
)


def touched_views(operation: Operation) -> list[tuple[ByteView, bool]]:
    """The views that an operation touches, and whether it writes each."""
    match operation:
        case KernelLaunch(reads=reads, writes=writes):
            return [(view, False) for view in reads] + [(view, True) for view in writes]
        case Group(posts=posts):
            return [(post.view, post.end is PostEnd.RECEIVE) for post in posts]
        case _:
            return []


def byte_runs(view: ByteView) -> Iterator[tuple[int, int]]:
    """Yield the runs of bytes side by side that make up a view: first, and last + 1."""
    if 0 in view.shape:
        return
    length, axes = 1, len(view.shape)
    while axes and (view.shape[axes - 1] == 1 or view.strides[axes - 1] == length):
        length *= view.shape[axes - 1]
        axes -= 1
    size = view.dtype.bytes
    outer = [
        range(0, n * s, s) if s else (0,) * n for n, s in zip(view.shape, view.strides, strict=True)
    ]
    for starts in product(*outer[:axes]):
        first = view.offset + sum(starts) * size
        yield first, first + length * size


def predecessors(program: RankProgram) -> list[int]:
    """Per operation, a bit set of those of the rank that are over before it begins.

    Raises:
        DeviceProgramError: It waits for an event that is not recorded before, or twice.
    """
    over: dict[Lane, int] = dict.fromkeys(Lane, 0)
    events: dict[int, int] = {}
    before = []
    for number, operation in enumerate(program.operations):
        lane = operation.lane
        before.append(over[lane])
        match operation:
            case Record(event=event):
                if event in events:
                    raise DeviceProgramError(
                        "an event is recorded once",
                        rank=program.rank,
                        operation=number,
                        detail=f"event {event} is recorded again",
                    )
                events[event] = over[lane]
            case Wait(event=event):
                if event not in events:
                    raise DeviceProgramError(
                        "a lane waits for events that the host recorded before",
                        rank=program.rank,
                        operation=number,
                        detail=f"event {event} is not recorded yet, so that nothing waits",
                    )
                over[lane] |= events[event]
            case _:
                pass
        over[lane] |= 1 << number
    return before


def check_bytes(program: RankProgram) -> None:
    """Prove that overlapping bytes with a write are ordered.

    Raises:
        DeviceProgramError: Two operations race, one overlaps itself, or a view leaves its arena.
    """
    before = predecessors(program)
    for number, operation in enumerate(program.operations):
        _own_overlap(program, number, operation)
    for memory in Memory:
        _check_memory(program, memory, before)


def _check_memory(program: RankProgram, memory: Memory, before: list[int]) -> None:
    size = program.arena_bytes.get(memory, 0)
    touched = [
        (number, view, writes)
        for number, operation in enumerate(program.operations)
        for view, writes in touched_views(operation)
        if view.memory is memory
    ]
    given = [view for _, view in (*program.inputs, *program.outputs) if view.memory is memory]
    if max((view.end for view in (*given, *(view for _, view, _ in touched))), default=0) > size:
        raise DeviceProgramError(
            "views lie in their arena",
            rank=program.rank,
            detail=f"one ends beyond the {size} bytes of {memory.value}",
        )
    shared = [
        (number, list(byte_runs(view)), writes)
        for number, view, writes in _of_several_lanes(program, touched)
    ]
    edges = sorted({end for _, runs, _ in shared for run in runs for end in run})
    users: list[list[tuple[int, bool]]] = [[] for _ in edges]
    for number, runs, writes in shared:
        for at in _cells(edges, runs):
            users[at] = _joined(program, users[at], number, writes, before)


def _of_several_lanes(
    program: RankProgram, touched: Sequence[tuple[int, ByteView, bool]]
) -> Iterator[tuple[int, ByteView, bool]]:
    """Leave out what the compute lane alone touches: it is in order."""
    spans = sorted(
        (view.offset, view.end)
        for number, view, _ in touched
        if program.operations[number].lane is not Lane.COMPUTE
    )
    ends = list(accumulate((end for _, end in spans), max))
    firsts = [first for first, _ in spans]
    for number, view, writes in touched:
        before = bisect_left(firsts, view.end)  # spans that begin before it ends
        if before and ends[before - 1] > view.offset:
            yield number, view, writes


def _cells(edges: list[int], runs: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Numbers of the stretches between edges that make up runs."""
    for first, end in runs:
        yield from range(bisect_left(edges, first), bisect_left(edges, end))


def _joined(
    program: RankProgram,
    users: list[tuple[int, bool]],
    number: int,
    writes: bool,
    before: list[int],
) -> list[tuple[int, bool]]:
    """Add a user of a stretch; who is over before a write need not be looked at again."""
    for other, wrote in users:
        if (writes or wrote) and other != number and not before[number] >> other & 1:
            raise DeviceProgramError(
                "what touches the same bytes, one writing, is ordered",
                rank=program.rank,
                operation=number,
                detail=f"operation {other} on {program.operations[other].lane.value} may be under "
                f"way while {program.operations[number].lane.value} does this one",
            )
    if writes:
        return [(number, True), *(user for user in users if user[0] == number)]
    return [*users, (number, False)]


def _own_overlap(program: RankProgram, number: int, operation: Operation) -> None:
    """An operation writes in place, or beside what it reads; and each byte once."""
    views = touched_views(operation)
    spans = sorted((view.memory.value, view.offset, view.end) for view, _ in views)
    if all(one[0] != two[0] or one[2] <= two[1] for one, two in pairwise(spans)):
        return
    launch = isinstance(operation, KernelLaunch)
    for at, (view, writes) in enumerate(views):
        for other, also in views[at + 1 :]:
            in_place = launch and view == other and not (writes and also)
            if (writes or also) and not in_place and _overlap(view, other):
                raise DeviceProgramError(
                    "an operation writes each byte once, in place or beside what it reads",
                    rank=program.rank,
                    operation=number,
                    detail=f"{view} and {other} overlap",
                )


def _overlap(view: ByteView, other: ByteView) -> bool:
    if view.memory is not other.memory or view.end <= other.offset or other.end <= view.offset:
        return False
    runs = sorted(byte_runs(other))
    return any(
        first < end and low < high
        for low, high in byte_runs(view)
        for first, end in ((max(low, a), min(high, b)) for a, b in runs)
    )
