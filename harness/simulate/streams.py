"""Streams: which parts of a plan use which resource, and what each waits for.

A plan is broken into activities: a compute task is one, every leg of a transfer or collective is
one. An activity holds its streams for its whole duration: compute its rank's compute stream, a leg
the source's outgoing and the destination's incoming port of the link class that it crosses. So
sends, receives and kernels of a rank overlap, but each port carries one leg at a time.

    rank 0  compute    [ tile 0·0 ][ tile 0·1 ]      a leg from rank 0 to rank 1 holds
            nvlink_out [ leg 0→1 ]                   both of these ports
    rank 1  nvlink_in  [ leg 0→1 ]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import require
from harness.plan.plan import Plan
from harness.plan.residency import Program
from harness.plan.tasks import Collective, Leg, Transfer, ranks_of
from harness.simulate.queues import Stream, number_of, queues_between, stream_of
from harness.simulate.task_costs import TaskCosts, costs_on

IssueOrder = Sequence[Sequence[int]]
"""Per rank, the ids of its tasks in the order in which it issues them."""


class Dispatch(StrEnum):
    """Which of its tasks a free stream begins.

    IN_ORDER runs each stream first in, first out in the order of issue, as CUDA streams do. Starts
    are then longest paths in a fixed graph, so no task gets later when anything gets faster.
    GREEDY is list scheduling: whichever ready task comes first, transfers before kernels. It never
    leaves a stream idle while a task could run on it, and so is subject to Graham's anomalies: a
    faster link can make the whole run longer.
    """

    IN_ORDER = "in-order"
    GREEDY = "greedy"


class Activity(NamedTuple):
    """A part of a task that holds its streams without a break.

    Attributes:
        task: The task's id.
        streams: Numbers of the streams that it holds (see `queues`); none for a mere delay.
        seconds: For how long.
        release_s: Not to start before, whatever else is ready: when the host has launched it.
        priority: 0 for what moves, 1 for what computes: transfers first at equal times.
        size_bytes: Bytes that it moves.
    """

    task: int
    streams: tuple[int, ...]
    seconds: float
    release_s: float
    priority: int
    size_bytes: int


class HostLaunch(NamedTuple):
    """The host of a rank launching its part of a task."""

    rank: int
    task: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class Work:
    """All activities of a plan.

    Attributes:
        activities: In an order in which each follows those that its plan lets it wait for.
        after: Per activity, the activities that it waits for.
        ends: Per task, the activity with which it ends.
        launches: Launches of the hosts; empty in the graph runtime.
    """

    activities: list[Activity]
    after: list[list[int]]
    ends: list[int]
    launches: list[HostLaunch]


def work_of(
    program: Program, cluster: Cluster, runtime: Runtime, order: IssueOrder | None = None
) -> Work:
    """Break a plan into activities, without an order on any stream.

    Args:
        program: A verified, resolved plan.
        cluster: Where it runs.
        runtime: Whether each launch costs host time.
        order: The order of launches; None is the plan's.

    Raises:
        UnsupportedError: The plan has more ranks than the cluster has GPUs.
    """
    require(cluster, program.plan.problem.cp)
    costs = costs_on(program, cluster)
    launches = [] if runtime is Runtime.GRAPH else _launches(costs, order)
    launched = {(launch.rank, launch.task): launch.end_s for launch in launches}
    work = Work([], [], [], launches)

    def add(activity: Activity, after: list[int]) -> int:
        work.activities.append(activity)
        work.after.append(after)
        return len(work.activities) - 1

    def move(index: int, leg: Leg, seconds: float, after: list[int]) -> int:
        ranks = {leg.src.rank, leg.dst.rank}
        release = max(launched.get((rank, index), 0.0) for rank in ranks)
        streams = queues_between(leg.src, leg.dst, cluster.link_class(leg.src, leg.dst))
        return add(Activity(index, streams, seconds, release, 0, costs.leg_bytes(leg)), after)

    for index, task in enumerate(program.plan.tasks):
        after = [work.ends[earlier] for earlier in task.after]
        match task:
            case Transfer():
                end = move(index, task.leg, costs.leg_s(task.leg), after)
            case Collective():
                start = Activity(index, (), costs.collective_start_s(task), 0.0, 0, 0)
                gate = add(start, after)
                legs = [
                    move(index, leg, costs.collective_leg_s(leg), [gate])
                    for leg in _rounds(cluster, task)
                ]
                end = add(Activity(index, (), 0.0, 0.0, 0, 0), legs)
            case _:
                rank = task.place.rank
                release = launched.get((rank, index), 0.0)
                streams = (number_of(rank, Stream.COMPUTE),)
                end = add(Activity(index, streams, costs.compute_s(index), release, 1, 0), after)
        work.ends.append(end)
    return work


def in_order(work: Work, order: IssueOrder | None = None) -> None:
    """Let every stream run first in, first out: each activity waits for the one before it.

    Args:
        work: Gets the edges.
        order: Per rank, its tasks in order; None is the plan's.
    """
    queues: dict[int, list[int]] = {}
    for index, activity in enumerate(work.activities):
        for stream in activity.streams:
            queues.setdefault(stream, []).append(index)
    positions = None if order is None else [{t: at for at, t in enumerate(o)} for o in order]
    for stream, queue in queues.items():
        if positions is not None:
            place = positions[stream_of(stream)[0]]
            queue.sort(key=lambda index: (place[work.activities[index].task], index))
        for first, second in pairwise(queue):
            work.after[second].append(first)


def plan_order(plan: Plan) -> IssueOrder:
    """Let every rank issue the tasks that it takes part in in the order of the plan."""
    order: list[list[int]] = [[] for _ in range(plan.problem.cp)]
    for index, task in enumerate(plan.tasks):
        for rank in ranks_of(task):
            order[rank].append(index)
    return order


def _launches(costs: TaskCosts, order: IssueOrder | None) -> list[HostLaunch]:
    """Each rank's host launches one after another and never waits for the device."""
    launches = []
    for rank, tasks in enumerate(order or plan_order(costs.plan)):
        now = 0.0
        for task in tasks:
            if count := costs.launches(task):
                end = now + count * costs.cluster.host_launch_s
                launches.append(HostLaunch(rank, task, now, end))
                now = end
    return launches


def _rounds(cluster: Cluster, task: Collective) -> list[Leg]:
    """Legs in rounds, as a pairwise exchange: in a round every rank sends to one that is as far.

    Distance counts nodes and places in a node apart, so that each round of each link class is a
    matching and no port waits for another round's.
    """
    width = cluster.gpus_per_node
    nodes = 1 + max(cluster.node(place.rank) for leg in task.legs for place in (leg.src, leg.dst))

    def distance(leg: Leg) -> tuple[int, int, int, int]:
        src, dst = leg.src.rank, leg.dst.rank
        far = (cluster.node(dst) - cluster.node(src)) % nodes
        return far, (dst - src) % width, src, dst

    return sorted(task.legs, key=distance)
