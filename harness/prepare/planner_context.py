"""The context of planners: the machine that a plan is made for."""

from dataclasses import replace
from functools import lru_cache, partial

from harness.base.workers import cores
from harness.cluster.calibration import calibration
from harness.cluster.machine import Cluster
from harness.cluster.presets import measured
from harness.memory.ledger import ledger
from harness.plan.dependencies import resolved
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.planning.strategy import Context
from harness.records.config import Where
from harness.simulate.simulator import simulate
from harness.verify.proof import verify
from strategies import DIRECT, STRATEGIES, comparable, strategy

PROCESSES = "local-cpu"
"""The cluster for which CPU processes plan, with the cores of this machine."""


def context_for(where: Where) -> Context | None:
    """Return the context of plans that run; on GPUs that are not known it is the planner's own."""
    if where not in (Where.LOCAL, Where.GLOO):
        return None
    fitted = calibration(PROCESSES)
    return context_on(measured(replace(fitted, hardware=replace(fitted.hardware, cores=cores()))))


@lru_cache(maxsize=32)  # equal machines give one context, by which plans are remembered
def context_on(machine: Cluster) -> Context:
    """Return the context of plans for a cluster: its speeds, a simulator, others' plans."""
    return Context(
        gpus_per_node=machine.gpus_per_node,
        cluster=machine,
        evaluate=partial(_seconds, machine),
        peak_bytes=_peak_bytes,
        estimate=partial(_estimated_s, machine),
        others=partial(_planned, machine),
        rivals=_rivals,
    )


def _rivals(cp: int) -> tuple[str, ...]:
    """All strategies of attention that follow a rule, with their options."""
    return comparable(cp, {name: each for name, each in STRATEGIES.items() if name in DIRECT})


def _seconds(machine: Cluster, plan: Plan) -> float:
    return simulate(verify(plan), machine).makespan_s


def _estimated_s(machine: Cluster, plan: Plan) -> float:
    return simulate(resolved(plan), machine).makespan_s


def _peak_bytes(plan: Plan) -> int:
    return max(ledger(verify(plan)).peak_bytes)


def _planned(machine: Cluster, text: str, problem: Problem, direction: Direction) -> Plan:
    """Plan another strategy; raises as it does."""
    plain = Context(gpus_per_node=machine.gpus_per_node)
    return strategy(text).plan(problem, direction, plain)
