"""Errors, regret and reversed pairs, by hand."""

from dataclasses import replace

import pytest

from harness.reproduce.accuracy import ranking, run_errors, sets_of, strategy_choices
from harness.reproduce.case import Case

CASE = Case(
    gpu="A800",
    nodes=3,
    gpus_per_node=5,
    pattern="causal",
    direction="bwd",
    strategy="ring",
    heads=7,
    seqlen_q=15360,
    seqlen_kv=15360,
    rows=0,
    mode="normal",
    measured_s=1.0,
    author_s=None,
)


def run(
    strategy: str, measured_s: float, predicted_s: float, **other: object
) -> tuple[Case, float]:
    made = replace(CASE, strategy=strategy, measured_s=measured_s)
    return replace(made, **other), predicted_s


def test_errors_are_shares_of_the_measured_time() -> None:
    found = run_errors([run("ring", 2.0, 1.0), run("ring", 1.0, 1.1), run("ring", 4.0, 4.0)])
    assert (found.n, found.worst) == (3, 0.5)
    assert found.mape == pytest.approx(0.2)
    assert found.p50 == pytest.approx(0.1)
    assert found.p90 == pytest.approx(0.1 + 0.8 * 0.4)  # between the second and the third
    assert found.signed == pytest.approx(-0.4 / 3)


def test_a_wrong_choice_costs_what_it_takes_longer() -> None:
    pairs = [run("ring", 1.0, 1.0), run("zigzag", 1.5, 0.9), run("stripe", 1.2, 1.3)]
    (choice,) = strategy_choices(pairs)
    assert choice.regret == pytest.approx(0.5)
    assert not choice.hit
    # Errors of the sets: 0, 40 and 8 %. Zigzag and stripe differ by 25 %, less than 40.
    assert (choice.compared, choice.reversed) == (2, 1)
    whole = ranking([choice, *strategy_choices([run("ring", 1.0, 1.0), run("zigzag", 2.0, 2.0)])])
    assert (whole.problems, whole.hits, whole.worst) == (2, 1, choice.regret)
    assert whole.mean == pytest.approx(0.25)


def test_repeats_count_by_their_best_time_and_problems_stay_apart() -> None:
    pairs = [run("ring", 1.0, 1.0), run("zigzag", 0.5, 1.2), run("zigzag", 0.9, 1.2)]
    assert strategy_choices(pairs)[0].regret == pytest.approx(1.0)
    other = [pairs[0], run("zigzag", 0.5, 1.2, seqlen_kv=7680)]
    assert strategy_choices(other) == []
    assert len(sets_of(other)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "nocomm"},
        {"known": False},
        {"pattern": "full"},  # its code ran a causal mask
        {"kernel": "flash-attn-3"},
        {"heads_kv": 1},
    ],
)
def test_what_ran_otherwise_is_no_candidate(change: dict[str, object]) -> None:
    ring = run("ring", 1.0, 1.0, **({"pattern": "full"} if "pattern" in change else {}))
    assert strategy_choices([ring, run("zigzag", 2.0, 0.5, **change)]) == []
