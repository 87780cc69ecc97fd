"""Measure the cells of a sweep: each becomes one record, whatever happens to it."""

import statistics
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.balance import imbalance_total
from harness.cell import Status, plan_flops, record
from harness.config import Config
from harness.environment import environment
from harness.errors import HarnessError, UnsupportedError
from harness.measure import ITERATIONS, WARMUP, joined, rank_job
from harness.plan import Plan
from harness.planned import planned
from harness.pool import Failure, Team, WorkerError
from harness.problem import Direction
from harness.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a measured cell may use.

    Attributes:
        timeout_s: Seconds, planning included.
        memory_bytes: Resident memory of one rank.
        threads: Threads of one rank.
        warmup: Iterations that do not count.
        iterations: Iterations that do.
    """

    timeout_s: float = 120.0
    memory_bytes: int = 4 * 2**30
    threads: int = 1
    warmup: int = WARMUP
    iterations: int = ITERATIONS


def measure_cells(configs: Sequence[Config], limits: Limits) -> Iterator[Record]:
    """Measure cells in teams of real processes, one team per degree.

    A cell that raises, hangs, dies or grows past its cap becomes a record with the reason, and the
    next one gets a new team.
    """
    context = environment(limits.threads)
    for cp in dict.fromkeys(config.cp for config in configs):
        team: Team | None = None
        try:
            for config in configs:
                if config.cp != cp:
                    continue
                reason = refusal(config)
                if reason is not None:
                    yield record(config, Status.ILLEGAL, context, reason=reason)
                    continue
                if team is None or not team.alive:
                    team = Team(cp, threads=limits.threads, memory_bytes=limits.memory_bytes)
                yield _measured(team, config, limits, context)
        finally:
            if team is not None:
                team.close()


def refusal(config: Config) -> str | None:
    """Why a cell is illegal, or None; a wrong plan is an error, not a refusal.

    Raises:
        PlanError: A strategy made a wrong plan.
    """
    try:
        planned(config.problem, config.strategy)
    except (UnsupportedError, ValueError) as error:
        return str(error)
    return None


_KINDS = {
    Failure.ERROR: Status.ERROR,
    Failure.TIMEOUT: Status.TIMEOUT,
    Failure.OOM: Status.OOM,
}


def _measured(team: Team, config: Config, limits: Limits, context: dict[str, object]) -> Record:
    try:
        ranks = team.run(rank_job, limits.timeout_s, config, limits.warmup, limits.iterations)
        found = joined(config, ranks)
    except WorkerError as error:
        status = _KINDS[error.kind]
        return record(config, status, context, reason=str(error), detail=error.detail)
    except (HarnessError, ValueError) as error:
        return record(
            config, Status.ERROR, context, reason=str(error), detail=traceback.format_exc()
        )
    plan = plan_of(config)
    low, high = quantile(found.samples_s, 0.2), quantile(found.samples_s, 0.8)
    wrong = "" if found.passed else f"the result is off: {dict(found.max_rel_error)}"
    return record(
        config,
        Status.OK if found.passed else Status.ERROR,
        context,
        reason=wrong,
        time_s=found.time_s,
        samples_s=list(found.samples_s),
        p20_s=low,
        p80_s=high,
        tflops_per_gpu=plan_flops(plan) / config.cp / found.time_s / 1e12,
        bytes_sent_per_rank=max(found.bytes_sent_per_rank, default=0),
        exposed_comm_s=found.exposed_comm_s,
        imbalance=imbalance_total(plan),
        peak_bytes=found.peak_bytes,
        max_rel_error=dict(found.max_rel_error),
        plan_hash=plan.hash,
    )


def plan_of(config: Config) -> Plan:
    """The plan that a cell runs."""
    both = planned(config.problem, config.strategy)
    return (both.forward if config.direction is Direction.FORWARD else both.backward).plan


def quantile(samples: Sequence[float], share: float) -> float:
    """Sample quantile by linear interpolation."""
    if len(samples) == 1:
        return samples[0]
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return cuts[round(share * 100) - 1]


def pending(configs: Sequence[Config], records: Sequence[Record]) -> list[Config]:
    """Cells that have no record yet, or one that failed and is worth another try."""
    done = {
        entry["config_hash"] for entry in records if entry["status"] in (Status.OK, Status.ILLEGAL)
    }
    return [config for config in configs if config.hash not in done]


def latest(records: Sequence[Record]) -> list[Record]:
    """Keep the last record of each cell, in the order of their first."""
    newest: dict[object, Record] = {}
    for entry in records:
        newest[entry["config_hash"]] = entry
    return list(newest.values())


def in_order(configs: Sequence[Config], records: Sequence[Record]) -> list[Record]:
    """Records of these cells, in the cells' order."""
    by_hash = {entry["config_hash"]: entry for entry in latest(records)}
    return [by_hash[config.hash] for config in configs if config.hash in by_hash]
