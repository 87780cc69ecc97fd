"""The record of one cell of a sweep: its fields, their rules, and its JSON.

Every value is judged by the type of its field, whether a record is made here or read from a file.
Unknown values are None, never a number. `from_json` is the only reader and `as_json` the only
writer; names in the JSON are those of the fields, with the fields of `Config` among them.
"""

import reprlib
import time
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Annotated

from harness.base.json_fields import JsonObject
from harness.base.judged import counts, facts, fields_of, judged, kinds, missing, prose, reals
from harness.errors import RecordError
from harness.plan.plan import Plan
from harness.plan.sizes import tile_flops
from harness.plan.tasks import Tile
from harness.records.config import Config, Where

SCHEMA_VERSION = 2
"""Version that is written. Records of schema 1 may lack fields, and give an expected error also
outside the calibrated range, where it is unknown."""
_READ = (1, SCHEMA_VERSION)

Seconds = Annotated[float, reals(1e-12, 1e12)]
Share = Annotated[float, reals(0.0, 1e12)]
"""A ratio, a rate, or seconds that may be none at all."""
Prose = Annotated[str, prose]
_SUMMARY = "summary"
_LEFT_OUT: Mapping[str, bool] = {_SUMMARY: False}
"""Marks fields that a row of a table has no room for."""
_LATER: Mapping[str, bool] = {"later": True}
"""Marks fields that lines written before them lack."""


class Status(StrEnum):
    """How a cell of a sweep ended."""

    OK = "ok"
    ILLEGAL = "illegal"
    OOM = "oom"
    TIMEOUT = "timeout"
    ERROR = "error"
    SKIPPED = "skipped"


class Source(StrEnum):
    """How the numbers of a cell are known."""

    MEASURED = "measured"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """Result of one cell.

    Attributes:
        config_hash: Of the cell, as `Config.hash` was when it ran.
        config: The cell.
        status: How it ended.
        reason: Why, where it did not end well or was not judged.
        traceback: Of what it raised.
        time_s: Median of the samples, or the simulated time, seconds.
        samples_s: Of each timed iteration the slowest rank, seconds; empty where simulated.
        p20_s: Quantile of the samples, seconds.
        p80_s: The same.
        tflops_per_gpu: Useful flops over the time, 1e12 / s.
        bytes_sent_per_rank: By the rank that sends most.
        exposed_comm_s: The longest that a rank waits for transfers, seconds.
        imbalance: Work of the busiest rank over the mean.
        peak_bytes: Most that a rank holds.
        peak_bytes_algorithm: The same of what the algorithm needs.
        max_rel_error: Error of each result against the oracle; of a result with a NaN or an
            infinity null. Null where it was not judged.
        plan_hash: Of the plan.
        work_hash: Of what the plan does, whatever it is called.
        resolved: The strategy with the options that it chose.
        bound_s: Compute bound of the problem, evenly spread, seconds.
        calibration: Which calibration a simulated time rests on, in words.
        inside_range: Whether all kernels and messages lie where that was measured.
        expected_error: Mean share by which it missed such plans; null where that is not known, as
            always outside the range.
        expected_error_p90: Nine in ten of them it missed by at most this share; null as that.
        imbalance_lockstep: As `imbalance`, with ranks that wait for one another after each step.
        link_bytes: By kind of link, over all ranks.
        planned_tokens: Length of the plan that was simulated, scaled to the cell's.
        plan_bound_s: No order of this plan's tasks takes less, seconds.
        any_plan_bound_s: No plan of the problem takes less (docs/bounds.md), seconds.
        calibration_id: Name and date of the calibration.
        environment: Versions, cores, commit, variables.
        recorded_at: UTC.
    """

    config_hash: str = field(metadata=_LEFT_OUT)
    config: Config
    status: Status
    reason: Prose = ""
    traceback: Prose = field(default="", metadata=_LEFT_OUT)
    time_s: Seconds | None = None
    samples_s: tuple[Seconds, ...] = field(default=(), metadata=_LEFT_OUT)
    p20_s: Seconds | None = None
    p80_s: Seconds | None = None
    tflops_per_gpu: Share | None = None
    bytes_sent_per_rank: int | None = None
    exposed_comm_s: Share | None = None
    imbalance: Share | None = None
    peak_bytes: int | None = None
    peak_bytes_algorithm: int | None = None
    max_rel_error: Mapping[str, Share | None] | None = None
    plan_hash: str | None = None
    work_hash: str | None = None
    resolved: str | None = None
    bound_s: Share | None = None
    calibration: str | None = None
    inside_range: bool | None = None
    expected_error: Share | None = None
    expected_error_p90: Share | None = field(default=None, metadata=_LATER)
    imbalance_lockstep: Share | None = None
    link_bytes: Mapping[str, int] | None = field(default=None, metadata=_LEFT_OUT)
    planned_tokens: Annotated[int, counts(1)] | None = None
    plan_bound_s: Share | None = None
    any_plan_bound_s: Share | None = None
    calibration_id: str | None = None
    environment: Annotated[Mapping[str, object], facts(2)] = field(metadata=_LEFT_OUT)
    recorded_at: str = field(metadata=_LEFT_OUT)

    def __post_init__(self) -> None:
        """Judge every field.

        Raises:
            RecordError: One has a value that it cannot have.
        """
        try:
            for name, kind in kinds(CellRecord).items():
                object.__setattr__(self, name, judged(kind, name, getattr(self, name)))
        except ValueError as error:
            raise RecordError(str(error)) from None
        wrong = _contradiction(self)
        if wrong:
            raise RecordError(wrong)

    @property
    def source(self) -> Source:
        """How its numbers are known."""
        simulated = self.config.transport is Where.SIMULATED
        return Source.SIMULATED if simulated else Source.MEASURED

    @property
    def ok(self) -> bool:
        """Whether the cell ran and is right; then it has a time."""
        return self.status is Status.OK

    @property
    def seconds(self) -> float:
        """The time of a cell that is ok."""
        assert self.time_s is not None  # no ok record is made without one
        return self.time_s

    @property
    def label(self) -> str:
        """The strategy, with what it chose where that is known."""
        return self.resolved or self.config.strategy

    def as_json(self) -> dict[str, object]:
        """Return the JSON form: see `from_json`."""
        own = {name: _plain(getattr(self, name)) for name in kinds(CellRecord) if name != "config"}
        return {
            "schema_version": SCHEMA_VERSION,
            "config_hash": own.pop("config_hash"),
            **{each.name: getattr(self.config, each.name) for each in fields(Config)},
            "source": self.source,
            **own,
        }


def _contradiction(record: CellRecord) -> str:
    """Say which fields contradict one another; empty if no fields do."""
    if record.ok and record.time_s is None:
        return "time_s (None) must be a number where status is ok"
    if record.expected_error is None and record.expected_error_p90 is not None:
        return (
            f"expected_error_p90 ({record.expected_error_p90:g}) must be null where "
            "expected_error is"
        )
    if record.expected_error is not None and record.inside_range is not True:
        return (
            f"expected_error ({record.expected_error:g}) must be null where inside_range is "
            f"{record.inside_range}"
        )
    said = (record.calibration, record.calibration_id, record.inside_range)
    if record.source is Source.MEASURED and said != (None, None, None):
        return f"calibration ({record.calibration}) must be null where source is measured"
    return ""


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def columns() -> tuple[str, ...]:
    """Names of what stands in a row of a table: all but what is nested or long, as in the JSON."""
    own = [each.name for each in fields(CellRecord) if each.metadata.get(_SUMMARY, True)]
    at = own.index("config")
    return (*own[:at], *(each.name for each in fields(Config)), "source", *own[at + 1 :])


def utc_now() -> str:
    """The time as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def ended(
    config: Config, status: Status, context: JsonObject, *, reason: str = "", detail: str = ""
) -> CellRecord:
    """Make the record of a cell without numbers.

    Args:
        config: The cell.
        status: How it ended.
        context: The environment.
        reason: Why.
        detail: A traceback.
    """
    return CellRecord(
        config_hash=config.hash,
        config=config,
        status=status,
        reason=reason,
        traceback=detail,
        environment=context,
        recorded_at=utc_now(),
    )


def from_json(line: JsonObject) -> CellRecord:
    """Read the record of a cell.

    Args:
        line: As `CellRecord.as_json` has it, or as schema 1 had.

    Raises:
        RecordError: It has another schema, lacks a field, or a field has a value that it cannot
            have; the field is named.
    """
    schema = line.get("schema_version")
    if type(schema) is not int or schema not in _READ:
        raise RecordError(
            f"has schema_version {reprlib.repr(schema)}, and this code reads "
            f"{' and '.join(map(str, _READ))}: something else wrote it, or another version of "
            "this project"
        )
    absent = missing([*_needed(Config, schema), *_needed(CellRecord, schema), "source"], line)
    if absent:
        raise RecordError(absent)
    known = {name: line[name] for name in kinds(CellRecord) if name in line and name != "config"}
    if schema == 1 and known.get("inside_range") is not True:
        known["expected_error"] = None
    try:
        config = Config(**fields_of(Config, line))
    except ValueError as error:
        raise RecordError(str(error)) from None
    record = CellRecord(config=config, **known)  # type: ignore[arg-type]  # judged there
    if line["source"] != record.source:
        raise RecordError(
            f"source ({reprlib.repr(line['source'])}) must be {record.source} where transport is "
            f"{config.transport}"
        )
    return record


def _needed(kind: type[Config | CellRecord], schema: int) -> list[str]:
    """Fields that a line of this schema has: of 1 those without a default, of 2 most."""
    return [
        each.name
        for each in fields(kind)
        if each.name != "config"
        and not each.metadata.get("later")
        and (schema > 1 or (each.default is MISSING and each.default_factory is MISSING))
    ]


def plan_flops(plan: Plan) -> int:
    """Flops of all tiles from the exact mask area (backward 2.5 x forward).

    What a backward plan attends again, because it was not saved, does not count as work.
    """
    tiles = (task for task in plan.tasks if isinstance(task, Tile))
    return sum(tile_flops(plan, tile) for tile in tiles if tile.direction is plan.direction)
