"""Figures of single plans and runs: they show what the plan and the trace say."""

import re

import numpy as np
import pytest

from harness.cluster.presets import cluster
from harness.page.gantt_chart import gantt_chart
from harness.page.plan_chart import bytes_between, plan_chart
from harness.plan.problem import Direction
from harness.plan.sizes import traffic
from harness.simulate.simulator import simulate
from harness.verify.proof import verify
from strategies import strategy
from tests.support import problem


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("name", ["zigzag", "ulysses", "mesh"])
def test_bytes_between_ranks_add_up_to_the_traffic_of_the_plan(name: str) -> None:
    plan = strategy(name).plan(problem("causal", cp=4, heads=(8, 4)), Direction.BACKWARD)
    between, (sent, received) = bytes_between(plan), traffic(plan)
    assert np.array_equal(between.sum(axis=1), sent)
    assert np.array_equal(between.sum(axis=0), received)


def test_a_plan_is_drawn_with_the_rank_of_each_block() -> None:
    plan = strategy("zigzag").plan(problem("causal", cp=2), Direction.FORWARD)
    shown = texts(plan_chart(plan, what="zigzag").svg)
    assert "sender" in shown
    # chunks 0 and 3 are rank 0's, 1 and 2 rank 1's: ten blocks of a causal 4 x 4
    blocks = [text for text in shown if text in ("0", "1")]
    assert blocks.count("0") >= 5
    assert blocks.count("1") >= 5


def test_a_timeline_begins_with_the_rank_that_ends_last() -> None:
    machine = cluster("h100-8x8")
    program = verify(strategy("ring").plan(problem("causal", cp=4), Direction.FORWARD))
    trace = simulate(program, machine)
    last = max(trace.spans, key=lambda span: span.end_s).rank
    chart = gantt_chart(trace, what="a run", ranks=2)
    rows = [text for text in texts(chart.svg) if text.startswith("rank ")]
    assert rows[0] == f"rank {last} compute"
    assert len({row.split()[1] for row in rows}) == 2
    assert "simulated on h100-8x8" in chart.note.lower()


def test_a_timeline_draws_nothing_but_its_bars() -> None:
    program = verify(strategy("ring").plan(problem("causal", cp=3), Direction.FORWARD))
    svg = gantt_chart(simulate(program, cluster("h100-8x8"))).svg
    closed = [path for path in re.findall(r' d="([^"]*)"', svg) if path.strip().endswith("z")]
    flat = [path for path in closed if len(set(re.findall(r"[ML] \S+ (\S+)", path))) == 1]
    assert closed
    assert not flat


@pytest.mark.parametrize(("name", "shares"), [("ring", False), ("usp:ulysses=2", True)])
def test_a_picture_explains_blocks_that_several_ranks_share(name: str, *, shares: bool) -> None:
    plan = strategy(name).plan(problem("causal", cp=4, heads=(8, 4)), Direction.FORWARD)
    title = next(text for text in texts(plan_chart(plan, what="p").svg) if "rank of each" in text)
    assert ("+: several" in title) == shares
