"""Which validated runs a plan is like."""

from dataclasses import replace

import pytest

from harness.cluster.validated import PlanClass, ValidatedClass, like, mean_error, validated_of

PLAN = PlanClass(
    runtime="graph",
    direction="forward",
    nodes=3,
    transfers=("far one_peer", "near one_peer"),
    regime="work",
)
KNOWN = ValidatedClass(
    runtime="graph",
    direction="forward",
    nodes=4,
    transfers=("far one_peer", "near several_peers"),
    regime="work",
    runs=7,
    mean=0.05,
    p90=0.11,
)


def test_a_plan_is_like_runs_over_the_next_larger_number_of_nodes_that_was_measured() -> None:
    eight = replace(KNOWN, nodes=8, mean=0.2)
    assert like([eight, KNOWN], PLAN) == KNOWN
    assert like([eight, KNOWN], replace(PLAN, nodes=5)) == eight
    assert like([eight, KNOWN], replace(PLAN, nodes=9)) is None
    assert like([replace(KNOWN, nodes=1)], PLAN) is None


@pytest.mark.parametrize(
    "change",
    [
        {"runtime": "te"},
        {"direction": "backward"},
        {"regime": "latency"},
        {"nodes": 1},  # what stays in a node says nothing of what leaves it, and the reverse
        {"transfers": ("far several_peers", "near one_peer")},
        {"transfers": ("far one_peer", "near both_ways")},
        {"transfers": ("far one_peer", "near all_to_all")},
    ],
)
def test_what_differs_was_not_validated(change: dict[str, object]) -> None:
    assert like([KNOWN], PLAN) == KNOWN
    assert like([KNOWN], replace(PLAN, **change)) is None


def test_two_runs_say_nothing() -> None:
    assert like([replace(KNOWN, runs=2)], PLAN) is None


def test_collectives_alone_move_alike_in_every_runtime() -> None:
    known = replace(KNOWN, runtime="te", transfers=("far all_to_all", "near all_to_all"))
    plan = replace(PLAN, transfers=known.transfers)
    assert like([known], plan) == known
    assert like([known], replace(plan, transfers=("far all_gather",))) is None


def test_the_nearest_of_several_counts() -> None:
    exact = replace(KNOWN, transfers=("near one_peer",), nodes=1, mean=0.01)
    wide = replace(exact, transfers=("near all_to_all", "near one_peer"), mean=0.3)
    assert like([wide, exact], replace(PLAN, nodes=1, transfers=("near one_peer",))) == exact


def test_a_mean_over_classes_weighs_runs() -> None:
    others = [KNOWN, replace(KNOWN, runs=21, mean=0.09, nodes=2), replace(KNOWN, nodes=1, mean=9)]
    found = mean_error(others, runtime="graph", nodes=2, direction="forward")
    assert found == pytest.approx((7 * 0.05 + 21 * 0.09) / 28)
    assert mean_error(others, runtime="te", nodes=2, direction="forward") is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mean": -0.1}, "validated.mean"),
        ({"mean": True}, "validated.mean"),
        ({"p90": float("nan")}, "validated.p90"),
        ({"runs": 0}, "validated.runs"),
        ({"nodes": 2.5}, "validated.nodes"),
        ({"regime": ""}, "short printable"),
        ({"runtime": "\x1b[2J"}, "short printable"),
        ({"transfers": "near"}, "validated.transfers"),
        ({"speed": 3}, "a table of"),
    ],
)
def test_a_class_that_cannot_be_is_refused(change: dict[str, object], why: str) -> None:
    row = {name: getattr(KNOWN, name) for name in ValidatedClass.__slots__}
    row["transfers"] = list(KNOWN.transfers)
    assert validated_of([row]) == (KNOWN,)
    with pytest.raises(ValueError, match=why):
        validated_of([{**row, **change}])
