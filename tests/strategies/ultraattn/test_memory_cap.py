"""`memory=`: the ledger proves the cap, both directions share places, and too little is refused."""

from dataclasses import replace

import pytest

from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.memory.ledger import ledger
from harness.plan.problem import Direction, Dtype, Problem
from harness.prepare.planner_context import context_on
from harness.proved.plans import proved_once
from patterns import make_pattern
from strategies import strategy

QUICK = "ultraattn:seconds=0.02"


def problem(pattern: str, cp: int = 6) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, 4099),
        heads_q=6,
        heads_kv=2,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def peaks(text: str, p: Problem) -> dict[Direction, float]:
    """GiB of the fullest rank, of plans that follow one another."""
    context = context_on(cluster("h100-1x8"))
    found = {d: proved_once(strategy(text), p, d, context) for d in Direction}
    return {d: max(ledger(program).peak_bytes) / 2**30 for d, program in found.items()}


@pytest.mark.parametrize("pattern", ["causal", "full"])
def test_a_cap_is_kept_in_both_directions(pattern: str) -> None:
    p = problem(pattern)
    free = max(peaks(QUICK, p).values())
    held = peaks(f"{QUICK},memory={0.9 * free:.5f}", p)
    assert max(held.values()) <= 0.9 * free


def test_too_little_is_refused_with_the_least_that_can_be_held() -> None:
    p = problem("causal")
    chosen, context = strategy(f"{QUICK},memory=0.0001"), context_on(cluster("h100-1x8"))
    with pytest.raises(UnsupportedError, match="memory") as caught:
        chosen.plan(p, Direction.BACKWARD, context)
    (way_out,) = caught.value.nearest
    least = float(way_out.removeprefix("memory="))
    held = strategy(f"{QUICK},{way_out}").plan(p, Direction.BACKWARD, context)
    assert held.strategy == f"{QUICK},{way_out}"
    assert peaks(f"{QUICK},{way_out}", p)[Direction.BACKWARD] <= least


def test_a_cap_is_counted_for_what_plans_are_made_for() -> None:
    p = problem("causal")
    text = f"{QUICK},memory={0.9 * max(peaks(QUICK, p).values()):.5f}"
    narrow = replace(p, head_dim=32, dtype=Dtype.FLOAT32, batch=2)
    wide, small = (strategy(text).plan(each, Direction.FORWARD) for each in (p, narrow))
    assert small.problem == narrow
    assert small.tasks == wide.tasks


def test_the_report_says_how_the_cap_is_kept() -> None:
    p = problem("causal")
    cap = 0.9 * max(peaks(QUICK, p).values())
    chosen, context = strategy(f"{QUICK},memory={cap:.5f}"), context_on(cluster("h100-1x8"))
    report = chosen.strategy.report
    assert report is not None
    said = report(p, Direction.BACKWARD, chosen.options, context)["memory"]
    assert said["peak_bytes"] <= said["cap_bytes"]
    assert set(said) == {"cap_bytes", "peak_bytes", "levels", "ahead"}
