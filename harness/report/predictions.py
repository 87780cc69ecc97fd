"""Predicted beside measured times of the same cells: errors, and the choice between strategies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.records.cell import CellRecord, Source
from harness.records.config import Config

_SHARED = (
    *("pattern", "cp", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "head_dim", "batch"),
    *("dtype", "direction", "scope", "hidden", "rotary"),
)
"""Fields of a configuration that say what is computed, wherever that is."""


@dataclass(frozen=True, slots=True)
class PredictedPair:
    """One cell, simulated and measured.

    Attributes:
        predicted: Its simulated record.
        measured: Its measured record.
    """

    predicted: CellRecord
    measured: CellRecord

    @property
    def error(self) -> float:
        """Share of the measured time by which the prediction is too long."""
        return self.predicted.seconds / self.measured.seconds - 1


@dataclass(frozen=True, slots=True)
class PredictionErrors:
    """Errors of predictions as shares of the measured times, and of the choice they lead to.

    Attributes:
        cells: How many there are.
        mean: Mean absolute error.
        signed: Mean error.
        p50: Half of the absolute errors are at most this.
        p90: Nine in ten are at most this.
        worst: The largest absolute error.
        within: Cells whose error is at most what their prediction expected; of those that say so.
        expected: Cells whose prediction says what error to expect.
        problems: Problems on which several strategies ran.
        hits: Of these, problems whose predicted best is the measured best.
        regret_mean: Measured time of the predicted best over that of the measured best, less one;
            None where no problem has several strategies.
        regret_worst: The largest.
    """

    cells: int
    mean: float
    signed: float
    p50: float
    p90: float
    worst: float
    within: int
    expected: int
    problems: int
    hits: int
    regret_mean: float | None
    regret_worst: float | None


class ErrorSpread(NamedTuple):
    """How signed errors lie: of their sizes the mean, two quantiles and the largest."""

    mean: float
    signed: float
    p50: float
    p90: float
    worst: float


def error_spread(errors: Sequence[float]) -> ErrorSpread:
    """Describe some signed errors, at least one."""
    gaps = np.array(errors)
    sizes = np.abs(gaps)
    p50, p90 = np.quantile(sizes, (0.5, 0.9))
    return ErrorSpread(
        mean=float(sizes.mean()),
        signed=float(gaps.mean()),
        p50=float(p50),
        p90=float(p90),
        worst=float(sizes.max()),
    )


def work_of_cell(config: Config) -> tuple[object, ...]:
    """What a cell computes, by whichever strategy and wherever."""
    return tuple(getattr(config, name) for name in _SHARED)


def predicted_pairs(
    predicted: Iterable[CellRecord], measured: Iterable[CellRecord]
) -> list[PredictedPair]:
    """Pair simulated records with measured ones of the same strategy and problem."""

    def key(entry: CellRecord) -> tuple[object, ...]:
        return (entry.config.strategy, *work_of_cell(entry.config))

    ran = {key(e): e for e in measured if e.ok and e.source is Source.MEASURED}
    return [
        PredictedPair(entry, ran[key(entry)])
        for entry in predicted
        if entry.ok and entry.source is Source.SIMULATED and key(entry) in ran
    ]


def prediction_errors(pairs: Sequence[PredictedPair]) -> PredictionErrors:
    """Judge predictions by what was measured.

    Raises:
        ValueError: There are none.
    """
    if not pairs:
        raise ValueError("no cell was both predicted and measured: run the same cells for both")
    spread = error_spread([pair.error for pair in pairs])
    said = [pair for pair in pairs if pair.predicted.expected_error is not None]
    regrets = list(_regrets(pairs))
    return PredictionErrors(
        cells=len(pairs),
        **spread._asdict(),
        within=sum(abs(pair.error) <= (pair.predicted.expected_error or 0.0) for pair in said),
        expected=len(said),
        problems=len(regrets),
        hits=sum(regret == 0 for regret in regrets),
        regret_mean=sum(regrets) / len(regrets) if regrets else None,
        regret_worst=max(regrets, default=None),
    )


def _regrets(pairs: Sequence[PredictedPair]) -> Iterable[float]:
    problems: dict[tuple[object, ...], list[PredictedPair]] = {}
    for pair in pairs:
        problems.setdefault(work_of_cell(pair.measured.config), []).append(pair)
    for own in problems.values():
        if len(own) > 1:
            chosen = min(own, key=lambda pair: pair.predicted.seconds)
            least_s = min(pair.measured.seconds for pair in own)
            yield chosen.measured.seconds / least_s - 1
