"""A pass that brings the log-sum-exp to the owners of the queries, where out ends.

Strategies that compute by heads leave it with the rank that computed a head, for its backward pass.
"""

from dataclasses import replace

from harness.plan.plan import Plan
from harness.plan.residency import Residency
from harness.plan.sharding import Sharding
from harness.plan.tasks import Leg, Piece, Place, Resident, Task, Tensor, Transfer, ordered


def lse_to_owners(plan: Plan, queries: Sharding) -> Plan:
    """Let a forward plan of attention end with lse at the owners of the queries, as outputs.

    What a rank computed of its own tokens stays; the rest is sent after all else, each rank to each
    owner what it has of the owner's tokens.

    Args:
        plan: It saves every head of every token once.
        queries: Who owns which query tokens.
    """
    owner, residency = queries.owner(), Residency(plan.initial)
    for index, task in enumerate(plan.tasks):
        residency.requires(index, task)
    tasks: list[Task] = list(plan.tasks)
    outputs: list[Resident] = []
    for place, piece in plan.saved:
        if piece.tensor is not Tensor.LSE:
            continue
        for rank, part in _by_owner(piece, owner):
            outputs.append(Resident(Place(rank), part))
            if place != Place(rank):
                moved = Transfer(Leg(place, Place(rank), (part,)))
                tasks.append(ordered(moved, residency.requires(len(tasks), moved)))
    return replace(plan, tasks=tuple(tasks), outputs=(*plan.outputs, *outputs))


def _by_owner(piece: Piece, owner: dict[int, int]) -> list[tuple[int, Piece]]:
    """Split a piece by the ranks that own its tokens."""
    chunks: dict[int, list[int]] = {}
    for chunk in piece.chunks:
        chunks.setdefault(owner[chunk], []).append(chunk)
    return [(rank, piece._replace(chunks=tuple(own))) for rank, own in chunks.items()]
