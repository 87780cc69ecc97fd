"""Lower bounds on the time of a plan, and of any plan, on a cluster.

Of any plan of a problem: all attention flops at the kernels' stated efficiency, spread evenly over
the ranks (`problem_bound_s`). No strategy can be faster on this cluster model, whatever it moves.
`any_plan_bound` adds what has to move: while ranks compute no more than they can in some time, they
receive at least so many bytes, and these take time too (docs/bounds.md).

Of one plan, whatever the order of its tasks: the fullest compute stream, the fullest port of each
link class, and the longest chain of tasks that wait for one another. Also its serial time, which
no simulated run exceeds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import require
from harness.plan.least_volume import AreaPrices, area_prices
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.sizes import problem_flops, tile_flops
from harness.plan.tasks import Tensor, Tile
from harness.simulate.contention import Job
from harness.simulate.queues import Stream, stream_of
from harness.simulate.streams import Work, work_of
from harness.simulate.task_costs import costs_on

_CLOSE = 1e-6  # share by which a bound that is searched for may stay below the true one
_LEAST_CHUNK, _FEW_CHUNKS = 16, 8  # tokens of a chunk where they are many; how many are few
_ROUND_UP = 1 + 1e-12  # so that the even share of the work is within what a rank can do


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyPlanBound:
    """Seconds that no plan of a problem beats on a cluster, and what each resource takes of them.

    Attributes:
        bound_s: The bound.
        compute_s: All attention flops at the best rate of a kernel, evenly spread.
        ranks_s: What ranks receive at least in a plan as fast as the bound, at the best bandwidths.
        nodes_s: What nodes receive at least in it, over all of their NICs; 0 on one node.
    """

    bound_s: float
    compute_s: float
    ranks_s: float
    nodes_s: float

    @property
    def what(self) -> str:
        """Name what decides it."""
        if self.bound_s == self.compute_s:
            return "compute"
        return "links" if self.ranks_s >= self.nodes_s else "links between nodes"


def any_plan_bound(
    problem: Problem,
    direction: Direction,
    cluster: Cluster,
    owned: tuple[int, int] | None = None,
) -> AnyPlanBound:
    """Bound the time of every plan of a problem from below; docs/bounds.md has the proof.

    Of a whole layer, whose keys a rank may make from what it has, compute alone counts.

    Args:
        problem: The problem.
        direction: Forward or backward.
        cluster: Where plans run.
        owned: Query tokens and keys that a rank has from the start at most (`most_owned`); None is
            `dealt_at_most`.

    Raises:
        UnsupportedError: The problem has more ranks than the cluster has GPUs.
    """
    return _any_plan_bound(problem, direction, cluster, owned or dealt_at_most(problem))


@lru_cache(maxsize=1024)
def _any_plan_bound(
    problem: Problem, direction: Direction, cluster: Cluster, owned: tuple[int, int]
) -> AnyPlanBound:
    even_s, cp, fitted = problem_bound_s(problem, direction, cluster), problem.cp, cluster.fitted
    compute_s = even_s
    if fitted is not None and fitted.hardware.cores is not None:
        compute_s *= max(1.0, cp / fitted.hardware.cores)
    if problem.hidden is not None or cp == 1 or not even_s:
        return AnyPlanBound(bound_s=compute_s, compute_s=compute_s, ranks_s=0.0, nodes_s=0.0)
    width = min(cluster.gpus_per_node, cp)
    nodes = -(-cp // width)
    near, far = _most_bytes_per_s(cluster)
    # NCCL's rings bring a node what all of its ranks gather once, over all of its NICs.
    shared = width if fitted is not None else 1
    into_rank = (near if width > 1 else 0.0) + (far * shared if nodes > 1 else 0.0)
    rate = problem.pattern.total_area * problem.heads_q / (even_s * cp)  # pairs x heads of a rank
    ranks = _Receipts(area_prices(problem, direction, cp, owned), rate, cp * into_rank)
    found = [ranks]
    if nodes > 1:
        prices = area_prices(problem, direction, nodes, (width * owned[0], width * owned[1]))
        found.append(_Receipts(prices, width * rate, cp * far))
    bound_s = max(compute_s, *(each.least_s(even_s) for each in found))
    taken = [min(each.seconds(bound_s), bound_s) for each in found]
    return AnyPlanBound(
        bound_s=bound_s,
        compute_s=compute_s,
        ranks_s=taken[0],
        nodes_s=taken[1] if nodes > 1 else 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Receipts:
    """Receipts of all parts of a cluster: their prices, what a part computes, what all receive."""

    prices: AreaPrices
    rate: float  # pairs x heads per second, of a part
    bytes_per_s: float

    def seconds(self, within_s: float) -> float:
        """Seconds of what is received at least if no part computes for longer than some time."""
        return self.prices.least_bytes(self.rate * within_s * _ROUND_UP) / self.bytes_per_s

    def least_s(self, even_s: float) -> float:
        """The least time within which all is received that computing within it needs."""
        low, high = even_s, even_s
        while self.seconds(high) > high:
            low, high = high, 2 * high
        while high - low > _CLOSE * low:
            middle = (low + high) / 2
            low, high = (low, middle) if self.seconds(middle) <= middle else (middle, high)
        return low


def _most_bytes_per_s(cluster: Cluster) -> tuple[float, float]:
    """Best bandwidth of any message: inside a node, and between nodes."""
    if cluster.fitted is None:
        return cluster.nvlink.bandwidth_bytes_per_s, cluster.nic.bandwidth_bytes_per_s
    links = cluster.fitted.links
    near = max(c.most_bytes_per_s for c in (links.near, links.near_one_way, links.near_collective))
    return near, max(links.far.most_bytes_per_s, links.far_alone.most_bytes_per_s)


def dealt_at_most(problem: Problem) -> tuple[int, int]:
    """Query tokens and keys of a rank at most, wherever ranks get as many chunks as others.

    These differ by a token, and are of 16 tokens or more where a rank has many (`dealing`); so a
    rank has a 16th more than the mean at most, or a few tokens. A smaller `chunk=` may give more:
    `most_owned` counts what a plan deals.
    """

    def most(length: int) -> int:
        even = -(-length // problem.cp)
        return min(length, even + even // _LEAST_CHUNK + _FEW_CHUNKS)

    return most(problem.seqlen_q), most(problem.seqlen_kv)


def most_owned(plan: Plan) -> tuple[int, int]:
    """Query tokens and keys that a rank of a plan has from the start, at most."""
    held = [[0] * plan.problem.cp for _ in range(2)]
    for place, piece in plan.initial:
        if piece.tensor in (Tensor.Q, Tensor.K):
            held[piece.tensor is Tensor.K][place.rank] += plan.tokens(piece)
    return max(held[0]), max(held[1])


def jobs_bound_s(jobs: Sequence[Job]) -> float:
    """Bound the time of priced jobs, in any order: a chain of those that wait, or a queue.

    A queue takes all of its jobs, after the least that comes before one of them and before the
    least that follows one. Each job counts as if nothing slowed it down; when hosts launch does not
    count.
    """
    least = [min(job.seconds) for job in jobs]
    ends = _chain_ends((job.after, s, 0.0) for job, s in zip(jobs, least, strict=True))
    tails = [0.0] * len(jobs)  # the longest chain that waits for each
    for index in range(len(jobs) - 1, -1, -1):
        for earlier in jobs[index].after:
            tails[earlier] = max(tails[earlier], tails[index] + least[index])
    queues: dict[int, tuple[float, float, float]] = {}  # load, least head and tail
    for job, seconds, end, tail in zip(jobs, least, ends, tails, strict=True):
        for queue in job.queues if seconds else ():
            load, head, after = queues.get(queue, (0.0, end, tail))
            queues[queue] = load + seconds, min(head, end - seconds), min(after, tail)
    return max([*map(sum, queues.values()), *ends], default=0.0)


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
