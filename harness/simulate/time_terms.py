"""Where the time of a plan goes: terms that add up, from the even compute bound to its time.

Each term is what one more fact adds, so no time counts twice:

    even compute   all attention flops, evenly spread, at the best rate of a kernel
    imbalance      the flops of the rank that has most
    kernels        calls that are small, masked or oddly shaped: their true seconds, of the rank
                   whose kernels take longest
    merges         all else on the fullest compute stream: folds, sums, delta, projections
    waits          tasks that wait for one another, if nothing took time to move
    nvlink ...     what the links of one class add to the fullest queue or the longest chain
    order          the schedule above that: no order is known to need more than all terms so far
    crowding       kernels and transfers that slow one another (on a calibration)
    launch         the start of a plan and launches of the hosts
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from harness.cluster.calibration import Calibration
from harness.cluster.effects import ALL, Effect
from harness.cluster.machine import Cluster, LinkClass, Runtime
from harness.cluster.presets import require
from harness.plan.residency import Program
from harness.plan.sizes import tile_flops
from harness.plan.tasks import Collective, Tile, Transfer, legs_of
from harness.simulate.bounds import AnyPlanBound, any_plan_bound, jobs_bound_s
from harness.simulate.calibrated import full_clock, pricer, skeleton_on
from harness.simulate.contention import Job, run_jobs
from harness.simulate.job_costs import Pricer
from harness.simulate.jobs import NeedKind, Size, UntimedJob
from harness.simulate.queues import Stream, stream_of
from harness.simulate.simulator import start_times
from harness.simulate.streams import Work, in_order, work_of
from harness.simulate.task_costs import costs_on

_LINKS = (LinkClass.NVLINK, LinkClass.NIC, LinkClass.HOST)
_CROWDING = frozenset({Effect.INTERFERENCE, Effect.CONTENTION, Effect.BLOCKING})


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerms:
    """Seconds of a plan by what they are spent on; they add up to its time.

    Attributes:
        even_s: All attention flops, evenly spread, at the best rate of a kernel.
        imbalance_s: More flops on the rank that has most.
        kernels_s: Kernel calls that do not reach that rate.
        merges_s: All else on the fullest compute stream.
        waits_s: Tasks that wait for one another, whatever the links.
        links_s: By class of link, what no order of the tasks hides.
        order_s: The schedule above the bound of its plan.
        crowding_s: Kernels and transfers that slow one another.
        launch_s: The start of the plan, and launches by the hosts.
        any_plan: What no plan of the problem beats; no term.
    """

    even_s: float
    imbalance_s: float
    kernels_s: float
    merges_s: float
    waits_s: float
    links_s: Mapping[LinkClass, float]
    order_s: float
    crowding_s: float
    launch_s: float
    any_plan: AnyPlanBound

    @property
    def parts(self) -> Mapping[str, float]:
        """All terms by name, in the order in which they add up."""
        return {
            "even compute": self.even_s,
            "imbalance": self.imbalance_s,
            "kernels": self.kernels_s,
            "merges": self.merges_s,
            "waits": self.waits_s,
            **{link.value: seconds for link, seconds in self.links_s.items()},
            "order": self.order_s,
            "crowding": self.crowding_s,
            "launch": self.launch_s,
        }

    @property
    def time_s(self) -> float:
        """The time of the plan."""
        return sum(self.parts.values())

    @property
    def plan_bound_s(self) -> float:
        """No order of the plan's tasks takes less, if none slows another."""
        return self.time_s - self.order_s - self.crowding_s - self.launch_s

    def as_json(self) -> dict[str, object]:
        """All times, in seconds."""
        return {
            "time_s": self.time_s,
            "terms_s": dict(self.parts),
            "plan_bound_s": self.plan_bound_s,
            "any_plan_bound_s": self.any_plan.bound_s,
            "any_plan_bound_by": self.any_plan.what,
        }


@dataclass(frozen=True, slots=True)
class _Step:
    """A job, its kernel calls, and the seconds that it takes if links up to some class count."""

    job: Job
    rank: int | None  # whose compute stream it holds
    kernels_s: float
    seconds: tuple[float, ...]  # with no links, and with each of `_LINKS` more


@dataclass(frozen=True, slots=True)
class _Run:
    """A plan on a clock: its steps and its times, more and more true."""

    steps: Sequence[_Step]
    alone_s: float  # nothing slows another, hosts launch at once
    crowded_s: float  # hosts launch at once
    time_s: float


def time_terms(program: Program, cluster: Cluster, runtime: Runtime = Runtime.GRAPH) -> TimeTerms:
    """Split the simulated time of a plan into terms that add up.

    Args:
        program: A verified, resolved plan.
        cluster: Where it runs.
        runtime: How work reaches the GPUs.

    Raises:
        UnsupportedError: The plan has more ranks than the cluster has GPUs.
    """
    plan = program.plan
    require(cluster, plan.problem.cp)
    fitted = full_clock(cluster)
    if fitted is None:
        run = _quick_run(program, cluster, runtime)
    else:
        run = _full_run(program, fitted, runtime)
    return _split(program, cluster, run)


def _split(program: Program, cluster: Cluster, run: _Run) -> TimeTerms:
    """Each term is the difference of two bounds, or of a time and a bound."""
    plan, costs = program.plan, costs_on(program, cluster)
    flops = [0] * plan.problem.cp
    for task in plan.tasks:
        if isinstance(task, Tile) and task.direction is plan.direction:
            flops[task.place.rank] += tile_flops(plan, task)
    even_s = costs.attention_s(sum(flops)) / plan.problem.cp
    fullest_s = costs.attention_s(max(flops))
    kernels_s = max([fullest_s, *_by_rank(run.steps, kernels=True)])
    compute_s = max([kernels_s, *_by_rank(run.steps, kernels=False)])
    bounds_s = [max(compute_s, _bound_s(run.steps, links)) for links in range(len(_LINKS) + 1)]
    legs = (leg for task in plan.tasks for leg in legs_of(task))
    used = {cluster.link_class(leg.src, leg.dst) for leg in legs}
    return TimeTerms(
        even_s=even_s,
        imbalance_s=fullest_s - even_s,
        kernels_s=kernels_s - fullest_s,
        merges_s=compute_s - kernels_s,
        waits_s=bounds_s[0] - compute_s,
        links_s=MappingProxyType(
            {
                link: bounds_s[at + 1] - bounds_s[at]
                for at, link in enumerate(_LINKS)
                if link in used
            }
        ),
        order_s=run.alone_s - bounds_s[-1],
        crowding_s=run.crowded_s - run.alone_s,
        launch_s=run.time_s - run.crowded_s,
        any_plan=any_plan_bound(plan.problem, plan.direction, cluster),
    )


def _by_rank(steps: Sequence[_Step], *, kernels: bool) -> Iterator[float]:
    """Per compute stream, the seconds of its kernel calls or of everything."""
    found: dict[int, float] = {}
    for step in steps:
        if step.rank is not None:
            seconds = step.kernels_s if kernels else step.seconds[0]
            found[step.rank] = found.get(step.rank, 0.0) + seconds
    yield from found.values()


def _bound_s(steps: Sequence[_Step], links: int) -> float:
    """The fullest queue or the longest chain, if so many classes of links take time."""
    return jobs_bound_s([step.job._replace(seconds=(step.seconds[links],)) for step in steps])


# The full clock --------------------------------------------------------------------------------


def _full_run(program: Program, fitted: Calibration, runtime: Runtime) -> _Run:
    plan, eager, own = program.plan, runtime.eager, runtime.own_stream
    shape = skeleton_on(program, fitted, eager=eager)

    def prices(effects: frozenset[Effect]) -> Pricer:
        return pricer(
            plan.problem,
            plan.direction,
            fitted,
            eager=eager,
            effects=effects,
            own_stream=own,
        )

    unlaunched = ALL - {Effect.HOST, Effect.JOIN}
    quiet, crowded = unlaunched - _CROWDING, unlaunched
    alone, unmerged = prices(quiet), prices(quiet - {Effect.MERGE})
    jobs = alone.jobs(shape)
    steps = [
        _full_step(part, job, alone, unmerged) for part, job in zip(shape.parts, jobs, strict=True)
    ]
    return _Run(
        steps,
        max(run_jobs(jobs, kernels_first=alone.convention.kernels_first)[1], default=0.0),
        max(prices(crowded).times(shape)[1], default=0.0),
        prices(ALL).seconds_of(shape),
    )


def _full_step(part: UntimedJob, job: Job, alone: Pricer, unmerged: Pricer) -> _Step:
    need, seconds = part.need, min(job.seconds) * job.messages
    match need.kind:
        case NeedKind.TRANSFER:
            return _Step(
                job, None, 0.0, _from(LinkClass.NIC if need.far else LinkClass.NVLINK, seconds)
            )
        case NeedKind.HOST:
            return _Step(job, None, 0.0, _from(LinkClass.HOST, seconds))
        case NeedKind.COLLECTIVE:
            near = alone.collective(need._replace(far=False, far_size=Size()))
            return _Step(job, None, 0.0, (0.0, near, seconds, seconds))
        case NeedKind.DELAY:
            return _Step(job, None, 0.0, (seconds,) * 4)
        case _:
            tile = need.kind is NeedKind.TILE
            kernels_s = unmerged.price(need)[0][0] if tile else 0.0
            return _Step(job, part.ranks[0], kernels_s, (seconds,) * 4)


def _from(link: LinkClass, seconds: float) -> tuple[float, ...]:
    """Seconds that count from a class of links on."""
    return tuple(0.0 if link not in _LINKS[:counted] else seconds for counted in range(4))


# The quick clock -------------------------------------------------------------------------------


def _quick_run(program: Program, cluster: Cluster, runtime: Runtime) -> _Run:
    work = work_of(program, cluster, Runtime.GRAPH)
    steps = _quick_steps(program, cluster, work)

    def ends(made: Work) -> float:
        in_order(made)
        starts = start_times(made)
        return max(
            (start + each.seconds for start, each in zip(starts, made.activities, strict=True)),
            default=0.0,
        )

    graph_s = ends(work)
    eager_s = graph_s
    if runtime.eager:
        eager_s = ends(work_of(program, cluster, runtime))
    return _Run(steps, graph_s, graph_s, eager_s)


def _quick_steps(program: Program, cluster: Cluster, work: Work) -> list[_Step]:
    plan, costs = program.plan, costs_on(program, cluster)
    steps = []
    for activity, after in zip(work.activities, work.after, strict=True):
        task, seconds = plan.tasks[activity.task], activity.seconds
        job = Job(activity.streams, (), (seconds,), tuple(after))
        match task:
            case Transfer() | Collective():
                link = _class_of(cluster, task, activity.streams)
                local = link is LinkClass.LOCAL
                rank = stream_of(activity.streams[0])[0] if local else None
                steps.append(
                    _Step(job, rank, 0.0, (seconds,) * 4 if local else _from(link, seconds))
                )
            case _:
                kernels_s = costs.kernels_s(task) if isinstance(task, Tile) else 0.0
                steps.append(_Step(job, task.place.rank, kernels_s, (seconds,) * 4))
    return steps


_CLASSES = {
    Stream.COMPUTE: LinkClass.LOCAL,
    Stream.NVLINK_OUT: LinkClass.NVLINK,
    Stream.NIC_OUT: LinkClass.NIC,
    Stream.HOST_OUT: LinkClass.HOST,
    Stream.HOST_IN: LinkClass.HOST,
}


def _class_of(cluster: Cluster, task: Transfer | Collective, streams: Sequence[int]) -> LinkClass:
    """Class of the link of a part of a task; of a mere delay, the slowest that the task crosses."""
    if streams:
        return _CLASSES[stream_of(streams[0])[1]]
    crossed = {cluster.link_class(leg.src, leg.dst) for leg in legs_of(task)}
    return LinkClass.NIC if LinkClass.NIC in crossed else LinkClass.NVLINK
