"""Gantt charts of the fastest simulated strategy of the largest problem."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from harness.cluster.presets import cluster
from harness.errors import HarnessError
from harness.page.answer import answers
from harness.page.gantt_chart import gantt_chart
from harness.page.groups import Chart
from harness.prepare.planner_context import context_on
from harness.proved.plans import proved
from harness.records.cell import CellRecord, Source
from harness.report.format import cell_heading
from harness.simulate.simulator import simulate
from strategies import strategy

_LARGEST = 64
"""Ranks of the largest run that is drawn: more take too long to plan for a page."""


def example_runs(records: Sequence[CellRecord]) -> list[Chart]:
    """Plan and simulate one problem's fastest strategy again, a chart for each direction.

    The run is that of the plan which the record rests on: where a long sequence was scaled from a
    shorter one, the shorter. Strategies that search for their plans are left out.
    """
    simulated = [e for e in records if e.ok and e.source is Source.SIMULATED]
    able = [e for e in simulated if e.config.cp <= _LARGEST and not _searches(e)]
    rows = answers(able)
    if not rows:
        return []
    largest = max(rows, key=lambda row: (row.cp, row.seqlen))
    own = [
        entry
        for entry in able
        if (entry.config.cp, entry.config.seqlen_q) == (largest.cp, largest.seqlen)
        and entry.config.pattern == largest.pattern
        and entry.label == largest.best.names[0]
    ]
    first = {entry.config.direction: entry for entry in reversed(own)}
    return [chart for entry in first.values() for chart in _drawn(entry)]


def _searches(entry: CellRecord) -> bool:
    return strategy(entry.config.strategy).strategy.report is not None


def _drawn(entry: CellRecord) -> list[Chart]:
    config = entry.config
    assert config.cluster is not None  # it is simulated
    tokens = entry.planned_tokens or config.seqlen_q
    keys = config.seqlen_kv if tokens == config.seqlen_q else tokens
    try:
        machine = cluster(config.cluster)
        problem = replace(config, seqlen_q=tokens, seqlen_kv=keys).problem
        chosen = strategy(entry.label)
        program = proved(chosen, problem, config.direction, context_on(machine))
        trace = simulate(program, machine)
    except (HarnessError, ValueError, OSError) as error:
        logging.getLogger(__name__).warning("note: no timeline is drawn: %s", error)
        return []
    heading = cell_heading(chosen.text, problem, config.direction)
    return [gantt_chart(trace, what=f"Timeline: {heading}")]
