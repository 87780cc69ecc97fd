"""Simulate the cells of a sweep, side by side on the cores here."""

import hashlib
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness.base.cache import cache_folder, keep, kept_by_this_code
from harness.base.environment import environment
from harness.base.json_fields import JsonObject, json_text, parsed
from harness.base.time_limit import OverTime, time_limit
from harness.base.workers import spread
from harness.cluster.calibration import Calibration
from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import cluster, require
from harness.errors import HarnessError, RecordError, UnsupportedError, told
from harness.memory.counting import ALGORITHM
from harness.memory.ledger import ledger
from harness.plan.imbalance import imbalance_total
from harness.plan.residency import Program, without_collection
from harness.plan.sizes import problem_flops, traffic
from harness.prepare.planner_context import context_on
from harness.prepare.scalable_plan import Structure, planned_at, searches
from harness.prepare.scalable_plan_cache import structure_of
from harness.proved.plans import proved
from harness.records.cell import CellRecord, Status, ended, from_json, plan_flops, utc_now
from harness.records.config import Config
from harness.simulate.bounds import any_plan_bound, bounds, problem_bound_s
from harness.simulate.calibrated import full_clock, predict, pricer
from harness.simulate.simulator import simulate
from harness.simulate.streams import work_of
from harness.simulate.tile_calls import calls_on
from strategies import strategy

Structures = dict[object, Structure]
"""Structures planned so far, by the values that decide them."""


def simulate_cells(
    configs: Sequence[Config],
    *,
    jobs: int,
    timeout_s: float | None = None,
    machine: Cluster | None = None,
) -> Generator[CellRecord, None, None]:
    """Simulate cells; what goes wrong in one becomes its record.

    Cells that differ only in what a plan does not depend on are one piece of work: see `structure`.

    Args:
        configs: Cells with a cluster.
        jobs: Processes side by side; 1 stays in this one.
        timeout_s: Seconds of a cell, planning included; None = no limit.
        machine: The cluster of all cells; None = each names its own.

    Yields:
        Records as they are done, not in the cells' order.
    """
    context = environment()
    groups: dict[Config, list[Config]] = {}
    for config in configs:
        groups.setdefault(_alike(config), []).append(config)
    work = partial(_simulate_group, context=context, timeout_s=timeout_s, machine=machine)
    if jobs == 1 or len(groups) <= 1:
        for group in groups.values():
            yield from work(group)
        return
    # The dearest first, so that no long one is left alone at the end.
    ordered = sorted(groups.values(), key=lambda group: -group[0].cp)
    for records in spread(work, ordered, jobs=jobs, lost=partial(_lost, context=context)):
        yield from records


def _alike(config: Config) -> Config:
    """Key that cells with one plan share; a cell that cannot be planned has its own."""
    try:
        return replace(planned_at(config), cluster=None)
    except ValueError:
        return config


def _lost(group: Sequence[Config], context: JsonObject) -> list[CellRecord]:
    reason = "the process that simulated it died"
    return [ended(config, Status.ERROR, context, reason=reason) for config in group]


def _simulate_group(
    group: Sequence[Config],
    context: JsonObject,
    timeout_s: float | None,
    machine: Cluster | None,
) -> list[CellRecord]:
    known: Structures = {}
    return [_in_time(config, context, known, timeout_s, machine) for config in group]


def _in_time(
    config: Config,
    context: JsonObject,
    known: Structures,
    timeout_s: float | None,
    machine: Cluster | None,
) -> CellRecord:
    """Simulate one cell, or record that its time is over."""
    try:
        with time_limit(timeout_s):
            return simulate_cell(config, context, known, machine=machine)
    except OverTime:
        reason = f"not done after {timeout_s:g} s; give it more with --timeout"
        return ended(config, Status.TIMEOUT, context, reason=reason)


def simulate_cell(
    config: Config,
    context: JsonObject,
    known: Structures | None = None,
    folder: Path | None = None,
    machine: Cluster | None = None,
) -> CellRecord:
    """Plan, prove and simulate one cell.

    Args:
        config: The cell, with a cluster.
        context: The environment, for the record.
        known: Structures that earlier cells have made; gets this one's.
        folder: Where answers and structures are kept; the user's cache by default.
        machine: Its cluster; None = the one that it names.
    """
    assert config.cluster is not None  # the suite gives simulated cells one
    known = {} if known is None else known
    kept = folder or cache_folder() / "structures"
    try:
        machine = machine or cluster(config.cluster)
        require(machine, config.cp)
        chosen, node = strategy(config.strategy), context_on(machine)
        resolved = chosen.resolved(config.problem, config.direction, node).text
        fitted = full_clock(machine)
        with without_collection():
            if fitted is not None:
                found = predicted(config, machine, fitted, context, known, kept)
            else:
                found = simulated_once(config, machine, context, kept)
    except RecordError as error:  # it was planned, and came to what no record can have
        return ended(config, Status.ERROR, context, reason=f"its {error}")
    except (UnsupportedError, ValueError) as error:
        return ended(config, Status.ILLEGAL, context, reason=str(error))
    except HarnessError as error:
        return ended(config, Status.ERROR, context, reason=told(error))
    except Exception as error:  # the boundary of the cell: the others go on
        reason = told(error)
        detail = traceback.format_exc()
        return ended(config, Status.ERROR, context, reason=reason, detail=detail)
    return replace(found, resolved=resolved)


def simulated_once(
    config: Config, machine: Cluster, context: JsonObject, folder: Path
) -> CellRecord:
    """Plan, prove and simulate a cell on datasheet numbers, or read what an earlier run found.

    Raises:
        UnsupportedError: The strategy cannot do this problem.
    """

    def make() -> CellRecord:
        chosen, node = strategy(config.strategy), context_on(machine)
        return simulated(
            proved(chosen, config.problem, config.direction, node), config, machine, {}
        )

    return replace(_kept(config, machine, folder, make), environment=context)


def simulated(
    program: Program, config: Config, machine: Cluster, context: JsonObject
) -> CellRecord:
    """Simulate a proved plan on datasheet numbers; what does not fit a GPU is `oom`."""
    plan = program.plan
    peaks = ledger(program).peak_bytes
    runtime = config.runtime or Runtime.GRAPH
    work = work_of(program, machine, runtime)
    limits = bounds(program, machine, runtime, work)
    trace = simulate(program, machine, runtime=runtime, peak_memory_bytes=peaks, work=work)
    sent, _ = traffic(plan)
    status, reason = _fits(max(peaks), machine)
    return CellRecord(
        config_hash=config.hash,
        config=config,
        status=status,
        reason=reason,
        time_s=trace.makespan_s,
        tflops_per_gpu=plan_flops(plan) / config.cp / trace.makespan_s / 1e12,
        bytes_sent_per_rank=max(sent),
        exposed_comm_s=trace.exposed_comm_max_s,
        imbalance=imbalance_total(plan),
        imbalance_lockstep=trace.imbalance_lockstep,
        peak_bytes=max(peaks),
        peak_bytes_algorithm=max(ledger(program, ALGORITHM).peak_bytes),
        link_bytes=dict(trace.link_bytes),
        plan_hash=plan.hash,
        planned_tokens=config.seqlen_q,
        work_hash=plan.work_hash,
        bound_s=limits.balanced_s,
        plan_bound_s=limits.bound_s,
        any_plan_bound_s=any_plan_bound(plan.problem, plan.direction, machine).bound_s,
        calibration=trace.calibration,
        environment=context,
        recorded_at=utc_now(),
    )


def predicted(
    config: Config,
    machine: Cluster,
    fitted: Calibration,
    context: JsonObject,
    known: Structures,
    folder: Path,
) -> CellRecord:
    """Predict a cell on a calibrated cluster, with all effects; what does not fit is `oom`."""
    make = partial(_predict, config, machine, fitted, known, folder)
    return replace(_kept(config, machine, folder, make), environment=context)


def _kept(
    config: Config, machine: Cluster, folder: Path, make: Callable[[], CellRecord]
) -> CellRecord:
    """Read the record of a cell that an earlier run kept, or make it and keep it."""
    name = f"{_answer_key(config, machine)}.json"
    found = kept_by_this_code(folder, name, lambda kept: from_json(parsed(kept)))
    if found is None:
        found = make()
        keep(folder, name, json_text(found.as_json()).encode())
    return replace(found, recorded_at=utc_now())


def _answer_key(config: Config, machine: Cluster) -> str:
    """Of all that decides a predicted cell: itself, and every parameter of the cluster."""
    return hashlib.sha256(repr((config.hash, machine)).encode()).hexdigest()[:24]


def _predict(
    config: Config, machine: Cluster, fitted: Calibration, known: Structures, folder: Path
) -> CellRecord:
    """The record of a predicted cell, without where and when."""
    small = planned_at(config)
    key = (
        (small if searches(small) else replace(small, cluster=None)).hash,  # files may change
        fitted.hardware.gpus_per_node,
        fitted.hardware.cores is None,
        calls_on(fitted),
    )
    if key not in known:
        known[key] = structure_of(small, fitted, folder)
    made = known[key].at(config.seqlen_q)
    direction = config.direction
    rounded = strategy(config.strategy).common.round_sent
    problem = replace(config.problem, round_sent=rounded)
    runtime = config.runtime or Runtime.GRAPH
    prices = pricer(
        problem,
        direction,
        fitted,
        eager=runtime.eager,
        own_stream=runtime.own_stream,
        scale=config.seqlen_q / made.tokens,
    )
    said = predict(made.shape, problem, prices)
    status, reason = _fits(made.peak_bytes, machine)
    balanced_s = problem_bound_s(problem, direction, machine)
    return CellRecord(
        config_hash=config.hash,
        config=config,
        status=status,
        reason=reason,
        time_s=said.time_s,
        tflops_per_gpu=problem_flops(problem, direction) / config.cp / said.time_s / 1e12,
        bytes_sent_per_rank=made.sent_bytes,
        exposed_comm_s=said.exposed_s,
        imbalance=made.imbalance,
        imbalance_lockstep=made.imbalance_lockstep,
        peak_bytes=made.peak_bytes,
        peak_bytes_algorithm=made.peak_bytes_algorithm,
        link_bytes=dict(made.link_bytes),
        plan_hash=made.plan_hash,
        work_hash=made.work_hash,
        planned_tokens=made.tokens,
        bound_s=balanced_s,
        plan_bound_s=max(balanced_s, said.bound_s),
        any_plan_bound_s=any_plan_bound(problem, direction, machine).bound_s,
        calibration=said.trust.text,
        calibration_id=said.trust.calibration_id,
        inside_range=said.trust.inside,
        expected_error=said.trust.expected_error,
        expected_error_p90=said.trust.p90,
        environment={},
        recorded_at=utc_now(),
    )


def _fits(peak_bytes: int, machine: Cluster) -> tuple[Status, str]:
    reason = machine.shortage(peak_bytes)
    return (Status.OOM if reason else Status.OK), reason
