"""Whether a strategy supports a problem: its costs, or the nearest supported configurations.

Legal means tried: the strategy made a plan for both directions and the verifier proved it. Every
alternative named is planned too. Costs are counted in the plan; where a closed form is known it
stands beside the count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from harness.errors import UnsupportedError
from harness.explain import volumes
from harness.explain.alternatives import Alternative, evener, near
from harness.explain.overlap_rule import Hiding, hidings
from harness.memory.counting import ALGORITHM
from harness.memory.ledger import ledger
from harness.plan import imbalance
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem, spelled
from harness.plan.residency import Program
from harness.plan.sizes import piece_bytes
from harness.plan.tasks import Tensor, Tile, Transfer
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import proved_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a supported configuration, on the busiest or fullest rank.

    Attributes:
        volume_bytes: Received in the forward pass of one layer, counted in the plan.
        volume_bytes_backward: As above, backward.
        rounding_bytes: Of what all ranks receive forward, what `align` adds to the need.
        rounding_bytes_backward: As above, backward.
        closed_form_bytes: The same by formula; None where none is known (see
            `closed_forms`).
        closed_form_bytes_backward: As above, backward.
        closed_form: The forward formula, in the words of `closed_forms`; None likewise.
        closed_form_backward: As above, backward.
        closed_form_source: Where it is from; None likewise.
        imbalance_total: See `balance`, forward.
        imbalance_lockstep: See `balance`, forward.
        memory_bytes_lower_bound: Inputs and outputs of the forward pass.
        peak_bytes: The most held at a time in the forward pass (see `memory`).
        peak_bytes_backward: As above, backward.
        peak_uses_bytes: The forward peak by use (see `counting.Use`).
        peak_uses_bytes_backward: As above, backward.
        saved_bytes: Saved for the backward pass (may be part of these), host included.
        peak_bytes_algorithm: Needs of the algorithm in the forward pass (`counting.ALGORITHM`).
        peak_bytes_algorithm_backward: As above, backward.
        host_peak_bytes: The most held at a time in host memory, in either pass.
        host_bytes: Moved between a device and its host, both ways, in the forward pass.
        host_bytes_backward: As above, backward.
        project_flops: Spent on projections of q, k and v in the forward pass; 0 without a layer.
        project_flops_backward: As above, backward: what was not saved is projected again.
        tokens_min: Query tokens of the rank that owns fewest.
        tokens_max: Query tokens of the rank that owns most.
        heads_max: Query heads of the rank that attends most.
        heads_mean: Query heads that a rank attends on average.
        kv_heads_max: KV heads of the rank that holds most.
        kv_copies: KV heads held by ranks of different heads, over the KV heads there are.
        block_tokens: Queries that meet each visiting block of keys; None without a ring.
        hiding: Over which links a ring's transfers can hide; empty without a ring.
    """

    volume_bytes: int
    volume_bytes_backward: int
    rounding_bytes: int
    rounding_bytes_backward: int
    closed_form_bytes: int | None
    closed_form_bytes_backward: int | None
    closed_form: str | None
    closed_form_backward: str | None
    closed_form_source: str | None
    imbalance_total: float
    imbalance_lockstep: float
    memory_bytes_lower_bound: int
    peak_bytes: int
    peak_bytes_backward: int
    peak_uses_bytes: Mapping[str, int]
    peak_uses_bytes_backward: Mapping[str, int]
    saved_bytes: int
    peak_bytes_algorithm: int
    peak_bytes_algorithm_backward: int
    host_peak_bytes: int
    host_bytes: int
    host_bytes_backward: int
    project_flops: int
    project_flops_backward: int
    tokens_min: int
    tokens_max: int
    heads_max: int
    heads_mean: float
    kv_heads_max: int
    kv_copies: float
    block_tokens: int | None
    hiding: tuple[Hiding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer for one strategy and one problem.

    Attributes:
        strategy: Canonical spelling, options included.
        resolved: The same with what the strategy chose, forward; None if it is not legal.
        resolved_backward: As above, backward.
        work_hash: Of both plans, whatever the strategy's name; None likewise.
        problem: The problem that was asked about.
        reason: Why it is not legal; None if it is.
        hints: Alternatives that the strategy suggests; not planned.
        nearest: Legal alternatives, each planned, nearest first.
        evener: Placements of tokens that spread the work more evenly, the most even first.
        costs: None if it is not legal.
    """

    strategy: str
    resolved: str | None
    resolved_backward: str | None
    work_hash: str | None
    problem: Problem
    reason: str | None
    hints: tuple[str, ...]
    nearest: tuple[Alternative, ...]
    evener: tuple[Alternative, ...]
    costs: Costs | None

    @property
    def legal(self) -> bool:
        """Whether the strategy can do the problem."""
        return self.costs is not None


def explain(
    chosen: Chosen, problem: Problem, context: Context | None = None, *, alternatives: bool = True
) -> Explanation:
    """Plan both directions and prove them; count their costs, or find what is near and legal.

    Args:
        chosen: The strategy.
        problem: The problem.
        context: Facts for its planner.
        alternatives: Whether to look for them where it is not legal; each is planned.

    Raises:
        PlanError: The strategy made a plan that is wrong.
    """
    context = context or Context()
    try:
        programs = [proved_once(chosen, problem, direction, context) for direction in Direction]
    except UnsupportedError as error:
        return Explanation(
            strategy=chosen.text,
            resolved=None,
            resolved_backward=None,
            work_hash=None,
            problem=problem,
            reason=error.reason,
            hints=error.nearest,
            nearest=near(chosen, problem, context) if alternatives else (),
            evener=(),
            costs=None,
        )
    forward, backward = (program.plan for program in programs)
    costs = _costs(chosen, programs, context)
    resolved = [chosen.resolved(problem, direction, context).text for direction in Direction]
    return Explanation(
        strategy=chosen.text,
        resolved=resolved[0],
        resolved_backward=resolved[1],
        work_hash=f"{forward.work_hash} {backward.work_hash}",
        problem=problem,
        reason=None,
        hints=(),
        nearest=(),
        evener=evener(chosen, problem, context, costs.imbalance_total),
        costs=costs,
    )


def as_json(explanation: Explanation) -> dict[str, object]:
    """Return the fields of `--json`; the costs are null where the strategy is not legal."""
    problem, costs = explanation.problem, explanation.costs
    # An illegal strategy has the same fields, so that a reader of many finds them all.
    fields = dict.fromkeys(Costs.__dataclass_fields__) if costs is None else asdict(costs)
    return {
        "strategy": explanation.strategy,
        "resolved": explanation.resolved,
        "resolved_backward": explanation.resolved_backward,
        "work_hash": explanation.work_hash,
        **spelled(problem),
        "legal": explanation.legal,
        "reason": explanation.reason,
        "hints": list(explanation.hints),
        "nearest": [near.flags for near in explanation.nearest],
        "nearest_imbalance_total": [near.imbalance_total for near in explanation.nearest],
        "evener": [near.flags for near in explanation.evener],
        "evener_imbalance_total": [near.imbalance_total for near in explanation.evener],
        **fields,
    }


# Costs --------------------------------------------------------------------------------------


def _costs(chosen: Chosen, programs: Sequence[Program], context: Context) -> Costs:
    forward, backward = (program.plan for program in programs)
    problem = forward.problem
    books = [ledger(program) for program in programs]
    peaks = [max(book.peak_bytes) for book in books]
    needed = [max(ledger(program, ALGORITHM).peak_bytes) for program in programs]
    uses = [
        dict(book.uses_bytes[book.peak_bytes.index(peak)])
        for book, peak in zip(books, peaks, strict=True)
    ]
    forms = [chosen.volume(problem, direction, context) for direction in Direction]
    by_form = [max(form.received_bytes) if form else None for form in forms]
    tokens = _tokens(forward)
    heads = _heads(forward)
    counts = [held.bit_count() for held in heads]
    kv_counts = [problem.kv_heads(held).bit_count() for held in dict.fromkeys(heads)]
    block = _block_tokens(forward)
    rounding = [_rounding_bytes(chosen, each, context) for each in (forward, backward)]
    return Costs(
        volume_bytes=max(volumes.received_bytes(forward)),
        volume_bytes_backward=max(volumes.received_bytes(backward)),
        rounding_bytes=rounding[0],
        rounding_bytes_backward=rounding[1],
        closed_form_bytes=by_form[0],
        closed_form_bytes_backward=by_form[1],
        closed_form=forms[0].formula if forms[0] else None,
        closed_form_backward=forms[1].formula if forms[1] else None,
        closed_form_source=forms[0].source if forms[0] else None,
        imbalance_total=imbalance.imbalance_total(forward),
        imbalance_lockstep=imbalance.imbalance_lockstep(forward),
        memory_bytes_lower_bound=max(_ends_bytes(forward)),
        peak_bytes=peaks[0],
        peak_bytes_backward=peaks[1],
        peak_uses_bytes={use.value: size for use, size in uses[0].items()},
        peak_uses_bytes_backward={use.value: size for use, size in uses[1].items()},
        saved_bytes=max(_saved_bytes(forward)),
        peak_bytes_algorithm=needed[0],
        peak_bytes_algorithm_backward=needed[1],
        host_peak_bytes=max(peak for book in books for peak in book.host_peak_bytes),
        host_bytes=max(volumes.host_bytes(forward)),
        host_bytes_backward=max(volumes.host_bytes(backward)),
        project_flops=max(volumes.project_flops(forward)),
        project_flops_backward=max(volumes.project_flops(backward)),
        tokens_min=min(tokens),
        tokens_max=max(tokens),
        heads_max=max(counts),
        heads_mean=sum(counts) / len(counts),
        kv_heads_max=max(kv_counts),
        kv_copies=sum(kv_counts) / problem.heads_kv,
        block_tokens=block,
        hiding=() if block is None else hidings(problem, heads, block),
    )


def _rounding_bytes(chosen: Chosen, plan: Plan, context: Context) -> int:
    """Bytes that all ranks receive because what is sent of a chunk is rounded up."""
    if chosen.common.align == 1:
        return 0
    exact = replace(chosen, common=replace(chosen.common, align=1))
    least = proved_once(exact, plan.problem, plan.direction, context).plan
    return sum(volumes.received_bytes(plan)) - sum(volumes.received_bytes(least))


def _tokens(plan: Plan) -> list[int]:
    """Query tokens that each rank owns: those whose results end there."""
    owned: list[set[int]] = [set() for _ in range(plan.problem.cp)]
    for place, piece in plan.outputs:
        if not piece.tensor.on_kv:
            owned[place.rank].update(piece.chunks)
    return [sum(len(plan.q_chunks[chunk]) for chunk in chunks) for chunks in owned]


def _heads(plan: Plan) -> list[int]:
    """Query heads that each rank attends, as bit sets."""
    heads = [0] * plan.problem.cp
    for task in plan.tasks:
        if isinstance(task, Tile):
            heads[task.place.rank] |= task.heads
    return heads


def _ends_bytes(plan: Plan) -> list[int]:
    """Bytes of each rank's inputs and outputs: no run of the plan needs less memory."""
    sizes = [0] * plan.problem.cp
    for place, piece in (*plan.initial, *plan.outputs):
        sizes[place.rank] += piece_bytes(plan, piece)
    return sizes


def _saved_bytes(plan: Plan) -> list[int]:
    sizes = [0] * plan.problem.cp
    for place, piece in plan.saved:
        sizes[place.rank] += piece_bytes(plan, piece)
    return sizes


def _block_tokens(plan: Plan) -> int | None:
    """Queries of the widest tile of a plan that sends keys around; None if none is or attends."""
    rings = any(
        isinstance(task, Transfer)
        and task.leg.src.rank != task.leg.dst.rank
        and task.leg.pieces[0].tensor is Tensor.K
        for task in plan.tasks
    )
    if not rings:
        return None
    widths = (plan.tokens(task.reads[0]) for task in plan.tasks if isinstance(task, Tile))
    return max(widths, default=None)
