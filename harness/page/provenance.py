"""Where results come from, and the commands that repeat them."""

import shlex
from collections.abc import Iterable, Mapping, Sequence

from harness.plan.tasks import Scope
from harness.records.cell import CellRecord, Source
from harness.records.config import Config
from harness.report.format import short


def provenance(records: Sequence[CellRecord]) -> dict[str, str]:
    """Facts of machine, versions and time, each with the values that occur."""
    if not records:
        return {"records": "none"}
    found: dict[str, dict[str, None]] = {}
    for entry in records:
        for name, value in _facts(entry.environment):
            found.setdefault(name, {})[value] = None
    times = sorted(entry.recorded_at for entry in records)
    calibrations = {entry.calibration_id for entry in records if entry.calibration_id}
    sources = [
        f"{sum(entry.source is source for entry in records)} {source.value}" for source in Source
    ]
    return {
        "records": f"{len(records)}: {', '.join(sources)}",
        "from": times[0],
        "to": times[-1],
        **({"calibrations": ", ".join(sorted(calibrations))} if calibrations else {}),
        **{name: ", ".join(values) for name, values in found.items()},
    }


def _facts(environment: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{name} ")
        elif value is not None:
            yield prefix + name, str(value)


def commands(records: Sequence[CellRecord]) -> list[str]:
    """Sweeps that contain all cells of some records: one for each machine, model and precision."""
    groups: dict[tuple[object, ...], list[Config]] = {}
    for entry in records:
        cell = entry.config
        key = (
            *(cell.cluster, cell.transport, cell.runtime, cell.scope, cell.hidden, cell.rotary),
            *(cell.heads_q, cell.heads_kv, cell.head_dim, cell.batch, cell.dtype),
        )
        if cell.seqlen_q == cell.seqlen_kv:
            groups.setdefault(key, []).append(cell)
    return [_sweep(cells) for cells in groups.values()]


def _sweep(cells: Sequence[Config]) -> str:
    one = cells[0]
    simulated = one.cluster is not None
    words = ["python -m harness sweep", f"--mode {'simulate' if simulated else 'measure'}"]

    def flag(name: str, values: Iterable[object]) -> None:
        text = ",".join(dict.fromkeys(str(value) for value in values))
        words.append(f"--{name} {shlex.quote(text)}")

    flag("strategies", (cell.strategy for cell in cells))
    flag("patterns", (cell.pattern for cell in cells))
    flag("cp", sorted({cell.cp for cell in cells}))
    flag("seqlen", (short(tokens) for tokens in sorted({cell.seqlen_q for cell in cells})))
    flag("heads", [f"{one.heads_q}/{one.heads_kv}"])
    flag("head-dim", [one.head_dim])
    flag("batch", [one.batch])
    flag("dtype", [one.dtype])
    flag("direction", (cell.direction for cell in cells))
    if simulated:
        flag("cluster", [one.cluster])
        flag("runtime", [one.runtime] if one.runtime else [])
    if one.scope is Scope.LAYER:
        flag("scope", [one.scope])
        flag("hidden", [one.hidden] if one.hidden else [])
    return " ".join(word for word in words if not word.endswith(" ''"))
