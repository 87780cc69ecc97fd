"""The full clock: seconds and a timeline of a plan on a measured cluster, with every effect.

`full_clock` is the one place that says whether it or the quick clock times plans on a cluster (see
docs/adr/0007-two-clocks.md). `validate_predictor` compares its times with measured runs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from harness.cluster.calibration import Calibration, plan_class
from harness.cluster.effects import ALL, Effect
from harness.cluster.machine import Cluster, LinkClass, link_between
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Collective, legs_of
from harness.simulate.bounds import jobs_bound_s
from harness.simulate.intervals import Interval, outside, union
from harness.simulate.job_costs import Pricer, convention
from harness.simulate.job_graph import skeleton
from harness.simulate.jobs import NeedKind, Skeleton, UntimedJob
from harness.simulate.queues import Stream, queues_between, stream_of
from harness.simulate.tile_calls import TimedCall, calls_on
from harness.simulate.trace import Span, task_kind


def full_clock(cluster: Cluster, *, in_plan_order: bool = True) -> Calibration | None:
    """Return the calibration by which the full clock times plans on a cluster.

    None: the quick clock does, because the cluster was never measured, or because queues run in
    another order than the plan's, which the full clock does not know.
    """
    return cluster.fitted if in_plan_order else None


@dataclass(frozen=True, slots=True)
class Trust:
    """How far to trust a predicted time.

    Attributes:
        calibration_id: Which.
        inside: Whether all kernel calls and messages lie where they were measured.
        expected_error: Mean share by which plans of this class missed their measured times; None if
            no such plan was measured on this cluster, and always outside.
    """

    calibration_id: str
    inside: bool
    expected_error: float | None

    @property
    def text(self) -> str:
        """In words."""
        known = "unknown" if self.expected_error is None else f"{self.expected_error:.0%}"
        if self.inside:
            return f"calibration {self.calibration_id}; inside its range, expected error {known}"
        return f"calibration {self.calibration_id}; OUTSIDE its range, error unknown"


def skeleton_on(
    program: Program, fitted: Calibration, *, eager: bool, fold: bool = True
) -> Skeleton:
    """The skeleton of a plan on the nodes of a cluster, in one runtime."""
    per_node = fitted.hardware.gpus_per_node
    fold = fold and fitted.hardware.cores is None  # every rank's work takes a core from the others
    return skeleton(
        program,
        per_node,
        eager=eager,
        fold=fold,
        calls=calls_on(fitted),
        threaded=not fitted.on_gpus,
    )


def pricer(
    problem: Problem,
    direction: Direction,
    fitted: Calibration,
    *,
    eager: bool,
    effects: frozenset[Effect] = ALL,
    scale: float = 1.0,
) -> Pricer:
    """Return the prices of a plan's jobs.

    Args:
        problem: The problem, or the smaller one that was planned.
        direction: Forward or backward.
        fitted: The cluster.
        eager: Whether eager torch runs it, not a captured graph.
        effects: Those that are on.
        scale: Tokens over those that were planned.
    """
    # Forward, partial outputs travel with their lse, as they are kept.
    rounded = problem.round_sent and direction is Direction.BACKWARD
    return Pricer(
        calibration=fitted,
        convention=convention(problem.dtype, eager=eager, rounded=rounded),
        direction=direction,
        scale_q=scale,
        scale_kv=scale,
        heads=problem.batch,
        head_dim=problem.head_dim,
        effects=effects,
        dtype=problem.dtype,
    )


def trust(problem: Problem, shape: Skeleton, prices: Pricer) -> Trust:
    """Say how far to trust the time of a plan."""
    fitted = prices.calibration
    within = problem.dtype.value in fitted.range.dtypes
    needs = {part.need for part in shape.parts}
    for call in {call for need in needs for call in need.calls}:
        within = within and _inside(call, prices)
    sizes = [prices.wire_bytes(need.size) for need in needs if need.kind is NeedKind.TRANSFER]
    within = within and max(sizes, default=0.0) <= fitted.range.max_message_bytes
    per_node = fitted.hardware.gpus_per_node
    kind = plan_class(
        eager=prices.convention.eager,
        nodes=-(-problem.cp // per_node),
        backward=prices.direction is Direction.BACKWARD,
    )
    return Trust(fitted.id, within, fitted.errors.get(kind) if within else None)


def _inside(call: TimedCall, prices: Pricer) -> bool:
    tokens = int(call.rows * prices.scale_q), int(call.columns * prices.scale_kv)
    heads = call.heads * prices.heads
    return prices.calibration.inside(tokens, heads, prices.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of the full clock for a plan.

    Attributes:
        time_s: How long it takes.
        bound_s: Lower bound for any order of its jobs, see `bounds.jobs_bound_s`.
        exposed_s: Longest time that a rank moves something and computes nothing.
        trust: How far to trust the time.
    """

    time_s: float
    bound_s: float
    exposed_s: float
    trust: Trust


def predict(shape: Skeleton, problem: Problem, prices: Pricer) -> Prediction:
    """Time a plan by its jobs.

    Args:
        shape: The jobs, folded or not.
        problem: The problem, at its own length.
        prices: As `pricer` gives them for it.
    """
    jobs = prices.jobs(shape)
    starts, ends = prices.run(jobs)
    return Prediction(
        time_s=max(ends, default=0.0) + prices.start_s,
        bound_s=jobs_bound_s(jobs),
        exposed_s=exposed_s(shape, starts, ends),
        trust=trust(problem, shape, prices),
    )


def exposed_s(shape: Skeleton, starts: Sequence[float], ends: Sequence[float]) -> float:
    """Longest time that a rank moves something and computes nothing."""
    moving: defaultdict[int, list[Interval]] = defaultdict(list)
    computing: defaultdict[int, list[Interval]] = defaultdict(list)
    for part, start, end in zip(shape.parts, starts, ends, strict=True):
        for rank, stream in map(stream_of, part.queues):
            (computing if stream is Stream.COMPUTE else moving)[rank].append((start, end))
        for rank in part.peers:
            moving[rank].append((start, end))
    exposed = (outside(union(moves), union(computing[rank])) for rank, moves in moving.items())
    return max(exposed, default=0.0)


def timeline(program: Program, fitted: Calibration, *, eager: bool) -> tuple[list[Span], Trust]:
    """Run a plan with every rank in it; return what happened, and how far to trust it."""
    plan = program.plan
    prices = pricer(plan.problem, plan.direction, fitted, eager=eager)
    shape = skeleton_on(program, fitted, eager=eager, fold=False)
    return _spans_of(plan, shape, prices), trust(plan.problem, shape, prices)


def _spans_of(plan: Plan, shape: Skeleton, prices: Pricer) -> list[Span]:
    """A timeline of every rank, from a skeleton that is not folded."""
    starts, ends = prices.times(shape)
    spans: list[Span] = []
    hosts: dict[int, float] = {}
    first = prices.start_s
    for part, start, end in zip(shape.parts, starts, ends, strict=True):
        task = plan.tasks[part.task]
        kind = task_kind(task)
        when = (start + first, end + first)
        if prices.hosted:
            spans += _launches(part, prices, hosts)
        if isinstance(task, Collective):
            spans += _exchange(plan, part, when, prices.calibration.hardware.gpus_per_node)
            continue
        if part.need.kind is NeedKind.COPY:
            kind = "copy"
        size = sum(leg_bytes(plan, leg) for leg in legs_of(task))
        for queue in part.queues:
            rank, stream = stream_of(queue)
            moved = 0 if stream is Stream.COMPUTE else size
            spans.append(Span(rank, stream, part.task, kind, *when, moved))
    return spans


def _launches(part: UntimedJob, prices: Pricer, hosts: dict[int, float]) -> list[Span]:
    """Launches of a part on the hosts of its ranks; `hosts` has the time when each is free."""
    spans = []
    for rank, launched in zip(part.peers or part.ranks, part.launched, strict=False):
        end, start = prices.launch_s(launched), hosts.get(rank, 0.0)
        if end > start:
            spans.append(Span(rank, Stream.LAUNCH, part.task, "launch", start, end))
            hosts[rank] = end
    return spans


def _exchange(
    plan: Plan, part: UntimedJob, when: tuple[float, float], gpus_per_node: int
) -> list[Span]:
    """Every port that a collective uses, for all of its time."""
    task = plan.tasks[part.task]
    moved: dict[int, int] = {}
    for leg in legs_of(task):
        link = link_between(leg.src, leg.dst, gpus_per_node)
        for queue in () if link is LinkClass.LOCAL else queues_between(leg.src, leg.dst, link):
            moved[queue] = moved.get(queue, 0) + leg_bytes(plan, leg)
    return [
        Span(*stream_of(queue), part.task, task_kind(task), *when, size)
        for queue, size in moved.items()
    ]
