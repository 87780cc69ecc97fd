"""Two sides of ranks, so that what a rank sends does not queue behind what it receives.

A communicator works on one group after the other. If all messages of a ring went over one, a rank
whose group receives would hold back its next group, which sends, until its neighbour has sent, and
so on round the ring: a chain. So there are two communicators for each kind of link, and a message
goes over that of its source's side. Ranks that exchange most are on different sides, as far as the
plan's messages allow: in a ring of an even number each rank sends over one and receives over the
other.
"""

from collections import Counter
from collections.abc import Mapping

from harness.cluster.machine import node_of
from harness.plan.plan import Plan
from harness.plan.sizes import sent_bytes
from harness.plan.tasks import legs_of
from harness.program.operations import Lane

Lanes = Mapping[tuple[int, bool], Lane]
"""(source, whether inside its node) -> communicator."""

_LANES = {True: (Lane.NVLINK_EVEN, Lane.NVLINK_ODD), False: (Lane.NIC_EVEN, Lane.NIC_ODD)}


def communicators_of(plan: Plan, gpus_per_node: int) -> Lanes:
    """Choose the communicator of each source, inside its node and beyond."""
    exchanged: dict[bool, Counter[tuple[int, int]]] = {True: Counter(), False: Counter()}
    for task in plan.tasks:
        for leg in legs_of(task):
            src, dst = leg.src.rank, leg.dst.rank
            if src != dst:
                near = node_of(src, gpus_per_node) == node_of(dst, gpus_per_node)
                exchanged[near][min(src, dst), max(src, dst)] += sent_bytes(plan, leg)
    return {
        (rank, near): _LANES[near][side]
        for near, pairs in exchanged.items()
        for rank, side in enumerate(two_sides(plan.problem.cp, pairs))
    }


def two_sides(ranks: int, pairs: Mapping[tuple[int, int], int]) -> list[int]:
    """Part ranks into two sides, the two of each pair on different ones where that is possible.

    Args:
        ranks: How many.
        pairs: Pairs of ranks, the lower first, and how much they exchange: more goes first.

    Returns:
        0 or 1 for each rank.
    """
    group = list(range(ranks))
    side = [0] * ranks
    members = [[rank] for rank in range(ranks)]
    for (one, other), _ in sorted(pairs.items(), key=lambda pair: (-pair[1], pair[0])):
        kept, moved = group[one], group[other]
        if kept == moved:
            continue
        if len(members[kept]) < len(members[moved]):
            kept, moved = moved, kept
        turned = side[one] == side[other]
        for rank in members[moved]:
            group[rank] = kept
            side[rank] ^= turned
        members[kept] += members[moved]
    return side
