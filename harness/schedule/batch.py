"""Batch transfers of equal source and destination into one: one latency instead of several."""

from collections.abc import Iterable, Iterator, Sequence

from harness.plan.plan import Plan
from harness.plan.tasks import Leg, Transfer
from harness.schedule.greedy import Replacement, TimedPlan
from harness.schedule.substitute import Members, joined_chunks, substituted

_FEWEST = 2


def batched(plan: Plan, groups: Iterable[Members]) -> Plan:
    """Batch each group of transfers into one.

    Raises:
        ValueError: A group is not transfers of one source, destination and version on arrival.
        CycleError: A transfer of a group waits for a task that waits for another of the group.
    """
    replacements = {}
    for members in groups:
        moves = [task for task in (plan.tasks[i] for i in members) if isinstance(task, Transfer)]
        if len(moves) != len(members) or len({_way(move) for move in moves}) != 1:
            raise ValueError(
                f"batch: tasks {list(members)} must be transfers of one source, destination and "
                "version on arrival"
            )
        replacements[members] = Transfer(one_leg(moves))
    return substituted(plan, replacements)


def one_leg(moves: Sequence[Transfer]) -> Leg:
    """Join the legs of transfers that go the same way."""
    pieces = [piece for move in moves for piece in move.leg.pieces]
    return moves[0].leg._replace(pieces=joined_chunks(pieces))


def _way(move: Transfer) -> tuple[object, ...]:
    leg = move.leg
    # Pieces of a batch arrive under one version, and share their heads, so that they can be joined.
    heads = tuple(sorted({(piece.tensor, piece.heads, piece.version) for piece in leg.pieces}))
    parts = any(piece.tensor.is_part for piece in leg.pieces)
    return leg.src, leg.dst, leg.version, heads if parts else None


def batched_transfers(timed: TimedPlan) -> Iterator[Replacement]:
    """All transfers between two ranks that leave at the start, all partial results, and halves."""
    groups: dict[tuple[tuple[object, ...], bool], list[int]] = {}
    for index, task in enumerate(timed.plan.tasks):
        if isinstance(task, Transfer) and task.leg.src.rank != task.leg.dst.rank:
            early = not timed.graph.after[index]
            groups.setdefault((_way(task), early), []).append(index)
    for (_, early), members in groups.items():
        for some in _halves(members):
            moves = [timed.plan.tasks[index] for index in some]
            leg = one_leg([move for move in moves if isinstance(move, Transfer)])
            seconds = timed.costs.leg_s(leg)
            separate_s = sum(timed.graph.seconds[index] for index in some)
            streams = timed.graph.streams[some[0]]
            gain_s = separate_s - seconds
            yield Replacement(tuple(some), Transfer(leg), seconds, streams, gain_s, late=not early)


def _halves(members: Sequence[int]) -> Iterator[Sequence[int]]:
    if len(members) >= _FEWEST:
        yield members
        middle = len(members) // 2
        yield from _halves(members[:middle])
        yield from _halves(members[middle:])
