"""Records of a sweep as reports take them: judged, and of a strategy that there is."""

from collections.abc import Sequence

from harness.base.json_fields import JsonObject
from harness.planning.peers import is_peer, peer
from harness.records.cell import CellRecord, from_json
from strategies import strategy


def read_cell(line: JsonObject) -> CellRecord:
    """Read the record of a cell.

    Raises:
        ValueError: It is refused by `from_json`, or no strategy has its strategy's name.
    """
    record = from_json(line)
    name = record.config.strategy
    (peer if is_peer(name) else strategy)(name)
    return record


def latest(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Keep the last record of each cell, in the order of their first."""
    newest: dict[str, CellRecord] = {}
    for entry in records:
        newest[entry.config_hash] = entry
    return list(newest.values())
