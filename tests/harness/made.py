"""Records of cells, made by hand."""

from collections.abc import Mapping
from dataclasses import fields, replace

from harness.base.judged import fields_of
from harness.records.cell import CellRecord, Status
from harness.records.config import Config


def record(
    config: Config,
    status: Status,
    context: Mapping[str, object],
    *,
    reason: str = "",
    detail: str = "",
    **values: object,
) -> CellRecord:
    """A record with some values."""
    return CellRecord(
        config_hash=config.hash,
        config=config,
        status=status,
        reason=reason,
        traceback=detail,
        environment=context,
        recorded_at="2026-01-02T03:04:05Z",
        **values,  # type: ignore[arg-type]  # judged there
    )


def changed(entry: CellRecord, **values: object) -> CellRecord:
    """A record with other values, also of its configuration; its hash stays."""
    cell = {each.name: getattr(entry.config, each.name) for each in fields(Config)}
    own = {name: value for name, value in values.items() if name not in cell}
    config = Config(**fields_of(Config, {**cell, **values}))
    return replace(entry, config=config, **own)  # type: ignore[arg-type]  # judged there
