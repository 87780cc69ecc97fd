"""Kinds of a plan's transfers, inside nodes and between them: what an error was validated for.

one_peer        no rank sends to more than one other over this link, nor receives from more
several_peers   some rank does
both_ways       some rank passes on to several what others sent it: several rings at once
all_gather, reduce_scatter, all_to_all   collectives
"""

from collections import defaultdict

from harness.cluster.machine import LinkClass, link_between
from harness.plan.plan import Plan
from harness.plan.tasks import Collective, Leg, Tensor, Transfer

_INPUTS = (Tensor.Q, Tensor.K, Tensor.V)
_LINKS = {LinkClass.NVLINK: "near", LinkClass.NIC: "far"}


def transfer_kinds(plan: Plan, gpus_per_node: int) -> tuple[str, ...]:
    """Kinds of transfers between ranks, as `near one_peer`; sorted."""
    found: set[str] = set()
    legs: defaultdict[str, list[Leg]] = defaultdict(list)
    for task in plan.tasks:
        if isinstance(task, Transfer):
            link = _LINKS.get(link_between(task.leg.src, task.leg.dst, gpus_per_node))
            if link is not None:
                legs[link].append(task.leg)
        elif isinstance(task, Collective):
            for leg in task.legs:
                link = _LINKS.get(link_between(leg.src, leg.dst, gpus_per_node))
                if link is not None:
                    found.add(f"{link} {task.kind}")
    arrived = _arrivals(plan)
    for link, own in legs.items():
        found.add(f"{link} {_kind(own, arrived)}")
    return tuple(sorted(found))


def _arrivals(plan: Plan) -> set[tuple[int, object]]:
    """Which inputs each rank is sent by others."""
    return {
        (task.leg.dst.rank, (piece.tensor, piece.chunks))
        for task in plan.tasks
        if isinstance(task, Transfer) and task.leg.src.rank != task.leg.dst.rank
        for piece in task.leg.pieces
        if piece.tensor in _INPUTS
    }


def _kind(legs: list[Leg], arrived: set[tuple[int, object]]) -> str:
    peers: defaultdict[tuple[int, bool], set[int]] = defaultdict(set)
    passed: defaultdict[int, set[int]] = defaultdict(set)
    for leg in legs:
        src, dst = leg.src.rank, leg.dst.rank
        peers[src, True].add(dst)
        peers[dst, False].add(src)
        if any((src, (piece.tensor, piece.chunks)) in arrived for piece in leg.pieces):
            passed[src].add(dst)
    if any(len(to) > 1 for to in passed.values()):
        return "both_ways"
    return "several_peers" if any(len(who) > 1 for who in peers.values()) else "one_peer"
