"""What plans are made for: the machine, and what a call says after tokens were dealt."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.cluster.machine import Cluster
from harness.cluster.presets import cluster
from harness.plan.problem import Dtype, Problem
from harness.planning.strategy import Context

USUAL: Mapping[str, Any] = {
    "head_dim": 128,
    "head_dim_v": 128,
    "batch": 1,
    "dtype": Dtype.BFLOAT16,
    "round_sent": False,
    "hidden": None,
    "rotary": None,
}
"""Precision, width and batch that plans are made for; reports give seconds for these."""

MADE_FOR = "bfloat16, head_dim 128, batch 1"
"""The same in words."""


def machine_of(problem: Problem, context: Context) -> Cluster:
    """Return the cluster, or the default one, with as many nodes as the ranks need."""
    base = context.cluster or cluster()
    per_node = context.gpus_per_node
    nodes = max(-(-problem.cp // per_node), 1)
    return base if context.cluster else replace(base, gpus_per_node=per_node, nodes=nodes)


def nodes_and_gpus(cp: int, gpus_per_node: int) -> tuple[int, int]:
    """Split cp ranks into equal nodes of at most `gpus_per_node` neighbours."""
    gpus = max(size for size in range(1, min(cp, gpus_per_node) + 1) if cp % size == 0)
    return cp // gpus, gpus
