"""Results of tilings, and the rules they are counted by: for people and for JSON.

Tilings of one planner are weighed and capped by different rules (see `published` of
`planning.PlanningMode`), so that a value without its rule says little.
"""

from collections.abc import Mapping
from typing import Any

from harness.plan.plan import Plan
from harness.plan.sizes import piece_bytes
from harness.plan.tasks import Tensor
from harness.planning.levels import Level
from strategies.ultraattn.blocks import Grid, paper_cap
from strategies.ultraattn.nodes import ROW_OWNER, TwoLevels
from strategies.ultraattn.solver.assign import Assigned
from strategies.ultraattn.solver.instance import Instance


def q_bytes(plan: Plan) -> int:
    """Return the bytes of all queries."""
    return sum(piece_bytes(plan, piece) for _, piece in plan.initial if piece.tensor is Tensor.Q)


def tilings_report(tiling: TwoLevels | None, size_bytes: int) -> dict[str, Any]:
    """Return the results of the tilings of nodes and devices.

    Args:
        tiling: None: every block is at its row's owner.
        size_bytes: Of all queries.
    """
    if tiling is None:
        return {"allocation": ROW_OWNER}
    coarse, fine = len(tiling.kind), len(tiling.allocation.queries.chunks)
    return {
        "allocation": "tiled",
        Level.NODE: _solved(tiling, tiling.instance, tiling.nodes, tiling.node_full)
        | {"chunk_bytes": size_bytes / coarse},
        Level.DEVICE: [
            _solved(tiling, *block, full) | {"chunk_bytes": size_bytes / fine}
            for block, full in zip(tiling.blocks, tiling.block_full, strict=True)
        ],
    }


def _solved(tiling: TwoLevels, instance: Instance, found: Assigned, full: int) -> dict[str, Any]:
    """Return one tiling: amounts in query chunks, the cap in units of work."""
    unit = instance.weights.unit
    return {
        "blocks": len(instance.blocks),
        "devices": instance.devices,
        "cap": instance.cap,
        "value": found.value / unit,
        "bound": found.bound / unit,
        "volume": found.volume / unit,
        "gap": found.gap,
        "status": found.status.value,
        "source": found.source,
        "seconds": found.seconds,
        "rule": _rule(instance, full, shipped=tiling.shipped, capped=found.source != ROW_OWNER),
    }


def _rule(instance: Instance, full: int, *, shipped: bool, capped: bool) -> Mapping[str, Any]:
    """Return the objective and the cap.

    Returns:
        `counted`, `shipped` or `paper`: see `instance.weights_of`. `row_in` ... `column_out`: what
        moving a chunk counts, in query chunks. `inside`: what moves inside nodes counts too.
        `diagonal_fixed`: diagonal blocks are at their owners. `slack_blocks`: work that a device
        may have beyond the paper's cap, in whole blocks; None if rows are at their owners, whatever
        load that gives.
    """
    weights = instance.weights
    even = paper_cap(Grid(work=instance.work, full=full), instance.devices)
    return {
        "counted": "shipped" if shipped else "paper",
        "row_in": weights.row_in / weights.unit,
        "row_out": weights.row_out / weights.unit,
        "column_in": weights.column_in / weights.unit,
        "column_out": weights.column_out / weights.unit,
        "inside": bool(instance.inside),
        "diagonal_fixed": bool(instance.fixed),
        "slack_blocks": (instance.cap - even) / full if capped else None,
    }
