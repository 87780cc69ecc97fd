"""Simulate the cells of a sweep, side by side on the cores here."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from harness.balance import imbalance_total
from harness.bounds import bounds
from harness.cell import Status, plan_flops, record
from harness.cluster import Cluster, cluster
from harness.config import Config
from harness.environment import environment
from harness.errors import HarnessError, UnsupportedError
from harness.memory import ledger
from harness.plan import legs_of
from harness.records import Record
from harness.residency import Program
from harness.simulate import simulate
from harness.sizes import leg_bytes
from harness.strategy import Context
from harness.verify import verify
from strategies import strategy


def simulate_cells(configs: Sequence[Config], *, jobs: int) -> Iterator[Record]:
    """Simulate cells; what goes wrong in one becomes its record.

    Args:
        configs: Cells with a cluster.
        jobs: Processes side by side; 1 stays in this one.

    Yields:
        Records as they are done, not in the cells' order.
    """
    context = environment()
    if jobs == 1 or len(configs) == 1:
        for config in configs:
            yield simulate_cell(config, context)
        return
    # The dearest first, so that no long one is left alone at the end.
    ordered = sorted(configs, key=lambda config: -config.cp)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as executor:
        futures = [executor.submit(simulate_cell, config, context) for config in ordered]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


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


def simulated(program: Program, config: Config, machine: Cluster, context: Record) -> Record:
    """Simulate a proved plan; one that does not fit the GPU's memory is `oom`, time and all."""
    plan = program.plan
    peaks = ledger(program).peak_bytes
    trace = simulate(program, machine, peak_memory_bytes=peaks)
    limits = bounds(program, machine)
    sent = [0] * config.cp
    for task in plan.tasks:
        for leg in legs_of(task):
            sent[leg.src.rank] += leg_bytes(plan, leg)
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
        calibration=trace.calibration,
    )
