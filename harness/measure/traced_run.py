"""One measured run as a trace: cells of a sweep that someone wants to look at."""

from dataclasses import dataclass

from harness.base.environment import cpu_model
from harness.measure.cell import RankSample, program_of_cell, rank_job
from harness.measure.cells import Crew
from harness.memory.ledger import ledger
from harness.plan.problem import Direction
from harness.plan.sizes import tile_flops
from harness.plan.tasks import Tile
from harness.prepare.verified_plans import planned_for
from harness.records.config import Config
from harness.simulate.trace import Trace, measured_trace

MOST_FLOPS = 2e12
"""Of all ranks; a core here does a few 10 GFLOP/s, so more would take minutes."""

_WARMUP = 2


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace, and the figures that a record of the same run has.

    Attributes:
        trace: The trace, of all ranks.
        exposed_comm_s: The longest wait for transfers of any rank, seconds.
        bytes_sent_per_rank: The most of any rank, counted at the transport.
    """

    trace: Trace
    exposed_comm_s: float
    bytes_sent_per_rank: int


def traced(config: Config, crew: Crew, timeout_s: float) -> Traced:
    """Run a cell once, after a warm-up, and say when each rank did what.

    Args:
        config: The cell to run.
        crew: Its ranks, on one machine: they share a clock.
        timeout_s: How long it may take, seconds.

    Raises:
        UnsupportedError: The strategy cannot do it.
        ValueError: It is too large to be run here.
        WorkerError: A rank failed.
    """
    plans = planned_for(config)
    program = plans.forward if config.direction is Direction.FORWARD else plans.backward
    plan = program.plan
    flops = sum(tile_flops(plan, task) for task in plan.tasks if isinstance(task, Tile))
    if flops > MOST_FLOPS:
        raise ValueError(
            f"--measured runs on this machine; {flops:.1e} flops must be at most {MOST_FLOPS:.0e}: "
            "take fewer tokens or heads"
        )
    answers = crew.run(rank_job, timeout_s, config, _WARMUP, 1)
    ranks = [answer for answer in answers if isinstance(answer, RankSample)]
    assert len(ranks) == len(answers)  # planned above, so no rank refuses
    trace = measured_trace(
        program_of_cell(config, ranks[0]),
        [span for rank in ranks for span in rank.spans],
        f"{config.transport.value} processes on {cpu_model()}",
        ledger(program_of_cell(config, ranks[0])).peak_bytes,
    )
    return Traced(
        trace,
        exposed_comm_s=max(rank.waited_s for rank in ranks),
        bytes_sent_per_rank=max(rank.sent_bytes for rank in ranks),
    )
