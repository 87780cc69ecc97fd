"""Measure the cells of a sweep: each becomes one record, whatever happens to it."""

import math
import statistics
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import psutil

from harness.base.environment import environment
from harness.base.json_fields import JsonObject
from harness.base.numbers import finite
from harness.errors import told
from harness.measure.cell import (
    RankSample,
    Refusal,
    joined_ranks,
    oracle_bytes,
    rank_job,
)
from harness.measure.peers import errors_of
from harness.peers.run import PeerRun, peer_job, refusal
from harness.plan.imbalance import imbalance_total
from harness.plan.sizes import problem_flops
from harness.planning.peers import is_peer
from harness.ranks.team import Failure, Member, Team, WorkerError
from harness.records.cell import CellRecord, Status, ended, plan_flops, utc_now
from harness.records.config import Config
from harness.sweep.limits import Limits
from strategies import strategy

LAUNCHED_JOBS: Mapping[str, Callable[..., object]] = {"cell": rank_job, "peer": peer_job}
"""Jobs that the ranks of a launch accept, by name."""
P = ParamSpec("P")
_STARTS = 2
"""Starts of a crew that may fail in a row: one worker may have been killed from outside."""
_RANK_BYTES = 2**28
"""Least memory of an idle rank; degrees that free memory cannot hold are not tried."""
T = TypeVar("T")


class Crew(Protocol):
    """Runner of the ranks of a cell: a `Team`, or the processes of a launch (see `launch`)."""

    @property
    def alive(self) -> bool:
        """Whether it can take another job."""

    def run(
        self,
        job: Callable[Concatenate[Member, P], T],
        timeout_s: float,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Run a job on every rank; see `Team.run`."""

    def close(self) -> None:
        """Let it go."""


@dataclass(frozen=True, slots=True)
class Crews:
    """Where crews come from.

    Attributes:
        start: Makes one of a degree.
        most: The largest degree; None is any.
    """

    start: Callable[[int], Crew]
    most: int | None = None


def measure_cells(
    configs: Sequence[Config], limits: Limits, crews: Crews | None = None
) -> Generator[CellRecord, None, None]:
    """Measure cells in real processes, one crew per degree.

    A cell that raises, hangs, dies or grows past its cap becomes a record with the reason, and the
    next one gets a new crew.

    Args:
        configs: Cells.
        limits: Limits of each cell.
        crews: Where ranks come from; None is a `Team` of this machine's processes.
    """
    context = environment(limits.threads)
    if crews is None:
        crews = Crews(
            lambda cp: Team(cp, threads=limits.threads, memory_bytes=limits.memory_bytes),
            most=psutil.virtual_memory().available // _RANK_BYTES,
        )
    for cp in dict.fromkeys(config.cp for config in configs):
        own = [config for config in configs if config.cp == cp]
        if crews.most is not None and cp > crews.most:
            reason = f"{cp} ranks are more than the {crews.most} that can run here"
            yield from (ended(config, Status.SKIPPED, context, reason=reason) for config in own)
        else:
            yield from _of_one_degree(own, cp, limits, crews, context)


def _of_one_degree(
    configs: Sequence[Config], cp: int, limits: Limits, crews: Crews, context: JsonObject
) -> Iterator[CellRecord]:
    crew: Crew | None = None
    failure: WorkerError | None = None
    try:
        for config in configs:
            if failure is None and (crew is None or not crew.alive):
                try:
                    crew = _started(crews, cp)
                except WorkerError as error:
                    failure = error  # others would fail as well, and starting takes long
            if failure is not None or crew is None:
                reason = f"{cp} ranks did not start: {failure}"
                detail = "" if failure is None else failure.detail
                yield ended(config, Status.ERROR, context, reason=reason, detail=detail)
            else:
                yield _measured(crew, config, limits, context)
    finally:
        if crew is not None:
            crew.close()


def _started(crews: Crews, cp: int) -> Crew:
    """Start a crew, and once more where a worker died of it; to wait in vain takes long enough.

    Raises:
        WorkerError: It did not start.
    """
    for number in range(1, _STARTS + 1):
        try:
            return crews.start(cp)
        except WorkerError as error:
            if error.kind is not Failure.ERROR or number == _STARTS:
                raise
    raise AssertionError


_KINDS = {
    Failure.ERROR: Status.ERROR,
    Failure.TIMEOUT: Status.TIMEOUT,
    Failure.OOM: Status.OOM,
}


def _measured(crew: Crew, config: Config, limits: Limits, context: JsonObject) -> CellRecord:
    run = _of_peer if is_peer(config.strategy) else _of_plan
    try:
        return run(crew, config, limits, context)
    except WorkerError as error:
        status = _KINDS[error.kind]
        return ended(config, status, context, reason=str(error), detail=error.detail)
    except Exception as error:  # the boundary of the cell: the others go on
        reason = told(error)
        detail = traceback.format_exc()
        return ended(config, Status.ERROR, context, reason=reason, detail=detail)


def _of_plan(crew: Crew, config: Config, limits: Limits, context: JsonObject) -> CellRecord:
    ranks = crew.run(rank_job, limits.timeout_s, config, limits.warmup, limits.iterations)
    samples = [rank for rank in ranks if isinstance(rank, RankSample)]
    for rank in ranks:
        if isinstance(rank, Refusal):
            return ended(config, Status.ILLEGAL, context, reason=rank.reason)
    return _judged(config, samples, limits, context)


def _of_peer(crew: Crew, config: Config, limits: Limits, context: JsonObject) -> CellRecord:
    """Measure another project's code: it has times and errors, but no plan and no ledger."""
    try:
        refused = refusal(config.strategy, config.problem)
    except ValueError as error:
        return ended(config, Status.ILLEGAL, context, reason=str(error))
    if refused is not None:
        status = Status.SKIPPED if refused.absent else Status.ILLEGAL
        return ended(config, status, context, reason=refused.reason)
    runs = crew.run(peer_job, limits.timeout_s, config, limits.warmup, limits.iterations)
    judged = oracle_bytes(config) <= limits.memory_bytes
    found, passed = errors_of(config, runs) if judged else ({}, True)
    reason = "" if passed else f"the result of {config.strategy} is off: {_told(found)}"
    flops = problem_flops(config.problem, config.direction) / config.cp
    record = _timed(config, slowest(runs), flops, context)
    return replace(
        record,
        status=Status.OK if passed else Status.ERROR,
        reason=reason if judged else _not_judged(config),
        max_rel_error=finite(found) if judged else None,
    )


def slowest(runs: Sequence[PeerRun]) -> tuple[float, ...]:
    """Per iteration, the seconds of the slowest rank."""
    return tuple(max(times) for times in zip(*(run.samples_s for run in runs), strict=True))


def _timed(
    config: Config, samples_s: tuple[float, ...], flops: float, context: JsonObject
) -> CellRecord:
    """The record of a cell that has times, before its numbers are judged."""
    median = statistics.median(samples_s)
    return CellRecord(
        config_hash=config.hash,
        config=config,
        status=Status.OK,
        time_s=median,
        samples_s=samples_s,
        p20_s=quantile(samples_s, 0.2),
        p80_s=quantile(samples_s, 0.8),
        tflops_per_gpu=flops / median / 1e12,
        environment=context,
        recorded_at=utc_now(),
    )


def _told(errors: Mapping[str, float]) -> str:
    """Errors of results in words."""
    return ", ".join(
        f"{name} by {error:.2e}" if math.isfinite(error) else f"{name} is not finite"
        for name, error in errors.items()
    )


def _not_judged(config: Config) -> str:
    return f"not judged: the oracle needs {oracle_bytes(config)} bytes, more than the cap"


def _judged(
    config: Config, samples: Sequence[RankSample], limits: Limits, context: JsonObject
) -> CellRecord:
    judged = oracle_bytes(config) <= limits.memory_bytes
    found = joined_ranks(config, samples, judged=judged)
    plan = found.plan
    reason = "" if found.passed else f"the result is off: {_told(found.max_rel_error)}"
    record = _timed(config, found.samples_s, plan_flops(plan) / config.cp, context)
    return replace(
        record,
        status=Status.OK if found.passed else Status.ERROR,
        reason=reason if judged else _not_judged(config),
        bytes_sent_per_rank=max(found.bytes_sent_per_rank, default=0),
        exposed_comm_s=found.exposed_comm_s,
        imbalance=imbalance_total(plan),
        peak_bytes=found.peak_bytes,
        peak_bytes_algorithm=found.peak_bytes_algorithm,
        max_rel_error=finite(found.max_rel_error) if judged else None,
        plan_hash=plan.hash,
        work_hash=plan.work_hash,
        resolved=strategy(config.strategy).resolved(plan.problem, config.direction).text,
    )


def quantile(samples: Sequence[float], share: float) -> float:
    """Sample quantile by linear interpolation."""
    if len(samples) == 1:
        return samples[0]
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    return cuts[round(share * 100) - 1]
