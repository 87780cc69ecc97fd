"""What `plan` says of a planner that searches: by which rule, on what, and whose plan it is."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from harness.cluster.presets import cluster
from harness.commands.plan_levels import level_lines
from harness.plan.problem import Direction, Dtype, Problem
from harness.planning.strategy import Context
from harness.prepare.planner_context import context_on
from patterns import make_pattern
from strategies import strategy

FORWARD, BACKWARD = Direction


def causal(cp: int, tokens: int = 1027) -> Problem:
    return Problem(
        pattern=make_pattern("causal", tokens), heads_q=6, heads_kv=2, head_dim=128, cp=cp
    )


def report(
    text: str, p: Problem, direction: Direction = FORWARD, context: Context | None = None
) -> Mapping[str, Any]:
    chosen = strategy(text)
    assert chosen.strategy.report is not None
    return chosen.strategy.report(p, direction, chosen.options, context or Context())


def said(levels: Mapping[str, Any], direction: Direction = FORWARD) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in level_lines(levels, direction).splitlines():
        found.setdefault(line[:13].strip(), []).append(line[14:])
    return found


@pytest.mark.parametrize(
    ("name", "direction", "counts", "brief"),
    [
        (
            "ultraattn-paper",
            FORWARD,
            "Q 1, K and V 0.75, partial out 1 (as the paper counts",
            "by the paper's counts, diagonal fixed, slack half a block",
        ),
        (
            "ultraattn-paper",
            BACKWARD,
            "Q and dO 2, K and V 0.75, partial dQ 1, dK and dV 0.75 (as the paper counts",
            "by the paper's counts, diagonal fixed, slack half a block",
        ),
    ],
)
def test_a_tiling_names_its_rule(name: str, direction: Direction, counts: str, brief: str) -> None:
    """Two of six heads: K and V of a chunk are 2 x 2/6 of its Q, to a quarter 0.75."""
    found = said(report(f"{name}:seconds=0.02", causal(8), direction), direction)
    (devices,) = found["devices"]
    (chunks,) = found["chunks"]
    assert devices.endswith(f"; {brief}")
    assert counts in chunks
    assert "nodes" not in found  # one of them: nothing to share out


def test_chunks_and_times_are_of_the_problem_that_plans_are_made_for() -> None:
    other = replace(causal(4), head_dim=64, batch=3, dtype=Dtype.FLOAT32)
    one, two = (report("ultraattn-paper:seconds=0.02", p) for p in (causal(4), other))
    assert one["device"] == two["device"]
    assert one["made_for"] == "bfloat16, head_dim 128, batch 1"
    (line,) = said(two)["planned as"]
    assert line.startswith("for bfloat16, head_dim 128, batch 1, to which times and chunks above")


@pytest.mark.parametrize(
    ("levels", "line"),
    [
        ("none", "not searched (levels=none): blocks at their rows' owners"),
        ("kernel", "not searched (levels=kernel): blocks at their rows' owners"),
    ],
)
def test_what_was_not_searched_is_not_said_to_be_lacking(levels: str, line: str) -> None:
    found = said(report(f"ultraattn:levels={levels}", causal(3)))
    assert found["tilings"] == [line]
    assert len(found["timeline"]) == 1


def test_a_search_that_found_nothing_better_says_so() -> None:
    """The very same plan, had its levels been on."""
    levels = {**report("ultraattn:levels=none", causal(3)), "on": "all"}
    assert said(levels)["tilings"] == [
        "none found that beats computing blocks at their rows' owners"
    ]


@pytest.mark.parametrize("pattern", ["full", "global_local"])
def test_candidates_say_whose_plan_it_is_and_what_both_take(pattern: str) -> None:
    machine = cluster("h100-8x8")
    p = Problem(pattern=make_pattern(pattern, 8192), heads_q=8, heads_kv=8, head_dim=128, cp=8)
    levels = report("ultraattn:seconds=0.02,candidates=true", p, FORWARD, context_on(machine))
    (line,) = said(levels)["taken"]
    times, other = levels["candidates_s"], levels["fallback"]
    own = f"{times['ultraattn'] * 1e3:.3f} ms"
    if other:
        assert line == f"{other}'s plan, simulated {times[other] * 1e3:.3f} ms; own plan {own}"
        assert "timeline" not in said(levels)  # its time is no timeline's
    else:
        assert line.startswith(f"own plan, simulated {own}; the fastest other is ")
        assert "timeline" in said(levels)


def test_the_cluster_is_named_and_what_the_timeline_does_not_know() -> None:
    for name, knows in (("h100-8x8", False), ("h100-hamming", True)):
        levels = report("ultraattn:levels=none", causal(3), FORWARD, context_on(cluster(name)))
        found = said(levels)
        assert found["planned for"] == [f"{name}, 8 GPUs a node"]
        (line,) = found["timeline"]
        assert re.match(rf"\d+\.\d{{3}} ms by the planner's own timeline on {name}", line)
        assert ("without the calibration's further effects" in line) == knows
    few = said(report("ultraattn:levels=none", causal(6), FORWARD, Context(gpus_per_node=3)))
    assert few["planned for"] == ["h100-hamming, 3 GPUs a node"]


def test_numbers_have_two_decimals_at_most_and_slack_is_told() -> None:
    levels = dict(report("ultraattn-paper:seconds=0.02", causal(8)))
    (each,) = levels["device"]
    rule = {**each["rule"], "slack_blocks": 1 / 128, "inside": True, "diagonal_fixed": False}
    levels["device"] = [{**each, "value": 10.2692, "bound": 9.996, "rule": rule}]
    (line,) = said(levels)["devices"]
    assert "at most 10.27 chunks, bound 10," in line
    assert line.endswith(
        "by the paper's counts, with what moves inside nodes at its speed, diagonal free, "
        "slack 0.0078 blocks"
    )
    owners = {**each["rule"], "slack_blocks": None}
    levels["device"] = [{**each, "rule": owners}]
    assert said(levels)["devices"][0].endswith("diagonal fixed, loads not capped")


def test_strategies_that_do_not_search_say_nothing() -> None:
    assert level_lines({}, FORWARD) == ""
