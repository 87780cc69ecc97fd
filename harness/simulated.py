"""Simulate the cells of a sweep, side by side on the cores here."""

import traceback
from collections.abc import Generator, Sequence
from functools import partial

from harness.balance import imbalance_total
from harness.bounds import bounds
from harness.cell import Status, plan_flops, record
from harness.cluster import Cluster, Runtime, cluster
from harness.config import Config
from harness.environment import environment
from harness.errors import HarnessError, UnsupportedError
from harness.memory import ledger
from harness.plan import Plan, Tile, legs_of
from harness.records import Record
from harness.residency import Program
from harness.simulate import simulate
from harness.sizes import sent_bytes
from harness.strategy import Context
from harness.streams import work_of
from harness.verify import verify
from harness.workers import spread
from strategies import strategy


def simulate_cells(configs: Sequence[Config], *, jobs: int) -> Generator[Record, None, None]:
    """Simulate cells; what goes wrong in one becomes its record.

    Args:
        configs: Cells with a cluster.
        jobs: Processes side by side; 1 stays in this one.

    Yields:
        Records as they are done, not in the cells' order.
    """
    context = environment()
    work = partial(simulate_cell, context=context)
    if jobs == 1 or len(configs) <= 1:
        yield from map(work, configs)
        return
    # The dearest first, so that no long one is left alone at the end.
    ordered = sorted(configs, key=lambda config: -config.cp)
    yield from spread(work, ordered, jobs=jobs, lost=partial(_lost, context=context))


def _lost(config: Config, context: Record) -> Record:
    return record(config, Status.ERROR, context, reason="the process that simulated it died")


def simulate_cell(config: Config, context: Record) -> Record:
    """Plan, prove and simulate one cell."""
    assert config.cluster is not None  # the suite gives simulated cells one
    try:
        machine = cluster(config.cluster)
        machine.require(config.cp)
        chosen = strategy(config.strategy)
        plan = chosen.plan(
            config.problem, config.direction, Context(gpus_per_node=machine.gpus_per_node)
        )
        return simulated(verify(plan), config, machine, context)
    except (UnsupportedError, ValueError) as error:
        return record(config, Status.ILLEGAL, context, reason=str(error))
    except HarnessError as error:
        reason = f"{type(error).__name__}: {error}"
        return record(config, Status.ERROR, context, reason=reason)
    except Exception as error:  # the boundary of the cell: the others go on
        reason = f"{type(error).__name__}: {error}"
        detail = traceback.format_exc()
        return record(config, Status.ERROR, context, reason=reason, detail=detail)


def simulated(program: Program, config: Config, machine: Cluster, context: Record) -> Record:
    """Simulate a proved plan; one that does not fit the GPU's memory is `oom`, time and all."""
    plan = program.plan
    peaks = ledger(program).peak_bytes
    work = work_of(program, machine, Runtime.GRAPH)
    limits = bounds(program, machine, work=work)
    trace = simulate(program, machine, peak_memory_bytes=peaks, work=work)
    sent = [0] * config.cp
    for task in plan.tasks:
        for leg in legs_of(task):
            sent[leg.src.rank] += sent_bytes(plan, leg)
    said = trust(program, machine, trace.calibration)
    fits = max(peaks) <= machine.gpu.memory_bytes
    reason = "" if fits else f"needs {max(peaks)} bytes of {machine.gpu.memory_bytes} on a GPU"
    return record(
        config,
        Status.OK if fits else Status.OOM,
        context,
        reason=reason,
        time_s=trace.makespan_s,
        tflops_per_gpu=plan_flops(plan) / config.cp / trace.makespan_s / 1e12,
        bytes_sent_per_rank=max(sent),
        exposed_comm_s=trace.exposed_comm_max_s,
        imbalance=imbalance_total(plan),
        imbalance_lockstep=trace.imbalance_lockstep,
        peak_bytes=max(peaks),
        link_bytes=dict(trace.link_bytes),
        plan_hash=plan.hash,
        bound_s=limits.balanced_s,
        plan_bound_s=limits.bound_s,
        calibration=said["calibration"],
        calibration_id=said["calibration_id"],
        inside_range=said["inside_range"],
        expected_error=said["expected_error"],
    )


def trust(program: Program, machine: Cluster, calibration: str) -> Record:
    """Say how far to trust a simulated time: by which calibration, in its range or not, how well.

    Returns:
        `calibration`, in words, `calibration_id`, `inside_range` and `expected_error`, the share by
        which plans in the graph runtime missed their measured times; all but the first None on a
        cluster of datasheet numbers.
    """
    fitted, plan = machine.fitted, program.plan
    if fitted is None:
        return {
            "calibration": calibration,
            "calibration_id": None,
            "inside_range": None,
            "expected_error": None,
        }
    inside = plan.problem.dtype.bytes == 2  # kernels were measured in bfloat16
    for task in plan.tasks:
        if isinstance(task, Tile) and inside:
            tokens = tuple(sum(len(t[c]) for c in chunks) for t, chunks in _sides(plan, task))
            inside = fitted.inside(tokens, task.heads.bit_count(), plan.problem.head_dim)
    expected = fitted.errors.get("graph")
    known = "unknown" if expected is None else f"{expected:.0%}"
    where = "inside" if inside else "OUTSIDE"
    return {
        "calibration": f"{calibration}; {where} its range, expected error {known}",
        "calibration_id": fitted.id,
        "inside_range": inside,
        "expected_error": expected,
    }


def _sides(plan: Plan, tile: Tile) -> tuple[tuple[tuple[range, ...], tuple[int, ...]], ...]:
    return (plan.q_chunks, tile.q), (plan.kv_chunks, tile.kv)
