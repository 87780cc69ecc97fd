"""The reference of the assignment problem: try every assignment. Written without the planner's."""

from collections import Counter
from itertools import product

from strategies.ultraattn.solver.instance import Instance


def traffic(instance: Instance, owners: dict[tuple[int, int], int]) -> list[tuple[int, int]]:
    """(received, sent) per device, chunk by chunk and pair of devices by pair."""
    w = instance.weights
    received, sent = Counter[int](), Counter[int]()
    moves = {
        *(("row", i, instance.row_owner[i], d) for (i, _), d in owners.items()),
        *(("column", j, instance.column_owner[j], d) for (_, j), d in owners.items()),
    }
    for kind, _, owner, device in moves:
        if owner != device:
            there, back = (w.row_in, w.row_out) if kind == "row" else (w.column_in, w.column_out)
            received[device] += there
            sent[owner] += there
            received[owner] += back
            sent[device] += back
    for (i, j), device in owners.items():
        received[device] += instance.inside_of(i, j)
        sent[device] += instance.inside_of(i, j)
    return [(received[d], sent[d]) for d in range(instance.devices)]


def optima(instance: Instance) -> tuple[int, int, int] | None:
    """(least maximum, how many assignments reach it, least volume among these); None = none."""
    best: tuple[int, int, int] | None = None
    fixed = {(i, j): d for i, j, d in instance.fixed}
    free = [block for block in instance.blocks if block not in fixed]
    for choice in product(range(instance.devices), repeat=len(free)):
        owners = {**fixed, **dict(zip(free, choice, strict=True))}
        loads = Counter[int]()
        for (i, j), device in owners.items():
            loads[device] += instance.work[i][j]
        if max(loads.values(), default=0) > instance.cap:
            continue
        flows = traffic(instance, owners)
        value, volume = max(map(max, flows)), sum(received for received, _ in flows)
        if best is None or value < best[0]:
            best = value, 1, volume
        elif value == best[0]:
            best = value, best[1] + 1, min(best[2], volume)
    return best
