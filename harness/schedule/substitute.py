"""Let tasks of a plan be replaced by others that do the same, and find a new order for all."""

from collections.abc import Mapping, Sequence

from harness.errors import CycleError
from harness.plan.dependencies import needs, rebuilt, topological
from harness.plan.plan import Plan
from harness.plan.tasks import Piece, Task, Tensor, ranks_of

Members = tuple[int, ...]
"""Ids of the tasks that one task replaces."""


def substituted(plan: Plan, replacements: Mapping[Members, Task]) -> Plan:
    """Replace groups of tasks by one task each; others keep their order where that is possible.

    Raises:
        CycleError: A part of a group waits for another, or for a task that does.
        ValueError: A task is in two groups.
    """
    stands: dict[int, int] = {}
    tasks: list[tuple[int, Task]] = []
    for members, task in replacements.items():
        for member in members:
            if member in stands:
                raise ValueError(f"substituted: task {member} is in two groups; it may be in one")
            stands[member] = len(tasks)
        tasks.append((max(members), task))
    for index, task in enumerate(plan.tasks):
        if index not in stands:
            stands[index] = len(tasks)
            tasks.append((index, task))
    before: list[set[int]] = [set() for _ in tasks]
    for index, earlier in enumerate(needs(plan)):
        before[stands[index]].update(stands[first] for first in earlier)
    try:
        order = topological(before, [(float(at),) for at, _ in tasks])
    except ValueError as error:
        task = next(iter(replacements.values()))
        raise CycleError(
            "no ranks wait for one another", rank=ranks_of(task)[0], task=None, detail=str(error)
        ) from None
    return rebuilt(plan, (tasks[at][1] for at in order))


def joined_chunks(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Join pieces of equal tensor, heads and version into one each, chunks ascending."""
    chunks: dict[tuple[Tensor, int, int], set[int]] = {}
    for piece in pieces:
        chunks.setdefault((piece.tensor, piece.heads, piece.version), set()).update(piece.chunks)
    return tuple(
        Piece(tensor, tuple(sorted(found)), heads, version)
        for (tensor, heads, version), found in chunks.items()
    )
