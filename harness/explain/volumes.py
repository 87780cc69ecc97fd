"""How many bytes each rank receives: counted in a plan, and in closed form.

The closed forms hold for the full pattern, lengths that 2 * cp divides (so that all chunks of every
placement are equal) and query heads that the Ulysses degree divides. They are written from the
papers' counts and share nothing with the planners, so that one can be held against the other.

All strategies here are one mesh of U x R ranks: U trade tokens for heads, R form a ring. Per rank,
with T = seqlen_kv / cp and t = seqlen_q / cp tokens, n query heads and m KV heads (copies count),
b bytes per element and a bytes per element of a partial gradient on its way:

    forward     turn of q, k, v     (U-1) (t n d_k + T m (d_k + d_v)) b
                ring                (R-1) U T m (d_k + d_v) b
                turn of out         t (heads_q - n) d_v b
    backward    turn of dout        (U-1) t n d_v b
                ring                (R-1) U T m (d_k + d_v) b  +  hops U T m (d_k + d_v) a
                turn of dq          t (heads_q - n) d_k b
                turn of dk, dv      T (d_k + d_v) (other ranks' whole KV heads b + shared ones a)

hops = R - 1 if the owner keeps its own share of dk and dv (pruned), R in the original ring. The
turn's backward moves dout alone, because q, k and v were saved gathered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sizes import leg_bytes, linear_flops, traffic
from harness.plan.tasks import Linear, LinearOp, legs_of
from harness.planning.strategy import Chosen


def received_bytes(plan: Plan) -> tuple[int, ...]:
    """Count what each rank receives from other ranks, in bytes, from the plan's own transfers."""
    return tuple(traffic(plan)[1])


def host_bytes(plan: Plan) -> tuple[int, ...]:
    """Count what moves between each rank's device and its own host, both ways, in bytes."""
    moved = [0] * plan.problem.cp
    for task in plan.tasks:
        for leg in legs_of(task):
            if leg.src.rank == leg.dst.rank:
                moved[leg.dst.rank] += leg_bytes(plan, leg)
    return tuple(moved)


def project_flops(plan: Plan) -> tuple[int, ...]:
    """Count what each rank spends on projections of q, k and v, the first time and again."""
    spent = [0] * plan.problem.cp
    for task in plan.tasks:
        if isinstance(task, Linear) and task.op is LinearOp.PROJECT:
            spent[task.place.rank] += linear_flops(plan, task)
    return tuple(spent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A closed form and its value.

    Attributes:
        received_bytes: By rank, for one direction of one attention layer.
        formula: The closed form, in the words of this module.
        source: Where it is published, or what it is derived from.
    """

    received_bytes: tuple[int, ...]
    formula: str
    source: str


class _Form(NamedTuple):
    formula: Mapping[Direction, str]
    source: str


_RING = "(cp-1) T heads_kv (d_k + d_v) b"
_RING_BACK = _RING + " + hops T heads_kv (d_k + d_v) a"
_TURN = "(cp-1) (t n d_k + T m (d_k + d_v)) b + t (heads_q - n) d_v b"
_TURN_BACK = (
    "(cp-1) t n d_v b + t (heads_q - n) d_k b "
    "+ T (d_k + d_v) (whole KV heads elsewhere b + shared ones a)"
)
_MESH = "(U-1) (t n d_k + T m (d_k + d_v)) b + (R-1) U T m (d_k + d_v) b + t (heads_q - n) d_v b"
_MESH_BACK = (
    "(U-1) t n d_v b + U T m (d_k + d_v) ((R-1) b + hops a) + t (heads_q - n) d_k b "
    "+ T (d_k + d_v) (whole KV heads elsewhere b + shared ones a)"
)
_RING_SOURCE = (
    "Liu et al. (arXiv:2310.01889, section 3): cp - 1 blocks of K and V pass each rank; backward "
    "adds their gradients, in accumulator precision"
)


def _ring_form(source: str) -> _Form:
    return _Form({Direction.FORWARD: _RING, Direction.BACKWARD: _RING_BACK}, source)


_FORMS: Mapping[str, _Form] = {
    "ring": _ring_form(_RING_SOURCE),
    "ring-classic": _ring_form(_RING_SOURCE),
    "zigzag": _ring_form(_RING_SOURCE + "; placement changes no volume"),
    "stripe": _ring_form(_RING_SOURCE + "; placement changes no volume"),
    "double_ring": _ring_form(
        "Gu et al. (arXiv:2406.18485, section 4.3): the ring's volume, over other links"
    ),
    "allgather": _ring_form(
        "Llama 3 (arXiv:2407.21783, section 3.3.2): an all-gather of K and V, cp - 1 shards each; "
        "backward gathers again and reduce-scatters the partial gradients"
    ),
    "ulysses": _Form(
        {Direction.FORWARD: _TURN, Direction.BACKWARD: _TURN_BACK},
        "Jacobs et al. (arXiv:2309.14509, section 3.2): all-to-alls of q, k, v and out; "
        "KV copies and backward derived here",
    ),
    "usp": _Form(
        {Direction.FORWARD: _MESH, Direction.BACKWARD: _MESH_BACK},
        "derived: Ulysses (arXiv:2309.14509) over U, ring (arXiv:2310.01889) over R, as USP "
        "(arXiv:2405.07719, section 3) composes them",
    ),
}


def closed_form(
    chosen: Chosen, problem: Problem, direction: Direction, *, ulysses: int = 1
) -> Volume | None:
    """Return what each rank receives by formula, or None where no closed form is known.

    Args:
        chosen: The strategy and its options.
        problem: What is computed.
        direction: Forward or backward.
        ulysses: U, the degree of the head axis, of a strategy that has both axes (USP).
    """
    cp = problem.cp
    form = _FORMS.get(chosen.strategy.name)
    mesh = {"ulysses": cp, "usp": ulysses}.get(chosen.strategy.name, 1)
    full = problem.pattern.total_area == problem.seqlen_q * problem.seqlen_kv
    even = problem.seqlen_q % (2 * cp) == 0 and problem.seqlen_kv % (2 * cp) == 0
    if form is None or not full or not even or cp % mesh or problem.heads_q % mesh:
        return None
    # The reduce-scatter of the gathering strategy never carries the owner's own share.
    prune = chosen.options.prune or chosen.strategy.name == "allgather"
    by_position = _mesh_bytes(problem, direction, mesh, prune=prune)
    ring = cp // mesh
    position = [r // ring if chosen.options.ring_inside else r % mesh for r in range(cp)]
    return Volume(
        received_bytes=tuple(by_position[p] for p in position),
        formula=form.formula[direction],
        source=form.source,
    )


class _Run(NamedTuple):
    """KV heads of a rank that has `heads_q / U` consecutive query heads."""

    whole: int
    """Those whose query heads it has all."""
    shared: int
    """Those whose query heads other ranks have too."""


def _runs(problem: Problem, ulysses: int) -> list[_Run]:
    n, group = problem.heads_q // ulysses, problem.group
    runs = []
    for start in range(0, problem.heads_q, n):
        stop = start + n
        held = (stop - 1) // group - start // group + 1
        whole = max(stop // group - -(-start // group), 0)
        runs.append(_Run(whole, held - whole))
    return runs


def _mesh_bytes(
    problem: Problem, direction: Direction, ulysses: int, *, prune: bool
) -> tuple[int, ...]:
    """Bytes received by position on the head axis; the formulas of the module's docstring."""
    cp, u, r = problem.cp, ulysses, problem.cp // ulysses
    t_q, t_kv = problem.seqlen_q // cp, problem.seqlen_kv // cp
    n, others = problem.heads_q // u, problem.heads_q - problem.heads_q // u
    d_k, d_v = problem.head_dim, problem.head_dim_v
    b = problem.dtype.bytes
    a = b if problem.round_sent else problem.dtype.accumulator_bytes
    kv = t_kv * (d_k + d_v)
    hops = r - 1 if prune or r == 1 else r
    runs = _runs(problem, u)
    totals = []
    for whole, shared in runs:
        m = whole + shared
        ring = (r - 1) * u * kv * m * b
        if direction is Direction.FORWARD:
            turn = (u - 1) * (t_q * n * d_k + kv * m) * b + t_q * others * d_v * b
        else:
            ring += hops * u * kv * m * a
            turn = (u - 1) * t_q * n * d_v * b + t_q * others * d_k * b
            turn += kv * b * (sum(run.whole for run in runs) - whole)
            turn += kv * a * (sum(run.shared for run in runs) - shared)
        totals.append(problem.batch * (ring + turn))
    return tuple(totals)
