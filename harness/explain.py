"""Is a strategy legal for a problem, what is near if not, and what does it cost if so.

Legal means tried: the strategy made a plan for both directions and the verifier proved it. Every
alternative named is planned too. Costs are counted in the plan; where a closed form is known it
stands beside the count.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from harness import balance, volumes
from harness.errors import UnsupportedError
from harness.memory import ledger
from harness.plan import Plan, Tensor, Tile, Transfer
from harness.problem import Direction, Dtype, Problem
from harness.residency import Program
from harness.sizes import piece_bytes
from harness.strategy import Chosen, Context, Options
from harness.verify import verify
from strategies import EVERY_STRATEGY, STRATEGIES, usp

_MOST_NEAR = 6  # alternatives of one kind: more would not be read, and each is planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A device and the link that a ring's keys take.

    Attributes:
        name: For tables.
        flops_per_s: Dense bfloat16 or float16 peak.
        bandwidth_bytes_per_s: Of one device, one direction.
        source: Where both numbers stand.
    """

    name: str
    flops_per_s: float
    bandwidth_bytes_per_s: float
    source: str


LINKS = (
    Link(
        name="A100, NVLink",
        flops_per_s=312e12,  # NVIDIA A100 datasheet, bfloat16 tensor core, dense
        bandwidth_bytes_per_s=300e9,  # NVIDIA A100 datasheet, NVLink 600 GB/s, half per direction
        source="A100 datasheet: 312 TFLOP/s, NVLink 600 GB/s both ways",
    ),
    Link(
        name="A100, InfiniBand",
        flops_per_s=312e12,  # as above
        bandwidth_bytes_per_s=12.5e9,  # HDR100, 100 Gb/s; arXiv:2310.01889, table 2, "12.5"
        source="A100 datasheet; 100 Gb/s as in arXiv:2310.01889, table 2 (it has 24.5 thousand)",
    ),
    Link(
        name="H100, NVLink",
        flops_per_s=989e12,  # NVIDIA H100 datasheet, SXM, 1979 TFLOP/s with sparsity, half dense
        bandwidth_bytes_per_s=450e9,  # NVIDIA H100 datasheet, NVLink 900 GB/s, half per direction
        source="H100 SXM datasheet: 989 TFLOP/s dense, NVLink 900 GB/s both ways",
    ),
    Link(
        name="H100, InfiniBand",
        flops_per_s=989e12,  # as above
        bandwidth_bytes_per_s=50e9,  # NVIDIA ConnectX-7 datasheet, NDR 400 Gb/s
        source="H100 SXM datasheet; ConnectX-7 datasheet: 400 Gb/s",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """Whether a ring's transfers can hide behind its kernels over one link.

    Attributes:
        link: Name of the link.
        block_tokens: Shortest block that hides them, at peak rates, if no pair is masked.
        hidden: Whether the plan's blocks are that long.
        source: Where the rates stand.
    """

    link: str
    block_tokens: float
    hidden: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a legal strategy costs, on the busiest or fullest rank.

    Attributes:
        volume_bytes: Received in the forward pass of one layer, counted in the plan.
        volume_bytes_backward: As above, backward.
        closed_form_bytes: The same by formula; None where none is known (see `volumes`).
        closed_form_bytes_backward: As above, backward.
        closed_form: The forward formula, in the words of `volumes`; None likewise.
        closed_form_backward: As above, backward.
        closed_form_source: Where it is from; None likewise.
        imbalance_total: See `balance`, forward.
        imbalance_lockstep: See `balance`, forward.
        memory_bytes_lower_bound: Inputs and outputs of the forward pass.
        peak_bytes: The most held at a time in the forward pass (see `memory`).
        peak_bytes_backward: As above, backward.
        peak_uses_bytes: What the forward peak is made of, by use (see `memory.Use`).
        peak_uses_bytes_backward: As above, backward.
        saved_bytes: What stays for the backward pass (it may be part of these), host included.
        host_peak_bytes: The most held at a time in host memory, in either pass.
        host_bytes: Moved between a device and its host, both ways, in the forward pass.
        host_bytes_backward: As above, backward.
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
    host_peak_bytes: int
    host_bytes: int
    host_bytes_backward: int
    tokens_min: int
    tokens_max: int
    heads_max: int
    heads_mean: float
    kv_heads_max: int
    kv_copies: float
    block_tokens: int | None
    hiding: tuple[Hiding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A legal alternative: the flags that ask for it, and how evenly it spreads the work."""

    flags: str
    imbalance_total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer for one strategy and one problem.

    Attributes:
        strategy: Canonical spelling, options included.
        problem: What was asked.
        reason: Why it is not legal; None if it is.
        hints: What the strategy itself suggests; not tried.
        nearest: Legal alternatives, each planned, nearest first.
        costs: None if it is not legal.
    """

    strategy: str
    problem: Problem
    reason: str | None
    hints: tuple[str, ...]
    nearest: tuple[Near, ...]
    costs: Costs | None

    @property
    def legal(self) -> bool:
        """Whether the strategy can do the problem."""
        return self.costs is not None


def explain(chosen: Chosen, problem: Problem, context: Context | None = None) -> Explanation:
    """Plan both directions and prove them; count their costs, or find what is near and legal.

    Raises:
        PlanError: The strategy made a plan that is wrong.
    """
    context = context or Context()
    try:
        forward, backward = (chosen.plan(problem, direction, context) for direction in Direction)
    except UnsupportedError as error:
        return Explanation(
            strategy=chosen.text,
            problem=problem,
            reason=error.reason,
            hints=error.nearest,
            nearest=_near(chosen, problem, context),
            costs=None,
        )
    programs = [verify(plan) for plan in (forward, backward)]
    return Explanation(
        strategy=chosen.text,
        problem=problem,
        reason=None,
        hints=(),
        nearest=(),
        costs=_costs(chosen, programs, context),
    )


def as_json(explanation: Explanation) -> dict[str, object]:
    """Return the fields of `--json`; the costs are null where the strategy is not legal."""
    problem, costs = explanation.problem, explanation.costs
    # An illegal strategy has the same fields, so that a reader of many finds them all.
    fields = dict.fromkeys(Costs.__dataclass_fields__) if costs is None else asdict(costs)
    return {
        "strategy": explanation.strategy,
        "pattern": problem.pattern.text,
        "seqlen_q": problem.seqlen_q,
        "seqlen_kv": problem.seqlen_kv,
        "heads_q": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "batch": problem.batch,
        "dtype": problem.dtype.value,
        "cp": problem.cp,
        "hidden": problem.hidden,
        "rotary": problem.rotary,
        "legal": explanation.legal,
        "reason": explanation.reason,
        "hints": list(explanation.hints),
        "nearest": [near.flags for near in explanation.nearest],
        "nearest_imbalance_total": [near.imbalance_total for near in explanation.nearest],
        **fields,
    }


# Costs --------------------------------------------------------------------------------------


def _costs(chosen: Chosen, programs: Sequence[Program], context: Context) -> Costs:
    forward, backward = (program.plan for program in programs)
    problem = forward.problem
    books = [ledger(program) for program in programs]
    peaks = [max(book.peak_bytes) for book in books]
    uses = [
        dict(book.uses_bytes[book.peak_bytes.index(peak)])
        for book, peak in zip(books, peaks, strict=True)
    ]
    ulysses = usp.degrees(problem, chosen.options, context)[0] if chosen.strategy is _USP else 1
    forms = [
        volumes.closed_form(chosen, problem, direction, ulysses=ulysses) for direction in Direction
    ]
    by_form = [max(form.received_bytes) if form else None for form in forms]
    tokens = _tokens(forward)
    heads = _heads(forward)
    counts = [held.bit_count() for held in heads]
    kv_counts = [problem.kv_heads(held).bit_count() for held in dict.fromkeys(heads)]
    block = _block_tokens(forward)
    return Costs(
        volume_bytes=max(volumes.received_bytes(forward)),
        volume_bytes_backward=max(volumes.received_bytes(backward)),
        closed_form_bytes=by_form[0],
        closed_form_bytes_backward=by_form[1],
        closed_form=forms[0].formula if forms[0] else None,
        closed_form_backward=forms[1].formula if forms[1] else None,
        closed_form_source=forms[0].source if forms[0] else None,
        imbalance_total=balance.imbalance_total(forward),
        imbalance_lockstep=balance.imbalance_lockstep(forward),
        memory_bytes_lower_bound=max(_ends_bytes(forward)),
        peak_bytes=peaks[0],
        peak_bytes_backward=peaks[1],
        peak_uses_bytes={use.value: size for use, size in uses[0].items()},
        peak_uses_bytes_backward={use.value: size for use, size in uses[1].items()},
        saved_bytes=max(_saved_bytes(forward)),
        host_peak_bytes=max(peak for book in books for peak in book.host_peak_bytes),
        host_bytes=max(volumes.host_bytes(forward)),
        host_bytes_backward=max(volumes.host_bytes(backward)),
        tokens_min=min(tokens),
        tokens_max=max(tokens),
        heads_max=max(counts),
        heads_mean=sum(counts) / len(counts),
        kv_heads_max=max(kv_counts),
        kv_copies=sum(kv_counts) / problem.heads_kv,
        block_tokens=block,
        hiding=() if block is None else _hiding(problem, heads, block),
    )


_USP = STRATEGIES["usp"]


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
    """Queries of the widest tile of a plan that sends keys around; None of one that does not."""
    rings = any(
        isinstance(task, Transfer)
        and task.leg.src.rank != task.leg.dst.rank
        and task.leg.pieces[0].tensor is Tensor.K
        for task in plan.tasks
    )
    if not rings:
        return None
    return max(plan.tokens(task.reads[0]) for task in plan.tasks if isinstance(task, Tile))


def hiding_block_tokens(
    problem: Problem, link: Link, *, heads_q: int | None = None, heads_kv: int | None = None
) -> float:
    """Return the shortest block of a ring that hides its transfer: c >= (F / B) (b / 2) (m / n).

    A block of c queries and c keys takes 2 c^2 n (d_k + d_v) flops, and its keys and values are
    c m (d_k + d_v) b bytes, for n query heads, m KV heads and b bytes per element. With as many
    KV heads as query heads, in bfloat16, c >= F / B. At peak rates and without latency, so a real
    ring needs longer blocks; a pattern that masks a part of each block, longer by that part.

    Args:
        problem: Its heads and dtype.
        link: Rates F and B.
        heads_q: n of one rank; None = all of the problem's.
        heads_kv: m of one rank; None = all of the problem's.

    Source:
        Liu et al., Ring Attention, arXiv:2310.01889, section 3.
    """
    rates = link.flops_per_s / link.bandwidth_bytes_per_s
    n, m = heads_q or problem.heads_q, heads_kv or problem.heads_kv
    return rates * problem.dtype.bytes / 2 * m / n


def _hiding(problem: Problem, heads: Iterable[int], block_tokens: int) -> tuple[Hiding, ...]:
    if problem.dtype not in (Dtype.BFLOAT16, Dtype.FLOAT16):
        return ()  # the rates are those of 16-bit products
    fullest = max(heads, key=int.bit_count)
    held = problem.kv_heads(fullest).bit_count()
    found = []
    for link in LINKS:
        shortest = hiding_block_tokens(problem, link, heads_q=fullest.bit_count(), heads_kv=held)
        found.append(
            Hiding(
                link=link.name,
                block_tokens=shortest,
                hidden=block_tokens >= shortest,
                source=link.source,
            )
        )
    return tuple(found)


# What is near -------------------------------------------------------------------------------


def _near(chosen: Chosen, problem: Problem, context: Context) -> tuple[Near, ...]:
    """Alternatives that were planned: the same degree first, then others, then other strategies."""
    found: list[Near] = []
    for candidates in (_other_degrees(chosen, problem), _other_cps(chosen, problem)):
        found += _legal(candidates, context)
    if not found:
        every = STRATEGIES if problem.hidden is None else EVERY_STRATEGY
        others = [Chosen(other, other.defaults) for other in every.values()]
        found += _legal(((other, problem) for other in others), context)
    return tuple(found)


def _legal(candidates: Iterable[tuple[Chosen, Problem]], context: Context) -> Iterator[Near]:
    found = 0
    for chosen, problem in candidates:
        try:
            forward, _ = (chosen.plan(problem, direction, context) for direction in Direction)
        except UnsupportedError:
            continue
        flags = f"--strategy {_spelled(chosen, problem)} --cp {problem.cp}"
        yield Near(flags=flags, imbalance_total=balance.imbalance_total(forward))
        found += 1
        if found == _MOST_NEAR:
            return


def _other_degrees(chosen: Chosen, problem: Problem) -> Iterator[tuple[Chosen, Problem]]:
    """The same cp otherwise: as a mesh, with another inner ring, or in other stages of heads."""
    degrees = [d for d in range(problem.cp, 1, -1) if problem.cp % d == 0]
    accepts = chosen.strategy.accepts
    if "ulysses" in accepts:
        yield from _with(
            chosen,
            problem,
            [replace(chosen.options, ulysses=u, ring=problem.cp // u) for u in degrees],
        )
    elif "inner" in accepts:
        yield from _with(chosen, problem, [replace(chosen.options, inner=w) for w in degrees])
    elif "stage_heads" in accepts:
        yield from _with(chosen, problem, _other_stages(chosen.options, problem, degrees))
    elif chosen.strategy is STRATEGIES["ulysses"]:
        # USP is Ulysses over fewer ranks, with a ring between the groups.
        mesh = Chosen(_USP, replace(_USP.defaults, prune=chosen.options.prune))
        yield from _with(
            mesh, problem, [replace(mesh.options, ulysses=u, ring=problem.cp // u) for u in degrees]
        )


def _other_stages(options: Options, problem: Problem, degrees: Sequence[int]) -> Iterator[Options]:
    """A short last stage, stages of nearly so many heads, and rings of smaller groups."""
    asked = options.stage_heads
    if asked is not None:
        yield replace(options, short_last=True)
        for u in sorted(range(1, problem.heads_q + 1), key=lambda u: (abs(u - asked), u)):
            yield replace(options, stage_heads=u)
    for ring in reversed(degrees):
        yield replace(options, ring=ring, stage_heads=None)


def _with(
    chosen: Chosen, problem: Problem, options: Iterable[Options]
) -> Iterator[tuple[Chosen, Problem]]:
    for option in options:
        yield Chosen(chosen.strategy, option), problem


def _other_cps(chosen: Chosen, problem: Problem) -> Iterator[tuple[Chosen, Problem]]:
    """The same strategy on fewer ranks: divisors of cp, query heads and KV heads, nearest first."""
    counts = (problem.cp, problem.heads_q, problem.heads_kv)
    degrees = {d for n in counts for d in range(1, min(n, problem.cp - 1) + 1) if n % d == 0}
    for cp in sorted(degrees, reverse=True):
        yield chosen, replace(problem, cp=cp)


def _spelled(chosen: Chosen, problem: Problem) -> str:
    """As a user would type it; a mesh as U x R."""
    u = chosen.options.ulysses
    if chosen.strategy is _USP and u is not None:
        return chosen.text.replace(f"ulysses={u}", f"{u}x{problem.cp // u}")
    return chosen.text
