"""Let a plan fetch late, so that no rank ever holds more than a cap.

What a rank holds at a time follows from the order of its tasks, and most of it was fetched for
tiles that come later. Here an input waits for a tile of the rank that fetches it: the last one
before those that are fetched ahead for. All else keeps its order as far as that allows.

    ahead = 1   fetch 0, fetch 1, tile 0, fetch 2, tile 1, fetch 3, ...

The edges hold on any runtime. The fewer tiles ahead, the less is held and the less is hidden.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard

from harness.plan.dependencies import needs, reordered, topological
from harness.plan.plan import Plan
from harness.plan.tasks import Task, Tensor, Tile, Transfer

_INPUTS = frozenset(
    {Tensor.Q, Tensor.K, Tensor.V, Tensor.OUT, Tensor.DOUT, Tensor.LSE, Tensor.DELTA}
)
_AHEAD = (16, 8, 4, 2, 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedPlan:
    """A plan, and what the fullest rank holds of it.

    Attributes:
        plan: The plan.
        peak_bytes: By the ledger, inputs included.
        ahead: For how many tiles after the next a rank fetches; None: as the plan was.
    """

    plan: Plan
    peak_bytes: int
    ahead: int | None


def within_memory(plan: Plan, cap_bytes: float, peak_of: Callable[[Plan], int]) -> CappedPlan:
    """Return the plan, or the same with fetches as early as a cap of memory allows.

    Where none keeps the cap it is the one that holds least.

    Args:
        plan: A right plan.
        cap_bytes: Most bytes of a rank.
        peak_of: Bytes of the fullest rank of a plan, proved by the ledger.
    """
    least = CappedPlan(plan=plan, peak_bytes=peak_of(plan), ahead=None)
    for ahead in _AHEAD if least.peak_bytes > cap_bytes else ():
        try:
            late = fetched_late(plan, ahead)
        except ValueError:  # ranks would wait for one another
            continue
        made = CappedPlan(plan=late, peak_bytes=peak_of(late), ahead=ahead)
        if made.peak_bytes <= cap_bytes:
            return made
        least = min(least, made, key=lambda one: one.peak_bytes)
    return least


def fetched_late(plan: Plan, ahead: int) -> Plan:
    """Return a plan whose ranks fetch inputs for at most so many tiles after the next one.

    Args:
        plan: A right plan.
        ahead: How many.

    Raises:
        ValueError: Ranks would wait for one another.
    """
    before = needs(plan)
    gates = _gates(plan, before, ahead)
    waits = [{*each, *gates.get(index, ())} for index, each in enumerate(before)]
    order = topological(waits, [(float(index),) for index in range(len(before))])
    at = {index: place for place, index in enumerate(order)}
    tasks = list(reordered(plan, order).tasks)
    for fetch, tiles in gates.items():
        task = tasks[at[fetch]]
        after = tuple(sorted({*task.after, *(at[tile] for tile in tiles)}))
        tasks[at[fetch]] = replace(task, after=after)
    return replace(plan, tasks=tuple(tasks))


def _gates(plan: Plan, before: list[tuple[int, ...]], ahead: int) -> dict[int, tuple[int, ...]]:
    """Per fetch, the tile at its destination that it comes behind, if there is one."""
    lines: defaultdict[int, list[int]] = defaultdict(list)  # per rank, its tiles in order
    gates: dict[int, tuple[int, ...]] = {}
    for index, task in enumerate(plan.tasks):
        if not isinstance(task, Tile):
            continue
        line = lines[task.place.rank]
        behind = len(line) - ahead - 1
        line.append(index)
        for fetch in before[index] if behind >= 0 else ():
            if _fetches(plan.tasks[fetch]):
                gates.setdefault(fetch, (line[behind],))  # the first tile that needs it decides
    at_once = {
        fetch for line in lines.values() for tile in line[: ahead + 1] for fetch in before[tile]
    }
    return {fetch: tiles for fetch, tiles in gates.items() if fetch not in at_once}


def _fetches(task: Task) -> TypeGuard[Transfer]:
    """Whether a task brings inputs to a rank from another."""
    if not isinstance(task, Transfer) or task.leg.src.rank == task.leg.dst.rank:
        return False
    return all(piece.tensor in _INPUTS for piece in task.leg.pieces)
