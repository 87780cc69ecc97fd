"""True dependencies of a plan's tasks, and plans rebuilt from tasks in another order.

A plan's edges also fix the order of tasks that add to one accumulator. Any order of those is right,
so a pass may choose another; the edges are then derived anew from the one readiness rule.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from harness.plan.plan import Plan
from harness.plan.residency import Program, Residency, program_of, without_collection
from harness.plan.tasks import AccessMode, Place, Resident, Task, Tensor, effects, ordered

VersionedChunk = tuple[Place, Tensor, int, int]
"""(place, tensor, version, chunk)."""


@dataclass(slots=True)
class _Holding:
    """Heads of one cell that came to be together.

    Attributes:
        heads: Bit set.
        creator: The task that made them whole; None if they were there or began by addition.
        adders: Tasks that added to them.
        readers: Tasks that read them.
    """

    heads: int
    creator: int | None
    adders: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)

    def makers(self) -> list[int]:
        """The tasks that must be done before somebody reads or takes them."""
        return self.adders if self.creator is None else [self.creator, *self.adders]


class _Walk:
    def __init__(self, plan: Plan) -> None:
        self.held: dict[VersionedChunk, list[_Holding]] = {}
        self.takers: dict[VersionedChunk, list[int]] = {}
        for place, piece in plan.initial:
            for chunk in piece.chunks:
                cell = (place, piece.tensor, piece.version, chunk)
                self.held.setdefault(cell, []).append(_Holding(piece.heads, None))

    def needs(self, index: int, task: Task) -> tuple[int, ...]:
        found: set[int] = set()
        for place, piece, mode in effects(task):
            for chunk in piece.chunks:
                cell = (place, piece.tensor, piece.version, chunk)
                match mode:
                    case AccessMode.CREATE:
                        found.update(self.takers.get(cell, ()))
                        holding = _Holding(piece.heads, index)
                        self.held.setdefault(cell, []).append(holding)
                    case AccessMode.ACCUMULATE:
                        found.update(self._add(cell, piece.heads, index))
                    case _:
                        found.update(self._use(cell, piece.heads, index, mode))
        found.discard(index)
        return tuple(sorted(found))

    def _add(self, cell: VersionedChunk, heads: int, index: int) -> Iterable[int]:
        found, missing = list(self.takers.get(cell, ())), heads
        for holding in self.held.get(cell, ()):
            if holding.heads & heads:
                missing &= ~holding.heads
                found += holding.readers
                if holding.creator is not None:
                    found.append(holding.creator)
                holding.adders.append(index)
        if missing:
            self.held.setdefault(cell, []).append(_Holding(missing, None, [index]))
        return found

    def _use(self, cell: VersionedChunk, heads: int, index: int, mode: AccessMode) -> Iterable[int]:
        found: list[int] = []
        rest = []
        for holding in self.held.get(cell, ()):
            if holding.heads & heads:
                found += holding.makers()
                if mode is AccessMode.READ:
                    holding.readers.append(index)
                else:
                    found += holding.readers
                    holding.heads &= ~heads
            if holding.heads:
                rest.append(holding)
        if mode is not AccessMode.READ:
            self.held[cell] = rest
            self.takers.setdefault(cell, []).append(index)
        return found


def needs(plan: Plan) -> list[tuple[int, ...]]:
    """Per task, the earlier tasks that it waits for in every order of the plan's tasks."""
    walk = _Walk(plan)
    return [walk.needs(index, task) for index, task in enumerate(plan.tasks)]


def resolved(plan: Plan) -> Program:
    """Resolve the pieces of a plan, as the verifier does, without its proof."""
    with without_collection():
        residency = Residency(plan.initial)
        initial = len(residency.slabs)
        steps = [residency.apply(index, task) for index, task in enumerate(plan.tasks)]
        return program_of(plan, residency, initial, steps)


def rebuilt(plan: Plan, tasks: Iterable[Task]) -> Plan:
    """Return the plan with other tasks, in their order, and the edges that they need."""
    with without_collection():
        return replace(plan, tasks=linked(plan.initial, tasks))


def reordered(plan: Plan, order: Sequence[int]) -> Plan:
    """Return the plan with its tasks in another order, which must respect `needs`."""
    return rebuilt(plan, (plan.tasks[index] for index in order))


def topological(before: Sequence[Iterable[int]], keys: Sequence[tuple[float, ...]]) -> list[int]:
    """Order items so that each follows those before it, smallest key first where there is a choice.

    Raises:
        ValueError: Some wait for one another.
    """
    order = sortable(before, keys)
    if len(order) < len(before):
        raise ValueError(f"topological: {len(before) - len(order)} items wait for one another")
    return order


def sortable(before: Sequence[Iterable[int]], keys: Sequence[tuple[float, ...]]) -> list[int]:
    """Order those items that wait for nothing that waits for them; see `topological`."""
    waits = [0] * len(before)
    following: list[list[int]] = [[] for _ in before]
    for item, earlier in enumerate(before):
        for first in set(earlier):
            waits[item] += 1
            following[first].append(item)
    ready = [(keys[item], item) for item, count in enumerate(waits) if not count]
    heapify(ready)
    order = []
    while ready:
        _, item = heappop(ready)
        order.append(item)
        for later in following[item]:
            waits[later] -= 1
            if not waits[later]:
                heappush(ready, (keys[later], later))
    return order


def linked(initial: Sequence[Resident], tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Give every task the edges that the readiness rule asks for; its own are replaced."""
    residency = Residency(tuple(initial))
    return tuple(ordered(task, residency.requires(index, task)) for index, task in enumerate(tasks))
