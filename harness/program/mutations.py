"""Ways to break a device program, each as a program: does its proof tell, and do runs agree?

A mutation draws where it strikes. What it makes need not be wrong: a later wait may cover one that
is dropped. Then the proof holds, and every run must give the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

from harness.program.operations import (
    MOST_POSTS,
    ByteRange,
    ByteView,
    DeviceProgram,
    Group,
    KernelLaunch,
    Operation,
    Post,
    RankProgram,
    Wait,
)

Mutation = Callable[[DeviceProgram, Random], DeviceProgram | None]
"""None where the program has nothing to strike at."""


def without_wait(program: DeviceProgram, draw: Random) -> DeviceProgram | None:
    """One lane no longer waits."""
    at = _drawn(program, draw, lambda each: isinstance(each, Wait))
    return at and _with(program, *at, ())


def groups_swapped(program: DeviceProgram, draw: Random) -> DeviceProgram | None:
    """Two groups of one communicator on one rank, the second following the first, trade places."""
    pairs = []
    for at, rank in enumerate(program.ranks):
        last: dict[str, int] = {}
        for number, operation in enumerate(rank.operations):
            if isinstance(operation, Group):
                if operation.lane in last:
                    pairs.append((at, last[operation.lane], number))
                last[operation.lane] = number
    if not pairs:
        return None
    at, first, second = draw.choice(pairs)
    operations = list(program.ranks[at].operations)
    operations[first], operations[second] = operations[second], operations[first]
    return _exchanged(program, at, replace(program.ranks[at], operations=tuple(operations)))


def ranges_aliased(program: DeviceProgram, draw: Random) -> DeviceProgram | None:
    """A buffer lies where another one lies that lives at the same time."""
    found = list(_together(program))
    if not found:
        return None
    at, index, other = draw.choice(found)
    return _moved(program, at, index, program.ranks[at].ranges[other].offset)


def lifetime_shortened(program: DeviceProgram, draw: Random) -> DeviceProgram | None:
    """A buffer's bytes go to another one shortly before its end."""
    found = [
        (ranges[other].dies - ranges[index].born, at, index, other)
        for at, index, other in _together(program)
        for ranges in (program.ranks[at].ranges,)
        if ranges[other].born < ranges[index].born
    ]
    if not found:
        return None
    found.sort()
    _, at, index, other = draw.choice(found[: max(1, len(found) // 3)])
    return _moved(program, at, index, program.ranks[at].ranges[other].offset)


def wrong_peer(program: DeviceProgram, draw: Random) -> DeviceProgram | None:
    """One end of a message is meant for another rank."""
    found = _drawn(program, draw, lambda each: isinstance(each, Group))
    count = len(program.ranks)
    if found is None or count < 3:
        return None
    at, number = found
    group = program.ranks[at].operations[number]
    assert isinstance(group, Group)
    which = draw.randrange(len(group.posts))
    post = group.posts[which]
    other = draw.choice([rank for rank in range(count) if rank not in (at, post.peer)])
    posts = (*group.posts[:which], post._replace(peer=other), *group.posts[which + 1 :])
    return _with(program, at, number, (group._replace(posts=posts),))


def round_split(program: DeviceProgram, draw: Random) -> DeviceProgram | None:
    """One rank issues a round as two groups, in another order at times."""
    found = _drawn(program, draw, lambda each: isinstance(each, Group) and len(each.posts) > 1)
    if found is None:
        return None
    at, number = found
    group = program.ranks[at].operations[number]
    assert isinstance(group, Group)
    posts = list(group.posts)
    if draw.random() < 1 / 2:
        draw.shuffle(posts)
    cut = draw.randrange(1, len(posts))
    halves = (group._replace(posts=tuple(part)) for part in (posts[:cut], posts[cut:]))
    return _with(program, at, number, tuple(halves))


def too_many_posts(program: DeviceProgram, draw: Random) -> DeviceProgram | None:
    """A group has more posts than a communicator takes at once."""
    found = _drawn(program, draw, lambda each: isinstance(each, Group))
    if found is None:
        return None
    at, number = found
    group = program.ranks[at].operations[number]
    assert isinstance(group, Group)
    many: tuple[Post, ...] = group.posts * (-(-(MOST_POSTS + 44) // len(group.posts)))
    return _with(program, at, number, (group._replace(posts=many[: MOST_POSTS + 44]),))


MUTATIONS: Mapping[str, Mutation] = {
    "a wait dropped": without_wait,
    "groups swapped on one rank": groups_swapped,
    "ranges aliased": ranges_aliased,
    "a lifetime shortened": lifetime_shortened,
    "a wrong peer": wrong_peer,
    "one end of a round split": round_split,
    "300 posts in a group": too_many_posts,
}
"""By what they do."""


def _drawn(
    program: DeviceProgram, draw: Random, wanted: Callable[[Operation], bool]
) -> tuple[int, int] | None:
    found = [
        (at, number)
        for at, rank in enumerate(program.ranks)
        for number, operation in enumerate(rank.operations)
        if wanted(operation)
    ]
    return draw.choice(found) if found else None


def _exchanged(program: DeviceProgram, at: int, rank: RankProgram) -> DeviceProgram:
    return replace(program, ranks=(*program.ranks[:at], rank, *program.ranks[at + 1 :]))


def _with(
    program: DeviceProgram, at: int, number: int, operations: Sequence[Operation]
) -> DeviceProgram:
    """Put operations in the place of one."""
    rank = program.ranks[at]
    shift = len(operations) - 1

    def born(index: int) -> int:
        return index + shift if index > number else index

    def dies(index: int) -> int:
        return index + shift if index >= number else index

    changed = replace(
        rank,
        operations=(*rank.operations[:number], *operations, *rank.operations[number + 1 :]),
        ranges=tuple(
            each._replace(born=born(each.born), dies=dies(each.dies)) for each in rank.ranges
        ),
    )
    return _exchanged(program, at, changed)


def _together(program: DeviceProgram) -> Iterator[tuple[int, int, int]]:
    """Yield ranges that live at the same time in one memory, the first no longer than the other."""
    for at, rank in enumerate(program.ranks):
        for first, second in combinations(range(len(rank.ranges)), 2):
            one, other = rank.ranges[first], rank.ranges[second]
            if one.memory is other.memory and one.born <= other.dies and other.born <= one.dies:
                if one.size_bytes <= other.size_bytes:
                    yield at, first, second
                if other.size_bytes <= one.size_bytes:
                    yield at, second, first


def _moved(program: DeviceProgram, at: int, index: int, offset: int) -> DeviceProgram:
    """Put a buffer at another place."""
    rank = program.ranks[at]
    moving = rank.ranges[index]

    def there(view: ByteView) -> ByteView:
        inside = moving.offset <= view.offset < moving.offset + moving.size_bytes
        if view.memory is not moving.memory or not inside:
            return view
        return view._replace(offset=view.offset - moving.offset + offset)

    operations = list(rank.operations)
    for number in range(moving.born, moving.dies + 1):
        operations[number] = _through(operations[number], there)
    last = moving.dies >= len(operations) - 1
    changed = replace(
        rank,
        operations=tuple(operations),
        ranges=_replaced(rank.ranges, index, moving._replace(offset=offset)),
        inputs=tuple((n, there(v)) for n, v in rank.inputs) if not moving.born else rank.inputs,
        outputs=tuple((n, there(v)) for n, v in rank.outputs) if last else rank.outputs,
    )
    return _exchanged(program, at, changed)


def _replaced(ranges: tuple[ByteRange, ...], index: int, moved: ByteRange) -> tuple[ByteRange, ...]:
    return (*ranges[:index], moved, *ranges[index + 1 :])


def _through(operation: Operation, there: Callable[[ByteView], ByteView]) -> Operation:
    match operation:
        case KernelLaunch(reads=reads, writes=writes):
            return operation._replace(
                reads=tuple(map(there, reads)), writes=tuple(map(there, writes))
            )
        case Group(posts=posts):
            moved = tuple(post._replace(view=there(post.view)) for post in posts)
            return operation._replace(posts=moved)
        case _:
            return operation
