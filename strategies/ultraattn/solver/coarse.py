"""Pairs of chunks as one: a smaller instance whose plans are plans of the finer one.

Splitting every chunk of a plan in two doubles what each device moves, in chunks half as long, and
leaves the work as it was. So the optimum of the coarse instance is a good start for the fine one.
"""

from collections.abc import Sequence
from dataclasses import replace

from strategies.ultraattn.solver.instance import DeviceTable, Instance, Matrix


def coarsened(instance: Instance) -> Instance | None:
    """Return the instance of pairs of rows and columns; None where a pair has two owners.

    Its weights are those of one chunk, so its values are half of the fine ones. Decided blocks
    and traffic inside devices are not carried over, so such instances have none either.
    """
    sides = (instance.row_owner, instance.column_owner)
    if instance.fixed or instance.inside or any(len(side) % 2 for side in sides):
        return None
    if any(side[::2] != side[1::2] for side in sides):
        return None
    work = instance.work
    return replace(
        instance,
        work=_matrix(
            [
                [sum(work[i + a][j + b] for a in (0, 1) for b in (0, 1)) for j in _pairs(work[0])]
                for i in _pairs(work)
            ]
        ),
        row_owner=instance.row_owner[::2],
        column_owner=instance.column_owner[::2],
    )


def refined(instance: Instance, cells: DeviceTable) -> list[list[int | None]]:
    """Return the cells of `instance` from those of its coarse instance."""
    return [
        [cells[i // 2][j // 2] if work else None for j, work in enumerate(row)]
        for i, row in enumerate(instance.work)
    ]


def _pairs(side: Sequence[object]) -> range:
    return range(0, len(side), 2)


def _matrix(rows: Sequence[Sequence[int]]) -> Matrix:
    return tuple(map(tuple, rows))
