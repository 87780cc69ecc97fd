"""The full clock: seconds and a timeline of a plan on a measured cluster, with every effect.

`full_clock` is the one place that says whether it or the quick clock times plans on a cluster (see
docs/adr/0007-two-clocks.md). `validate_predictor` compares its times with measured runs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.cluster.calibration import Calibration
from harness.cluster.effects import ALL, Effect
from harness.cluster.machine import Cluster, LinkClass, Runtime, link_between
from harness.cluster.validated import LATENCY_SHARE, PlanClass, Regime, like
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

NEXT_TO_NONE = 128
"""Tokens of a rank that leave a plan nothing but its fixed costs: a thread block of queries."""
_MOST_RATIO = 32
"""Most queries for a key, or keys for a query, of a call. Source: UltraAttn (SC'25) repository,
grids of one row on 8 GPUs whose queries are four times as many as keys."""
_FEW_ROWS = 1024
"""Fewer queries than this, with query heads that share keys, are packed by some kernels.
Source: flash-attn hopper/heuristics.h, should_pack_gqa; set to 8 thread blocks."""


def full_clock(cluster: Cluster, *, in_plan_order: bool = True) -> Calibration | None:
    """Return the calibration by which the full clock times plans on a cluster.

    None: the quick clock does, because the cluster was never measured, or because queues run in
    another order than the plan's, which the full clock does not know.
    """
    return cluster.fitted if in_plan_order else None


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
    own_stream: bool = False,
) -> Pricer:
    """Return the prices of a plan's jobs.

    Args:
        problem: The problem, or the smaller one that was planned.
        direction: Forward or backward.
        fitted: The cluster.
        eager: Whether eager torch runs it, not a captured graph.
        effects: Those that are on.
        scale: Tokens over those that were planned.
        own_stream: Whether eager torch's transfers have a stream of their own.
    """
    # Forward, partial outputs travel with their lse, as they are kept.
    rounded = problem.round_sent and direction is Direction.BACKWARD
    return Pricer(
        calibration=fitted,
        convention=convention(problem.dtype, eager=eager, rounded=rounded, own_stream=own_stream),
        direction=direction,
        scale_q=scale,
        scale_kv=scale,
        heads=problem.batch,
        head_dim=problem.head_dim,
        effects=effects,
        dtype=problem.dtype,
        nodes=-(-problem.cp // fitted.hardware.gpus_per_node),
    )


@dataclass(frozen=True, slots=True)
class Trust:
    """How far to trust a predicted time.

    Attributes:
        calibration_id: Which.
        kernel: The attention kernel that it is of.
        inside: Whether all kernel calls and messages lie where they were measured, and plans like
            this one were validated on this cluster, if any were.
        expected_error: Mean share by which like plans missed their measured times; None if no such
            plan was measured on this cluster, and always outside.
        p90: Nine in ten of them missed by at most this share; None as `expected_error`.
        beyond: What lies outside; empty inside.
    """

    calibration_id: str
    kernel: str
    inside: bool
    expected_error: float | None
    p90: float | None
    beyond: str = ""

    @property
    def text(self) -> str:
        """In words."""
        what = f"calibration {self.calibration_id}; kernel {self.kernel}"
        if not self.inside:
            return f"{what}; OUTSIDE its range ({self.beyond}), error unknown"
        known = "unknown"
        if self.expected_error is not None and self.p90 is not None:
            known = f"{self.expected_error:.0%} (9 in 10 within {self.p90:.0%})"
        return f"{what}; inside its range, expected error {known}"


def trust(problem: Problem, shape: Skeleton, prices: Pricer, time_s: float) -> Trust:
    """Say how far to trust the time of a plan.

    Args:
        problem: The problem, at its own length.
        shape: The jobs, folded or not.
        prices: As `calibrated.pricer` gives them for it.
        time_s: The time that they take.
    """
    fitted = prices.calibration
    beyond = next(_beyond(problem, shape, prices), "")
    found = None
    if not beyond and fitted.validated:
        kind = plan_class(shape, prices, problem.cp, latency_share(problem, shape, prices, time_s))
        found = like(fitted.validated, kind)
        beyond = "" if found else f"no like run was validated: {_said(kind)}"
    inside = not beyond
    name = fitted.kernels.name
    if found is None:
        return Trust(fitted.id, name, inside, None, None, beyond)
    return Trust(fitted.id, name, inside, found.mean, found.p90)


def latency_share(problem: Problem, shape: Skeleton, prices: Pricer, time_s: float) -> float:
    """Share of a plan's time that it would take with next to no tokens."""
    if not time_s:
        return 1.0
    less = min(1.0, problem.cp * NEXT_TO_NONE / max(problem.seqlen_q, problem.seqlen_kv))
    small = replace(prices, scale_q=prices.scale_q * less, scale_kv=prices.scale_kv * less)
    return min(1.0, small.seconds_of(shape) / time_s)


def plan_class(shape: Skeleton, prices: Pricer, cp: int, share: float) -> PlanClass:
    """The class of a plan; its transfers join one node if none leaves one."""
    kinds = tuple(kind for kind in shape.kinds.split(",") if kind)
    leaves = any(kind.startswith("far") for kind in kinds)
    return PlanClass(
        runtime=prices.convention.runtime.value,
        direction=prices.direction.value,
        nodes=-(-cp // prices.calibration.hardware.gpus_per_node) if leaves else 1,
        transfers=kinds,
        regime=regime_of(share),
    )


def regime_of(share: float) -> Regime:
    """What bounds a plan of which fixed costs take a share."""
    return Regime.LATENCY if share > LATENCY_SHARE else Regime.WORK


def _said(kind: PlanClass) -> str:
    moves = " and ".join(kind.transfers).replace("_", "-") or "no transfers"
    where = "one node" if kind.nodes == 1 else f"{kind.nodes} nodes"
    return f"{moves}, {kind.runtime} {kind.direction} on {where}, bound by {kind.regime}"


def _beyond(problem: Problem, shape: Skeleton, prices: Pricer) -> Iterator[str]:
    """What of a plan lies outside the measured range."""
    limits = prices.calibration.range
    if problem.dtype.value not in limits.dtypes:
        yield f"{problem.dtype.value} was not measured"
    needs = dict.fromkeys(part.need for part in shape.parts)
    shared = problem.heads_q != problem.heads_kv
    for call in dict.fromkeys(call for need in needs for call in need.calls):
        yield from _beyond_call(call, prices, shared=shared)
    for need in needs:
        sizes = {NeedKind.TRANSFER: (need.size,), NeedKind.COLLECTIVE: (need.size, need.far_size)}
        for size in sizes.get(need.kind, ()):
            if prices.wire_bytes(size) > limits.max_message_bytes:
                yield f"messages of more than {limits.max_message_bytes / 2**30:.0f} GiB"


def _beyond_call(call: TimedCall, prices: Pricer, *, shared: bool) -> Iterator[str]:
    limits = prices.calibration.range
    rows, keys = int(call.rows * prices.scale_q), int(call.columns * prices.scale_kv)
    heads = call.heads * prices.heads
    if not prices.calibration.inside((rows, keys), heads, prices.head_dim):
        yield (
            f"kernel calls of {rows} x {keys} tokens, {heads} heads, D={prices.head_dim}; measured "
            f"{limits.min_tokens} to {limits.max_tokens} tokens, {min(limits.heads)} to "
            f"{max(limits.heads)} heads, D={', '.join(map(str, limits.head_dims))}"
        )
    if max(rows, keys) > _MOST_RATIO * min(rows, keys):
        yield f"kernel calls of {rows} x {keys} tokens: more than {_MOST_RATIO} to 1"
    if shared and rows < _FEW_ROWS and prices.calibration.on_gpus:
        yield f"kernel calls of {rows} queries whose heads share keys, which kernels may pack"


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
    time_s = max(ends, default=0.0) + prices.start_s
    return Prediction(
        time_s=time_s,
        bound_s=jobs_bound_s(jobs),
        exposed_s=exposed_s(shape, starts, ends),
        trust=trust(problem, shape, prices, time_s),
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


def timeline(
    program: Program, fitted: Calibration, *, runtime: Runtime
) -> tuple[list[Span], Trust]:
    """Run a plan with every rank in it; return what happened, and how far to trust it."""
    plan = program.plan
    eager, own = runtime.eager, runtime.own_stream
    prices = pricer(plan.problem, plan.direction, fitted, eager=eager, own_stream=own)
    shape = skeleton_on(program, fitted, eager=eager, fold=False)
    spans = _spans_of(plan, shape, prices)
    time_s = max((span.end_s for span in spans), default=0.0)
    return spans, trust(plan.problem, shape, prices, time_s)


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
