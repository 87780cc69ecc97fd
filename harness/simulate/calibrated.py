"""Seconds and a timeline of a plan on a calibrated cluster, with every effect, in either runtime.

`simulate` and `sweep` come here where a cluster has a calibration; `validate_predictor` compares
the same prices with measured runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.cluster.calibration import Calibration, plan_class
from harness.cluster.effects import ALL, Effect
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Collective, legs_of
from harness.simulate.contention import Job
from harness.simulate.job_costs import Pricer, convention
from harness.simulate.job_graph import Call, Part, Skeleton, calls_on, skeleton
from harness.simulate.trace import Source, Span, Stream, Trace, kind_of

_OF_QUEUE = (
    Stream.COMPUTE,
    Stream.NVLINK_OUT,
    Stream.NVLINK_IN,
    Stream.NIC_OUT,
    Stream.NIC_IN,
    Stream.HOST_OUT,
    Stream.HOST_IN,
)
"""Streams by the number of a queue of a skeleton, modulo queues per rank."""
_QUEUES = 8


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
    """What prices a plan of a problem.

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


def trust(
    problem: Problem, direction: Direction, shape: Skeleton, prices: Pricer, *, eager: bool
) -> Trust:
    """Say how far to trust the time of a plan."""
    fitted = prices.calibration
    within = problem.dtype.value in fitted.range.dtypes
    needs = {part.need for part in shape.parts}
    for call in {call for need in needs for call in need.calls}:
        within = within and _inside(call, prices)
    sizes = [prices.wire_bytes(need.size) for need in needs if need.kind == "transfer"]
    within = within and max(sizes, default=0.0) <= fitted.range.max_message_bytes
    per_node = fitted.hardware.gpus_per_node
    kind = plan_class(
        eager=eager,
        nodes=-(-problem.cp // per_node),
        backward=direction is Direction.BACKWARD,
    )
    return Trust(fitted.id, within, fitted.errors.get(kind) if within else None)


def _inside(call: Call, prices: Pricer) -> bool:
    tokens = int(call.rows * prices.scale_q), int(call.columns * prices.scale_kv)
    heads = call.heads * prices.heads
    return prices.calibration.inside(tokens, heads, prices.head_dim)


def lower_bound_s(jobs: Sequence[Job]) -> float:
    """The fullest queue or the longest chain, each job as fast as it can be."""
    load: dict[int, float] = {}
    ends: list[float] = []
    for job in jobs:
        least = min(job.seconds)
        for queue in job.queues:
            load[queue] = load.get(queue, 0.0) + least
        ends.append(max((ends[earlier] for earlier in job.after), default=0.0) + least)
    return max([*load.values(), *ends], default=0.0)


def exposed_s(shape: Skeleton, starts: Sequence[float], ends: Sequence[float]) -> float:
    """Longest time that a rank moves something and computes nothing."""
    spans = []
    for part, start, end in zip(shape.parts, starts, ends, strict=True):
        for queue in part.queues:
            rank, number = divmod(queue, _QUEUES)
            spans.append(Span(rank, _OF_QUEUE[number], part.task, part.need.kind, start, end))
        spans += [
            Span(rank, Stream.NVLINK_IN, part.task, part.need.kind, start, end)
            for rank in part.peers
        ]
    cp = 1 + max((span.rank for span in spans), default=0)
    return Trace("", "", cp, Source.SIMULATED, "", "", (), tuple(spans)).exposed_comm_max_s


def spans_of(plan: Plan, shape: Skeleton, prices: Pricer) -> list[Span]:
    """A timeline of every rank, from a skeleton that is not folded."""
    starts, ends = prices.times(shape)
    spans: list[Span] = []
    hosts: dict[int, float] = {}
    first = prices.start_s
    for part, start, end in zip(shape.parts, starts, ends, strict=True):
        task = plan.tasks[part.task]
        kind = kind_of(task)
        when = (start + first, end + first)
        if prices.hosted:
            spans += _launches(part, prices, hosts)
        if isinstance(task, Collective):
            spans += _exchange(plan, part, when, prices.calibration.hardware.gpus_per_node)
            continue
        if part.need.kind == "copy":
            kind = "copy"
        size = sum(leg_bytes(plan, leg) for leg in legs_of(task))
        for queue in part.queues:
            rank, number = divmod(queue, _QUEUES)
            stream = _OF_QUEUE[number]
            spans.append(Span(rank, stream, part.task, kind, *when, size if number else 0))
    return spans


def _launches(part: Part, prices: Pricer, hosts: dict[int, float]) -> list[Span]:
    """What the hosts of a part's ranks launch for it; `hosts` keeps when each is free."""
    spans = []
    for rank, launched in zip(part.peers or part.ranks, part.launched, strict=False):
        end, start = prices.launch_s(launched), hosts.get(rank, 0.0)
        if end > start:
            spans.append(Span(rank, Stream.LAUNCH, part.task, "launch", start, end))
            hosts[rank] = end
    return spans


def _exchange(plan: Plan, part: Part, when: tuple[float, float], gpus_per_node: int) -> list[Span]:
    """Every port that a collective uses, for all of its time."""
    task, width = plan.tasks[part.task], gpus_per_node
    moved: dict[tuple[int, Stream], int] = {}
    for leg in legs_of(task):
        if leg.src == leg.dst:
            continue
        near = leg.src.rank // width == leg.dst.rank // width
        ways = (Stream.NVLINK_OUT, Stream.NVLINK_IN) if near else (Stream.NIC_OUT, Stream.NIC_IN)
        for rank, stream in zip((leg.src.rank, leg.dst.rank), ways, strict=True):
            key = (rank, stream)
            moved[key] = moved.get(key, 0) + leg_bytes(plan, leg)
    return [
        Span(rank, stream, part.task, kind_of(task), *when, size)
        for (rank, stream), size in moved.items()
    ]
