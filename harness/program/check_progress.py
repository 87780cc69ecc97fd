"""Proof that every timing comes to an end: nothing waits for itself.

Each operation is told to its lane by the host, starts and ends. A lane is a queue; a wait ends
after what it waits for; the two groups of a message end after both have started. None of these
rules chooses between two ways, so the order of all these moments is one partial order, and a
program comes to an end in every timing if it does so in one: if no moment is before itself. What is
assumed of the device: ranks are connected before, and lanes wait for one another by these rules
only, so that each has the resources to go on (a kernel of attention leaves room for those of the
communicators).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from harness.errors import DeviceProgramError
from harness.program.operations import Group, Lane, Post, PostEnd, RankProgram, Record, Wait


class Moment(IntEnum):
    """A moment in the life of an operation."""

    TOLD = 0  # by the host to its lane
    STARTED = 1
    ENDED = 2


class PostAt(NamedTuple):
    """One end of a message: rank, number of the operation, number of the post in it."""

    rank: int
    operation: int
    post: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Which post meets which.

    Attributes:
        mates: Of both ends.
        connections: (source, destination, communicator) of all messages, in the order in which
            ranks are to connect before the program runs: to connect holds the hosts of both, and
            in the midst of the program some would wait for one another.
    """

    mates: dict[PostAt, PostAt]
    connections: tuple[tuple[int, int, Lane], ...]


def posts_of(program: RankProgram) -> Iterator[tuple[PostAt, Lane, Post]]:
    """List a rank's posts in order."""
    for number, operation in enumerate(program.operations):
        if isinstance(operation, Group):
            for at, post in enumerate(operation.posts):
                yield PostAt(program.rank, number, at), operation.lane, post


def matched(ranks: Sequence[RankProgram]) -> Messages:
    """Match posts as communicators do: of each pair of ranks in each direction, in their order.

    Raises:
        DeviceProgramError: A post meets none, or one of another size.
    """
    queues: dict[tuple[int, int, Lane], dict[PostEnd, list[tuple[PostAt, Post]]]] = defaultdict(
        lambda: {way: [] for way in PostEnd}
    )
    for program in ranks:
        for at, lane, post in posts_of(program):
            pair = (
                (post.peer, program.rank)
                if post.end is PostEnd.RECEIVE
                else (program.rank, post.peer)
            )
            queues[*pair, lane][post.end].append((at, post))
    mates: dict[PostAt, PostAt] = {}
    for (src, dst, lane), ends in queues.items():
        sends, receives = ends[PostEnd.SEND], ends[PostEnd.RECEIVE]
        if len(sends) != len(receives):
            raise DeviceProgramError(
                "each message has two ends",
                rank=None,
                detail=f"rank {src} sends {len(sends)} to {dst} on {lane.value}, "
                f"which receives {len(receives)}",
            )
        for sent, received in zip(sends, receives, strict=True):
            _same_size(sent, received)
            mates[sent[0]], mates[received[0]] = received[0], sent[0]
    return Messages(mates, tuple(sorted(queues)))


def _same_size(sent: tuple[PostAt, Post], received: tuple[PostAt, Post]) -> None:
    (at, post), (mate, other) = sent, received
    if post.view.size_bytes != other.view.size_bytes:
        raise DeviceProgramError(
            "both ends of a message have one size",
            rank=at.rank,
            operation=at.operation,
            detail=f"{post.view.size_bytes} bytes go to rank {mate.rank}, whose operation "
            f"{mate.operation} receives {other.view.size_bytes}",
        )


def check_progress(
    ranks: Sequence[RankProgram], messages: Messages
) -> list[tuple[int, int, Moment]]:
    """Prove that no moment is before itself.

    Args:
        ranks: Programs of all ranks.
        messages: Their posts, matched.

    Returns:
        All moments (rank, operation, moment), each after those that it waits for.

    Raises:
        DeviceProgramError: Some wait for one another.
    """
    bases, count = [], 0
    for program in ranks:
        bases.append(count)
        count += len(Moment) * len(program.operations)
    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count

    def edge(one: int, other: int) -> None:
        after[one].append(other)
        waits[other] += 1

    for base, program in zip(bases, ranks, strict=True):
        _own_edges(program, base, edge)
    for at, mate in messages.mates.items():
        edge(
            bases[at.rank] + len(Moment) * at.operation + Moment.STARTED,
            bases[mate.rank] + len(Moment) * mate.operation + Moment.ENDED,
        )
    return _sorted(ranks, after, waits)


def _own_edges(program: RankProgram, base: int, edge: Callable[[int, int], None]) -> None:
    last: dict[Lane, int] = {}
    events: dict[int, int] = {}
    for number, operation in enumerate(program.operations):
        told, started, ended = (base + len(Moment) * number + moment for moment in Moment)
        if number:
            edge(told - len(Moment), told)
        edge(told, started)
        edge(started, ended)
        if operation.lane in last:
            edge(last[operation.lane], started)
        last[operation.lane] = ended
        match operation:
            case Record(event=event):
                events[event] = ended
            case Wait(event=event) if event in events:
                edge(events[event], ended)
            case _:
                pass


def _sorted(
    ranks: Sequence[RankProgram], after: list[list[int]], waits: list[int]
) -> list[tuple[int, int, Moment]]:
    ready = deque(node for node, count in enumerate(waits) if not count)
    order: list[int] = []
    while ready:
        node = ready.popleft()
        order.append(node)
        for later in after[node]:
            waits[later] -= 1
            if not waits[later]:
                ready.append(later)
    named = [
        (at, number, moment)
        for at, program in enumerate(ranks)
        for number in range(len(program.operations))
        for moment in Moment
    ]
    if len(order) < len(waits):
        stuck = next(node for node, count in enumerate(waits) if count)
        at, number, moment = named[stuck]
        raise DeviceProgramError(
            "nothing waits for itself",
            rank=ranks[at].rank,
            operation=number,
            detail=f"{moment.name.lower()} is before itself, or after what is",
        )
    return [named[node] for node in order]
