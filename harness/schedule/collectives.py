"""Replace the transfers within a group of ranks by one collective operation.

every rank sends the same to all others         all-gather
partial gradients, which their owners add       reduce-scatter
anything else, partial (out, lse) among it      all-to-all
"""

from collections.abc import Iterator, Sequence

from harness.plan.plan import Plan
from harness.plan.tasks import Collective, CollectiveKind, Leg, Place, Tensor, Transfer, arrivals
from harness.schedule.batch import one_leg
from harness.schedule.greedy import Replacement, TimedPlan
from harness.schedule.substitute import Members

_FEWEST = 2
_GRADIENTS = frozenset({Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART})


def together(moves: Sequence[Transfer]) -> Collective:
    """The collective that does what transfers do.

    Raises:
        ValueError: What arrives at one rank does not join.
    """
    pairs: dict[tuple[Place, Place, int], list[Transfer]] = {}
    for move in moves:
        pairs.setdefault((move.leg.dst, move.leg.src, move.leg.version), []).append(move)
    legs = tuple(one_leg(pairs[key]) for key in sorted(pairs))
    arrivals(legs)
    return Collective(_kind(legs), legs)


def _kind(legs: Sequence[Leg]) -> CollectiveKind:
    tensors = {piece.tensor for leg in legs for piece in leg.pieces}
    if tensors <= _GRADIENTS:
        return CollectiveKind.REDUCE_SCATTER
    sent: dict[Place, set[object]] = {}
    for leg in legs:
        sent.setdefault(leg.src, set()).add(leg.pieces)
    same = all(len(pieces) == 1 for pieces in sent.values())
    places = {place for leg in legs for place in (leg.src, leg.dst)}
    complete = len(legs) == len(places) * (len(places) - 1)
    return CollectiveKind.ALL_GATHER if same and complete else CollectiveKind.ALL_TO_ALL


def gathered_transfers(timed: TimedPlan) -> Iterator[Replacement]:
    """For each kind of transfer, the groups of ranks in which every two exchange it."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, task in enumerate(timed.plan.tasks):
        if isinstance(task, Transfer) and task.leg.src.rank != task.leg.dst.rank:
            tensors = tuple(dict.fromkeys(piece.tensor for piece in task.leg.pieces))
            kinds.setdefault((tensors, not timed.graph.after[index]), []).append(index)
    for (_, early), indices in kinds.items():
        for members in _groups(timed.plan, indices):
            tasks = [timed.plan.tasks[index] for index in members]
            moves = [task for task in tasks if isinstance(task, Transfer)]
            task = together(moves)
            ports: dict[int, float] = {}
            for index, move in zip(members, moves, strict=True):
                for stream in timed.graph.streams[index]:
                    leg_s = timed.costs.collective_leg_s(move.leg)
                    ports[stream] = ports.get(stream, 0.0) + leg_s
            seconds, lag_s = max(ports.values()), timed.costs.collective_start_s(task)
            busy: dict[int, float] = {}
            for index in members:
                for stream in timed.graph.streams[index]:
                    busy[stream] = busy.get(stream, 0.0) + timed.graph.seconds[index]
            gain_s = max(busy.values()) - seconds - lag_s  # ports work side by side in both forms
            yield Replacement(
                members,
                task,
                seconds,
                tuple(sorted(ports)),
                gain_s,
                late=not early,
                lag_s=lag_s,
            )


def _groups(plan: Plan, indices: Sequence[int]) -> Iterator[Members]:
    """Transfers within groups of ranks that all send to one another."""
    pairs: dict[tuple[int, int], list[int]] = {}
    for index in indices:
        task = plan.tasks[index]
        assert isinstance(task, Transfer)
        pairs.setdefault((task.leg.src.rank, task.leg.dst.rank), []).append(index)
    peers: dict[int, set[int]] = {}
    for src, dst in pairs:
        if (dst, src) in pairs:
            peers.setdefault(src, set()).add(dst)
    done: set[int] = set()
    for rank in sorted(peers):
        if rank in done:
            continue
        group = {rank}
        for peer in sorted(peers[rank] - done):
            if all(peer in peers[member] for member in group):
                group.add(peer)
        if len(group) > _FEWEST:
            done |= group
            yield tuple(sorted(i for pair in pairs if set(pair) <= group for i in pairs[pair]))
