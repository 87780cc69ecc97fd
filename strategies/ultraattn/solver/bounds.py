"""Lower bounds by counting: how much work a device can hold for the chunks that it fetches."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.ultraattn.solver.instance import Instance

Ints = NDArray[np.int64]
_STEPS = 2000  # work is told apart in at most so many steps


@dataclass(frozen=True, slots=True)
class Reach:
    """Per device, (a, b) -> most work with its own chunks, a remote rows and b remote columns."""

    work: tuple[Ints, ...]


def reach(instance: Instance) -> Reach:
    """Return an upper bound on the work that a device can hold, cut to the cap.

    The smaller of two sums: over the best rows, each with its best columns, and the other way.
    """
    table = np.array(instance.work, dtype=np.int64)
    rows, columns = np.array(instance.row_owner), np.array(instance.column_owner)
    result = []
    for d in range(instance.devices):
        by_rows = _greedy(table, rows == d, columns == d)
        by_columns = _greedy(table.T, columns == d, rows == d).T
        result.append(np.minimum(np.minimum(by_rows, by_columns), instance.cap))
    return Reach(tuple(result))


def _greedy(table: Ints, own_rows: NDArray[np.bool_], own_columns: NDArray[np.bool_]) -> Ints:
    remote = -np.sort(-table[:, ~own_columns], axis=1)
    row_work = np.zeros((len(table), remote.shape[1] + 1), dtype=np.int64)
    row_work[:, 1:] = np.cumsum(remote, axis=1)
    row_work += table[:, own_columns].sum(axis=1)[:, None]
    mine = row_work[own_rows].sum(axis=0)
    others = -np.sort(-row_work[~own_rows], axis=0)
    result = np.zeros((len(others) + 1, row_work.shape[1]), dtype=np.int64)
    result[1:] = np.cumsum(others, axis=0)
    result += mine
    return result


def lower_bound(instance: Instance) -> int:
    """Return a proved lower bound on the maximum that a device receives or sends."""
    if not instance.blocks:
        return 0
    most = lines_bound(instance)
    covers = reach(instance)
    inside = sum(instance.inside_of(i, j) for i, j in instance.blocks)
    while instance.total:
        volume = least_total_volume(instance, covers, most)
        if volume is not None and volume + inside <= instance.devices * most:
            break
        most += 1
    return most


def lines_bound(instance: Instance) -> int:
    """Return the bound of the owners: work beyond the cap must be lent to other devices."""
    w, best = instance.weights, 0
    for d in range(instance.devices):
        lent = []
        for table, owners in (
            (instance.work, instance.row_owner),
            (tuple(zip(*instance.work, strict=True)), instance.column_owner),
        ):
            mine = [sum(line) for line, owner in zip(table, owners, strict=True) if owner == d]
            lent.append(sum(max(-(-work // instance.cap) - 1, 0) for work in mine))
        c, e = lent
        best = max(best, w.row_out * c + w.column_out * e, w.row_in * c + w.column_in * e)
    return best


def least_total_volume(instance: Instance, covers: Reach, most: int) -> int | None:
    """Return the least volume with which devices can hold all work; None = they cannot.

    Each device may fetch no more than `most`. Work is rounded up per device to a few steps.
    """
    w = instance.weights
    step = max(1, -(-instance.total // _STEPS))
    total = instance.total // step
    best = np.full(total + 1, np.inf)
    best[0] = 0
    for table in covers.work:
        a = np.arange(table.shape[0])[:, None]
        b = np.arange(table.shape[1])[None, :]
        fits = (w.row_in * a + w.column_in * b <= most) & (w.row_out * a + w.column_out * b <= most)
        cost = (w.row_in + w.row_out) * a + (w.column_in + w.column_out) * b
        cheapest: dict[int, int] = {}
        loads: list[int] = (-(-table[fits] // step)).tolist()
        prices: list[int] = cost[fits].tolist()
        pairs = zip(loads, prices, strict=True)
        for load, price in sorted(pairs, key=lambda pair: (pair[1], -pair[0])):
            if load > max(cheapest, default=-1):
                cheapest[load] = price
        after = np.full(total + 1, np.inf)
        for reached, price in cheapest.items():
            load = min(reached, total)
            after[load:] = np.minimum(after[load:], best[: total + 1 - load] + price)
            after[total] = min(after[total], best[total - load :].min() + price)
        best = after
    return int(best[total]) if np.isfinite(best[total]) else None
