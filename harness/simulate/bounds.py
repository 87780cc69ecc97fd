"""Lower bounds on the time of a plan, and of any plan, on a cluster.

Of any plan of a problem: all attention flops at the kernels' stated efficiency, spread evenly over
the ranks (`problem_bound_s`). No strategy can be faster on this cluster model, whatever it moves.

Of one plan, whatever the order of its tasks: the fullest compute stream, the fullest port of each
link class, and the longest chain of tasks that wait for one another. Also its serial time, which
no simulated run exceeds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import require
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.sizes import problem_flops, tile_flops
from harness.plan.tasks import Tile
from harness.simulate.contention import Job
from harness.simulate.queues import Stream, stream_of
from harness.simulate.streams import Work, work_of
from harness.simulate.task_costs import costs_on


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Times, in seconds, that no run of a plan on a cluster beats.

    Attributes:
        balanced_s: Attention flops of all ranks, evenly spread; the same for every plan.
        compute_s: Everything on the compute stream of the rank that has most of it.
        links_s: Per kind of port, everything on the port that has most of it, latencies included.
        critical_path_s: The longest chain of tasks, each waiting for the one before.
        serial_s: One task after another, all ranks in turn: an upper bound.
    """

    balanced_s: float
    compute_s: float
    links_s: Mapping[Stream, float]
    critical_path_s: float
    serial_s: float

    @property
    def bound_s(self) -> float:
        """The greatest lower bound."""
        return max(self.balanced_s, self.compute_s, self.critical_path_s, *self.links_s.values())


def bounds(
    program: Program,
    cluster: Cluster,
    runtime: Runtime = Runtime.GRAPH,
    work: Work | None = None,
) -> Bounds:
    """Bound a plan's time from below, and from above by its serial time.

    Args:
        program: A verified, resolved plan.
        cluster: Where it would run.
        runtime: Whether each launch costs host time.
        work: What `work_of` made of the same arguments, if the caller has it; before `simulate`
            adds edges to it.

    Raises:
        UnsupportedError: The plan has more ranks than the cluster has GPUs.
    """
    plan = program.plan
    if work is None:
        work = work_of(program, cluster, runtime)
    fullest: dict[Stream, float] = {}
    for number, seconds in _loads((a.streams, a.seconds) for a in work.activities).items():
        stream = stream_of(number)[1]
        fullest[stream] = max(fullest.get(stream, 0.0), seconds)
    tiles = (task for task in plan.tasks if isinstance(task, Tile))
    flops = sum(tile_flops(plan, tile) for tile in tiles if tile.direction is plan.direction)
    host = sum(launch.end_s - launch.start_s for launch in work.launches)
    chained = (
        (after, activity.seconds, activity.release_s)
        for activity, after in zip(work.activities, work.after, strict=True)
    )
    return Bounds(
        balanced_s=costs_on(program, cluster).attention_s(flops) / plan.problem.cp,
        compute_s=fullest.pop(Stream.COMPUTE, 0.0),
        links_s=fullest,
        critical_path_s=max(_chain_ends(chained), default=0.0),
        serial_s=host + sum(activity.seconds for activity in work.activities),
    )


def problem_bound_s(problem: Problem, direction: Direction, cluster: Cluster) -> float:
    """Bound the time of every plan of a problem: all attention flops, evenly spread.

    Raises:
        UnsupportedError: The problem has more ranks than the cluster has GPUs.
    """
    require(cluster, problem.cp)
    speed = cluster.gpu.attention_flops_per_s(problem.dtype, direction)
    return problem_flops(problem, direction) / speed / problem.cp


def jobs_bound_s(jobs: Sequence[Job]) -> float:
    """Bound the time of priced jobs: the fullest queue, or the longest chain of those that wait.

    Each job counts as if nothing slowed it down; when hosts launch does not count.
    """
    least = [min(job.seconds) for job in jobs]
    loads = _loads(zip((job.queues for job in jobs), least, strict=True))
    chains = _chain_ends((job.after, s, 0.0) for job, s in zip(jobs, least, strict=True))
    return max([*loads.values(), *chains], default=0.0)


def _loads(parts: Iterable[tuple[Sequence[int], float]]) -> dict[int, float]:
    """Per queue, the seconds of all parts that hold it."""
    loads: dict[int, float] = {}
    for queues, seconds in parts:
        for queue in queues:
            loads[queue] = loads.get(queue, 0.0) + seconds
    return loads


def _chain_ends(parts: Iterable[tuple[Sequence[int], float, float]]) -> list[float]:
    """End of each part if no queue is ever taken: (dependencies, seconds, release)."""
    ends: list[float] = []
    for after, seconds, release_s in parts:
        start = max((ends[earlier] for earlier in after), default=0.0)
        ends.append(max(start, release_s) + seconds)
    return ends
