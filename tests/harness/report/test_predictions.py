"""Predicted beside measured times: signed errors, what was expected, and the choice."""

from dataclasses import replace

import pytest

from harness.records.cell import CellRecord
from harness.records.config import Config, Where
from harness.report.predictions import predicted_pairs, prediction_errors
from tests.harness.page.test_build import CELL, made


def simulated(cell: Config, time_s: float, error: float | None = None) -> CellRecord:
    known = {} if error is None else {"expected_error": error, "inside_range": True}
    return made(cell, time_s, **known)


def measured(cell: Config, time_s: float) -> CellRecord:
    return made(replace(cell, transport=Where.GLOO, cluster=None), time_s)


ZIGZAG, STAR = replace(CELL, strategy="zigzag"), replace(CELL, pattern="star")


def test_errors_are_shares_of_the_measured_time_and_count_what_was_expected() -> None:
    predicted = [
        simulated(CELL, 1.2, 0.25),
        simulated(ZIGZAG, 0.9, 0.05),
        simulated(STAR, 5.0),
        simulated(replace(STAR, cp=2), 7.0),  # was not measured
    ]
    ran = [measured(CELL, 1.0), measured(ZIGZAG, 1.0), measured(STAR, 4.0)]
    found = prediction_errors(predicted_pairs(predicted, ran))
    assert (found.cells, found.within, found.expected) == (3, 1, 2)
    assert found.mean == pytest.approx((0.2 + 0.1 + 0.25) / 3)
    assert found.signed == pytest.approx((0.2 - 0.1 + 0.25) / 3)
    assert (found.p50, found.worst) == (pytest.approx(0.2), pytest.approx(0.25))


def test_regret_is_what_the_predicted_best_costs_over_the_measured_best() -> None:
    predicted = [simulated(CELL, 1.0), simulated(ZIGZAG, 2.0), simulated(STAR, 3.0)]
    ran = [measured(CELL, 1.5), measured(ZIGZAG, 1.2), measured(STAR, 3.0)]
    found = prediction_errors(predicted_pairs(predicted, ran))
    assert (found.problems, found.hits) == (1, 0)  # one strategy on star: nothing to choose
    assert found.regret_mean == found.regret_worst == pytest.approx(0.25)
    alone = prediction_errors(predicted_pairs(predicted[2:], ran))
    assert alone.regret_mean is None


def test_cells_that_nobody_measured_are_no_pairs() -> None:
    with pytest.raises(ValueError, match="both predicted and measured"):
        prediction_errors(predicted_pairs([simulated(CELL, 1.0)], [measured(ZIGZAG, 1.0)]))
