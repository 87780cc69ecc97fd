"""The record of one cell of a sweep: what it says and how a cell can end."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path

from harness.plan.plan import Plan
from harness.plan.sizes import tile_flops
from harness.plan.tasks import Tile
from harness.records.config import Config, Where
from harness.records.store import Record

SCHEMA_VERSION = 1


class Status(StrEnum):
    """How a cell of a sweep ended."""

    OK = "ok"
    ILLEGAL = "illegal"
    OOM = "oom"
    TIMEOUT = "timeout"
    ERROR = "error"
    SKIPPED = "skipped"


_EMPTY: Record = {
    "time_s": None,
    "samples_s": [],
    "p20_s": None,
    "p80_s": None,
    "tflops_per_gpu": None,
    "bytes_sent_per_rank": None,
    "exposed_comm_s": None,
    "imbalance": None,
    "peak_bytes": None,
    "peak_bytes_algorithm": None,
    "max_rel_error": None,
    "plan_hash": None,
    "work_hash": None,
    "resolved": None,
    "bound_s": None,
    "calibration": None,
    "inside_range": None,
    "expected_error": None,
}


_NEEDED = (
    *(field.name for field in fields(Config)),
    *("schema_version", "config_hash", "source", "status", "reason", "environment"),
    *("time_s", "samples_s", "bytes_sent_per_rank", "peak_bytes", "max_rel_error", "plan_hash"),
)
"""What comparing and tables cannot do without."""


def record(
    config: Config,
    status: Status,
    context: Record,
    *,
    reason: str = "",
    detail: str = "",
    **values: object,
) -> Record:
    """Make the record of a cell; what it has no value for is null, never a number."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"record: {name} ({value}) must be finite")
    simulated = config.transport is Where.SIMULATED
    return {
        "schema_version": SCHEMA_VERSION,
        "config_hash": config.hash,
        **asdict(config),
        "source": "simulated" if simulated else "measured",
        "status": status.value,
        "reason": reason,
        "traceback": detail,
        **_EMPTY,
        **values,
        "environment": dict(context),
        "recorded_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def known(records: Sequence[Record], path: Path) -> Sequence[Record]:
    """Return records, if they are of cells of a sweep.

    Args:
        records: What was read.
        path: Where.

    Raises:
        ValueError: One has another schema, or lacks what the record of a cell has.
    """
    for number, entry in enumerate(records, start=1):
        schema = entry.get("schema_version")
        lacking = [name for name in _NEEDED if name not in entry]
        if schema != SCHEMA_VERSION or lacking:
            what = f"lacks {', '.join(lacking)}" if lacking else f"has schema {schema}"
            raise ValueError(
                f"results ({path}): record {number} {what}; a sweep's have schema "
                f"{SCHEMA_VERSION}, so something else wrote it; name other results"
            )
    return records


def plan_flops(plan: Plan) -> int:
    """Flops of all tiles from the exact mask area (backward 2.5 x forward).

    What a backward plan attends again, because it was not saved, does not count as work.
    """
    tiles = (task for task in plan.tasks if isinstance(task, Tile))
    return sum(tile_flops(plan, tile) for tile in tiles if tile.direction is plan.direction)
