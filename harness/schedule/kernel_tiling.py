"""Kernel tiling: all transformations of a plan's tasks, chosen together."""

from collections.abc import Callable

from harness.cluster.machine import Cluster
from harness.plan.plan import Plan
from harness.schedule import batch, collectives, fuse
from harness.schedule.greedy import MOST_TRIES, Finder, Improved, improve

REPLACEMENT_FINDERS: tuple[Finder, ...] = (
    fuse.fused_tiles,
    batch.batched_transfers,
    collectives.gathered_transfers,
)


def tile_kernels(
    plan: Plan,
    cluster: Cluster,
    *,
    evaluate: Callable[[Plan], float] | None = None,
    most_tries: int = MOST_TRIES,
) -> Improved:
    """Fuse tiles, batch transfers and gather them into collectives where it pays; see `improve`."""
    return improve(plan, cluster, REPLACEMENT_FINDERS, evaluate=evaluate, most_tries=most_tries)
