"""The strategy `auto`: rank 0 chooses, and tells the others."""

import torch.distributed as dist

from harness.attention.agreement import Word, compare_calls, digest_of, told_by_first
from harness.cluster.machine import Cluster
from harness.cluster.presets import DEFAULT_CLUSTER, cluster
from harness.plan.problem import Problem, spelled
from harness.planning.strategy import Context
from harness.prepare.planner_context import context_for
from harness.recommend.automatic import automatic
from harness.records.config import Where


def chosen_by_first(group: dist.ProcessGroup | None, problem: Problem, context: Context) -> str:
    """Return the strategy that rank 0 recommends. A collective.

    It is recommended for the cluster of the context; where there is none, for CPU processes of this
    machine if the group moves no CUDA tensors, else for the default cluster.

    Args:
        group: The ranks; None = this process is alone.
        problem: The problem, as every rank has it.
        context: Facts of the cluster for the planner.

    Raises:
        UnsupportedError: Nothing runs, or no cluster has so many GPUs; on every rank.
        PlanError: Ranks ask for different problems.
    """
    asked = ((name, str(value)) for name, value in spelled(problem).items())
    facts = (("call", "a strategy for all ranks"), *asked)
    compare_calls(group, Word.CHOOSE, facts, digest_of(facts))
    return told_by_first(group, lambda: automatic(problem, *_machine(group, context)))


def _machine(group: dist.ProcessGroup | None, context: Context) -> tuple[Cluster, str]:
    """Where the ranks are, and its name."""
    found = context.cluster
    if found is None and (group is None or "cuda" not in dist.get_backend_config(group)):
        here = context_for(Where.GLOO)
        found = None if here is None else here.cluster
    found = found or cluster(DEFAULT_CLUSTER)
    return found, found.name
