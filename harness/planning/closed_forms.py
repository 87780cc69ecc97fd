"""How many bytes each rank receives, in closed form.

The closed forms hold for the full pattern, lengths that 2 * cp divides (so that all chunks of every
placement are equal) and query heads that the Ulysses degree divides. They are written from the
papers' counts and share nothing with the planners, so that one can be held against the other.

Most strategies are one mesh of U x R ranks: U trade tokens for heads, R form a ring. Per rank,
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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from harness.plan.dealing import DEALT
from harness.plan.problem import Direction, Problem
from harness.planning.options import placement_of

O = TypeVar("O")  # noqa: E741  # the dataclass of a strategy's options
C = TypeVar("C")


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


_Form = Mapping[Direction, str]
_RING_FORWARD = "(cp-1) T heads_kv (d_k + d_v) b"
_RING: _Form = {
    Direction.FORWARD: _RING_FORWARD,
    Direction.BACKWARD: _RING_FORWARD + " + hops T heads_kv (d_k + d_v) a",
}
_QUERY_RING: _Form = {
    Direction.FORWARD: "(cp-1) t heads_q (d_k b + (d_v + 1) a)",
    Direction.BACKWARD: "t heads_q ((cp-1) ((d_k + d_v) b + 2 a_lse) + hops d_k a)",
}
_TURN: _Form = {
    Direction.FORWARD: "(cp-1) (t n d_k + T m (d_k + d_v)) b + t (heads_q - n) d_v b",
    Direction.BACKWARD: (
        "(cp-1) t n d_v b + t (heads_q - n) d_k b "
        "+ T (d_k + d_v) (whole KV heads elsewhere b + shared ones a)"
    ),
}
_MESH: _Form = {
    Direction.FORWARD: (
        "(U-1) (t n d_k + T m (d_k + d_v)) b + (R-1) U T m (d_k + d_v) b + t (heads_q - n) d_v b"
    ),
    Direction.BACKWARD: (
        "(U-1) t n d_v b + U T m (d_k + d_v) ((R-1) b + hops a) + t (heads_q - n) d_k b "
        "+ T (d_k + d_v) (whole KV heads elsewhere b + shared ones a)"
    ),
}


def ring_volume(
    source: str, problem: Problem, direction: Direction, options: object, context: object
) -> Volume | None:
    """Return the bytes that each rank receives where keys travel all ranks.

    Args:
        source: Where the form is from.
        problem: The problem.
        direction: Forward or backward.
        options: `prune` says whether the owner keeps its own share of dk and dv; else yes.
        context: Not asked.

    Returns:
        None outside the range of the form.
    """
    del context
    if placement_of(options) in DEALT:
        return None
    prune = getattr(options, "prune", True)
    return _volume(problem, direction, 1, _RING, prune=prune, source=source)


def query_ring_volume(
    source: str, problem: Problem, direction: Direction, options: object, context: object
) -> Volume | None:
    """Return what each rank receives where queries travel all ranks; see `ring_volume`.

    Partial (out, lse) come home from every other rank, in accumulator precision. Backward, dq rides
    with its queries as dk and dv ride with keys.
    """
    del context
    if not _holds(problem, 1):
        return None
    cp, b, a = problem.cp, problem.dtype.bytes, problem.dtype.accumulator_bytes
    rows = problem.batch * problem.seqlen_q // cp * problem.heads_q
    d_k, d_v = problem.head_dim, problem.head_dim_v
    if direction is Direction.FORWARD:
        received = (cp - 1) * rows * (d_k * b + (d_v + 1) * a)
    else:
        hops = cp - 1 if getattr(options, "prune", True) or cp == 1 else cp
        grads = d_k * (b if problem.round_sent else a)
        received = rows * ((cp - 1) * ((d_k + d_v) * b + 2 * a) + hops * grads)
    formula = _QUERY_RING[direction]
    return Volume(received_bytes=(received,) * cp, formula=formula, source=source)


def turn_volume(
    source: str, problem: Problem, direction: Direction, options: object, context: object
) -> Volume | None:
    """Return the bytes that each rank receives in an all-to-all of all ranks; see `ring_volume`."""
    del options, context
    return _volume(problem, direction, problem.cp, _TURN, prune=True, source=source)


def mesh_volume(
    source: str,
    degrees: Callable[[Problem, O, C], tuple[int, int]],
    problem: Problem,
    direction: Direction,
    options: O,
    context: C,
) -> Volume | None:
    """Return the bytes that each rank receives on a mesh of U x R ranks; see `ring_volume`.

    Args:
        source: Where the form is from.
        degrees: (problem, options, context) -> (U, R).
        problem: The problem.
        direction: Forward or backward.
        options: `prune`, and whether the ring is inside (`ring_inside`).
        context: As `degrees` reads it.
    """
    if placement_of(options) in DEALT:
        return None
    return _volume(
        problem,
        direction,
        degrees(problem, options, context)[0],
        _MESH,
        prune=getattr(options, "prune", True),
        ring_inside=getattr(options, "ring_inside", False),
        source=source,
    )


def _volume(
    problem: Problem,
    direction: Direction,
    ulysses: int,
    form: _Form,
    *,
    prune: bool,
    source: str,
    ring_inside: bool = False,
) -> Volume | None:
    if not _holds(problem, ulysses):
        return None
    by_position = _mesh_bytes(problem, direction, ulysses, prune=prune)
    ring = problem.cp // ulysses
    ranks = range(problem.cp)
    position = [rank // ring if ring_inside else rank % ulysses for rank in ranks]
    return Volume(
        received_bytes=tuple(by_position[p] for p in position),
        formula=form[direction],
        source=source,
    )


def _holds(problem: Problem, ulysses: int) -> bool:
    """Whether everything divides, and nothing is masked."""
    cp, lengths = problem.cp, (problem.seqlen_q, problem.seqlen_kv)
    full = problem.pattern.total_area == problem.seqlen_q * problem.seqlen_kv
    even = not any(length % (2 * cp) for length in lengths)
    return full and even and not cp % ulysses and not problem.heads_q % ulysses


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
