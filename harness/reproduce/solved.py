"""Figures of tilings: degrees, accounts of devices, and least traffic, solved or tried out.

Source of the method: UltraAttn (SC'25), section 4.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

from harness.schedule.list_schedules import StreamInstance
from strategies.ultraattn.blocks import grid_of_table, imbalance, instance_of, paper_cap
from strategies.ultraattn.solver.assign import assign
from strategies.ultraattn.solver.instance import FORWARD, Instance, account
from strategies.ultraattn.solver.published_instances import (
    SEED,
    SEED_TABLES,
    at_degree,
    logged,
)

_PROOF_S = 60.0
"""CPU seconds for a proof; the hardest of the published instances takes a second."""


def blocks_of_work(setting: Mapping[str, Any]) -> float:
    """Work of a pattern's table at a degree, in full blocks; divided by `devices` if given."""
    grid = grid_of_table(at_degree(SEED_TABLES[setting["pattern"]], setting["degree"]))
    return grid.total / grid.full / float(setting.get("devices", 1))


def cap_of_work(setting: Mapping[str, Any]) -> float:
    """Least whole number of blocks that the fullest of `devices` must take."""
    grid = grid_of_table(at_degree(SEED_TABLES[setting["pattern"]], setting["degree"]))
    return paper_cap(grid, setting["devices"]) / grid.full


def unevenness(setting: Mapping[str, Any]) -> float:
    """Imbalance that a degree leaves, r(P, G)."""
    grid = grid_of_table(at_degree(SEED_TABLES[setting["pattern"]], setting["degree"]))
    return imbalance(grid, setting["devices"])


def _example() -> Instance:
    """First column and diagonal of four chunks on four devices: seven full blocks."""
    return instance_of(grid_of_table(SEED), len(SEED), FORWARD)


def account_entry(setting: Mapping[str, Any]) -> float:
    """An `entry` of the account of a `device`, for the example given to devices by `cells`.

    `cells` has the device of each of the seven blocks, row by row.
    """
    instance = _example()
    line = account(instance, _placed(instance, setting["cells"]))[setting["device"]]
    return float(getattr(line, setting["entry"]))


def most_traffic(setting: Mapping[str, Any]) -> float:
    """Most that a device of the example receives or sends, given `cells`."""
    instance = _example()
    return _most(instance, _placed(instance, setting["cells"]))


def least_traffic(setting: Mapping[str, Any]) -> float:
    """The least of that over all assignments within the cap: all are tried."""
    del setting
    return _tried()[0]


def ways_to_least(setting: Mapping[str, Any]) -> float:
    """How many assignments have the least."""
    del setting
    return _tried()[1]


def ways(setting: Mapping[str, Any]) -> float:
    """How many assignments there are."""
    instance = _example()
    del setting
    return float(instance.devices ** len(instance.blocks))


@cache
def _tried() -> tuple[int, int]:
    instance = _example()
    values = list(_values(instance))
    return min(values), values.count(min(values))


def _values(instance: Instance) -> Iterator[int]:
    devices = range(instance.devices)
    for cells in product(devices, repeat=len(instance.blocks)):
        work = [0] * instance.devices
        for (i, j), device in zip(instance.blocks, cells, strict=True):
            work[device] += instance.work[i][j]
        if max(work) <= instance.cap:
            yield _most(instance, _placed(instance, cells))


def _placed(instance: Instance, cells: "tuple[int, ...] | list[int]") -> list[list[int | None]]:
    placed: list[list[int | None]] = [[None] * len(row) for row in instance.work]
    for (i, j), device in zip(instance.blocks, cells, strict=True):
        placed[i][j] = device
    return placed


def _most(instance: Instance, cells: list[list[int | None]]) -> int:
    return max(max(line.received, line.sent) for line in account(instance, cells))


def least_units(setting: Mapping[str, Any]) -> float:
    """Least traffic of a published instance, proved; query chunks."""
    (instance,) = (each for each in logged() if each.name == setting["instance"])
    table = instance.table
    fixed = instance_of(grid_of_table(table), len(table), FORWARD, fix_diagonal=True)
    found = assign(fixed, seconds=_PROOF_S, prove=True)
    if found.bound != found.value:
        raise ValueError(f"{setting['instance']}: no proof in {_PROOF_S:g} s")
    return float(found.value)


# The article's example, microseconds: Q3 and KV3 arrive on one stream, three kernels run on
# another, O3 leaves on a third. A1 waits for KV3, A2 for both, O3 for A2.
_SCHEDULE = StreamInstance(
    durations=(20, 10, 10, 20, 10, 10),
    streams=((0,), (0,), (1,), (1,), (1,), (2,)),
    after=((), (), (), (1,), (0, 1), (4,)),
    moves=(True, True, False, False, False, True),
)
_TASKS = ("Q3", "KV3", "A0", "A1", "A2", "O3")


def example_schedule(setting: Mapping[str, Any]) -> float:
    """Length of the worked example of a schedule with its tasks started in an `order`."""
    order = [_TASKS.index(name) for name in setting["order"].split()]
    return float(_SCHEDULE.makespan(_SCHEDULE.left_shifted(order)))
