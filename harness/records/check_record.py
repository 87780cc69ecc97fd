"""The record of one checked cell: how far each result is from the oracle, its JSON."""

import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Annotated

from harness.base.json_fields import JsonObject
from harness.base.judged import fields_of, judged, kinds, missing, prose, reals
from harness.errors import RecordError
from harness.records.config import Config

CHECK_SCHEMA_VERSION = 1
"""Of lines in a file. Those without one are the same."""


class Outcome(StrEnum):
    """How a checked cell ended."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecord:
    """Result of checking one cell.

    Attributes:
        config_hash: Of the cell, as `Config.hash` was when it ran.
        config: The cell.
        status: How it ended.
        reason: Why, if it did not pass.
        max_rel_error: Largest error of each result, by the rule in `oracle.tolerance`; null of one
            with a NaN or an infinity.
        tolerances: The most that each may be.
    """

    config_hash: str
    config: Config
    status: Outcome
    reason: Annotated[str, prose] = ""
    max_rel_error: Mapping[str, Annotated[float, reals(0.0, 1e300)] | None]
    tolerances: Mapping[str, Annotated[float, reals(1e-30, 1e30)]]

    def __post_init__(self) -> None:
        """Judge every field.

        Raises:
            RecordError: One has a value that it cannot have.
        """
        try:
            for name, kind in kinds(CheckRecord).items():
                object.__setattr__(self, name, judged(kind, name, getattr(self, name)))
        except ValueError as error:
            raise RecordError(str(error)) from None
        beyond = self.max_rel_error.keys() - self.tolerances.keys()
        if beyond:
            raise RecordError(f"tolerances lack {', '.join(sorted(beyond))}")

    @property
    def tolerance(self) -> float | None:
        """The largest of the tolerances."""
        return max(self.tolerances.values(), default=None)

    def as_json(self) -> dict[str, object]:
        """Return the JSON form as `check --json` prints it."""
        return {
            **{each.name: getattr(self.config, each.name) for each in fields(Config)},
            "status": self.status,
            "reason": self.reason,
            "max_rel_error": dict(self.max_rel_error),
            "tolerance": self.tolerance,
            "tolerances": dict(self.tolerances),
        }

    def as_line(self) -> dict[str, object]:
        """Return the JSON form as a file has it; see `from_line`."""
        return {
            "schema_version": CHECK_SCHEMA_VERSION,
            **self.as_json(),
            "config_hash": self.config_hash,
        }


def from_line(line: JsonObject) -> CheckRecord:
    """Read the record of a checked cell.

    Raises:
        RecordError: It lacks a field, has another version, or a field has a value that it cannot
            have; the field is named.
    """
    own = [name for name in kinds(CheckRecord) if name != "config"]
    cell = [each.name for each in fields(Config) if each.default is MISSING]
    absent = missing([*cell, *own], line)
    if absent:
        raise RecordError(f"{absent}, so it is no record of a check")
    version = line.get("schema_version", CHECK_SCHEMA_VERSION)
    if type(version) is not int or version != CHECK_SCHEMA_VERSION:
        raise RecordError(
            f"has schema_version {reprlib.repr(version)}, "
            f"and this code reads {CHECK_SCHEMA_VERSION}"
        )
    try:
        config = Config(**fields_of(Config, line))
    except ValueError as error:
        raise RecordError(str(error)) from None
    return CheckRecord(config=config, **{name: line[name] for name in own})  # type: ignore[arg-type]
