"""What was validated on a cluster: errors of like plans, and which plans are alike.

Plans are alike if they ran in one runtime and direction, over as many nodes, with the same kinds of
transfers, in the same regime. A mean over other plans says nothing of a plan, so where no like runs
were measured its error is unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from harness.base.json_fields import refused

FEWEST_RUNS = 3
"""Fewer like runs say nothing of the error."""
LATENCY_SHARE = 0.25
"""From this share of its time on that a plan takes with next to no tokens, it is bound by latency.
Set: half of the measured runs under 64K tokens lie above it, and few longer ones."""
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all")


class Regime(StrEnum):
    """What bounds a plan: fixed costs of launches and messages, or its work."""

    LATENCY = "latency"
    WORK = "work"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanClass:
    """The class of a plan.

    Attributes:
        runtime: How work reaches the GPU.
        direction: Forward or backward.
        nodes: How many its transfers join.
        transfers: Kinds of its transfers, see `cluster.transfer_kinds`.
        regime: What bounds it.
    """

    runtime: str
    direction: str
    nodes: int
    transfers: tuple[str, ...]
    regime: str

    @property
    def only_collectives(self) -> bool:
        """Whether nothing but collectives moves: then all runtimes move it alike."""
        return all(kind.partition(" ")[2] in _COLLECTIVES for kind in self.transfers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedClass:
    """Errors of the measured runs of one class, on shapes that were not fitted.

    Attributes:
        runtime: As of `PlanClass`.
        direction: Likewise.
        nodes: Likewise.
        transfers: Likewise.
        regime: Likewise.
        runs: How many.
        mean: Mean absolute share of error.
        p90: Nine in ten runs missed by at most this share.
    """

    runtime: str
    direction: str
    nodes: int
    transfers: tuple[str, ...]
    regime: str
    runs: int
    mean: float
    p90: float


def like(validated: Sequence[ValidatedClass], plan: PlanClass) -> ValidatedClass | None:
    """The validated class that a plan belongs to; of several the nearest, None if there is none.

    Over as many nodes or the next larger number that was measured. Messages between one pair are
    among those of a rank that talks to several at once.
    """
    found = [one for one in validated if _fits(one, plan)]
    return min(found, key=lambda one: (one.nodes, len(one.transfers), -one.runs), default=None)


def mean_error(
    validated: Sequence[ValidatedClass], *, runtime: str, nodes: int, direction: str
) -> float | None:
    """Mean error of all validated runs in a runtime and direction, on one node or on several."""
    some = [
        one
        for one in validated
        if (one.runtime, one.direction) == (runtime, direction) and (one.nodes == 1) is (nodes == 1)
    ]
    runs = sum(one.runs for one in some)
    return sum(one.runs * one.mean for one in some) / runs if runs else None


def _fits(one: ValidatedClass, plan: PlanClass) -> bool:
    same = one.runtime == plan.runtime or plan.only_collectives
    place = (one.nodes == 1) is (plan.nodes == 1) and one.nodes >= plan.nodes
    kind = (one.direction, one.regime) == (plan.direction, plan.regime)
    return (
        same
        and place
        and kind
        and one.runs >= FEWEST_RUNS
        and all(_covered(transfer, one.transfers) for transfer in plan.transfers)
    )


def _covered(transfer: str, known: Sequence[str]) -> bool:
    link, _, kind = transfer.partition(" ")
    return transfer in known or (kind == "one_peer" and f"{link} several_peers" in known)


def validated_of(rows: Sequence[Mapping[str, Any]]) -> tuple[ValidatedClass, ...]:
    """Validated classes from their sections.

    Raises:
        ValueError: A section lacks a field, has one that is unknown, or a value that it cannot be.
    """
    names = {field.name for field in fields(ValidatedClass)}
    found = []
    for row in rows:
        if set(row) != names:  # what is no table raises a TypeError
            raise refused("validated", row, f"a table of {', '.join(sorted(names))}")
        for name in ("runs", "nodes"):
            if type(row[name]) is not int or not 1 <= row[name] <= 10**6:
                raise refused(f"validated.{name}", row[name], "a whole number from 1 to 1000000")
        for name in ("mean", "p90"):
            if type(row[name]) not in (int, float) or not 0 <= row[name] <= 1e3:
                raise refused(f"validated.{name}", row[name], "a number from 0 to 1000")
        words = [row["runtime"], row["direction"], row["regime"], *_list(row["transfers"])]
        for word in words:
            if not isinstance(word, str) or not word.isprintable() or not 0 < len(word) <= 40:
                raise refused("validated", word, "a short printable text")
        found.append(ValidatedClass(**{**row, "transfers": tuple(row["transfers"])}))
    return tuple(found)


def _list(value: object) -> list[object]:
    if not isinstance(value, list) or len(value) > 20:
        raise refused("validated.transfers", value, "a list of at most 20 texts")
    return value
