"""Records of a sweep as reports take them: judged, and of a strategy that there is."""

from collections.abc import Sequence

from harness.base.json_fields import JsonObject
from harness.planning.peers import is_peer, peer
from harness.records.cell import CellRecord, Status, from_json
from harness.records.config import Config
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


def pending(configs: Sequence[Config], records: Sequence[CellRecord]) -> list[Config]:
    """Cells that have no record yet, or one that failed and is worth another try."""
    done = {entry.config_hash for entry in records if entry.status in (Status.OK, Status.ILLEGAL)}
    return [config for config in configs if config.hash not in done]


def records_in_order(configs: Sequence[Config], records: Sequence[CellRecord]) -> list[CellRecord]:
    """Records of these cells, in the cells' order."""
    by_hash = {entry.config_hash: entry for entry in latest(records)}
    return [by_hash[config.hash] for config in configs if config.hash in by_hash]
