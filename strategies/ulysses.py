"""Ulysses: trade tokens for heads, attend whole sequences, trade back.

Before, rank r holds all heads of its tokens; one all-to-all each of q, k and v later it holds its
heads of all tokens and attends them as on one device; an all-to-all of out restores the tokens.

              tokens                          tokens
           r0  r1  r2  r3                  0 1 2 3 ...
    heads  |   |   |   |     all-to-all    ----------- r0
           |   |   |   |     ---------->   ----------- r1
           |   |   |   |                   ----------- r2
           |   |   |   |                   ----------- r3

Heads need not divide: ranks take runs that differ by one where they must, cut so that as few KV
heads as possible are copied. A KV head whose query heads sit on several ranks is copied to each,
and its owner adds their partial dk and dv.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import contiguous
from harness.plan.tasks import GATHERED, Tensor
from harness.planning.builder import PlanBuilder, balanced_heads, shard_both
from harness.planning.closed_forms import turn_volume
from harness.planning.collectives import (
    HeadGroups,
    gradients_to_tokens,
    hold_for_heads,
    out_to_tokens,
    seats_of,
    to_heads,
)
from harness.planning.frameworks import FrameworkSetting, deepspeed, megatron, packaged
from harness.planning.options import PRUNE, option
from harness.planning.strategy import Checks, Context, Strategy, Training, ring_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan two turns and one tile per rank.

    Raises:
        UnsupportedError: There are more ranks than query heads.
    """
    cp = problem.cp
    if cp > problem.heads_q:
        raise UnsupportedError(
            f"ulysses: cp ({cp}) must not exceed heads_q ({problem.heads_q}): "
            "a rank without a head has no work",
            (
                f"ulysses at cp <= {problem.heads_q}",
                *(
                    f"usp:{u}x{cp // u} at cp {cp}"
                    for u in range(problem.heads_q, 0, -1)
                    if cp % u == 0
                ),
            ),
        )
    queries, keys = shard_both(problem, contiguous)
    one, align = (0,) * cp, context.align
    b = PlanBuilder(
        problem, name, direction, queries, keys, prune=options.prune, groups=one, align=align
    )
    groups = HeadGroups((tuple(range(cp)),), balanced_heads(problem, cp))
    seats = seats_of(b, groups)
    hold_for_heads(b, seats)
    forward = direction is Direction.FORWARD
    for tensor in (Tensor.Q, Tensor.K, Tensor.V) if forward else (Tensor.DOUT,):
        to_heads(b, groups, tensor)
    for rank, seat in enumerate(seats):
        b.tile(rank, seat.q, seat.kv, seat.heads, q_version=GATHERED, kv_version=GATHERED)
    if forward:
        out_to_tokens(b, groups, seats)
    else:
        gradients_to_tokens(b, groups, seats)
    return b.build()


def alternatives(problem: Problem, options: Options) -> Iterator[str]:
    """Yield USP: Ulysses over fewer ranks, with a ring between the groups."""
    rest = "" if options.prune else ",prune=false"
    for u in range(problem.cp, 1, -1):
        if problem.cp % u == 0:
            yield f"usp:{u}x{problem.cp // u}{rest}"


_VOLUME = (
    "Jacobs et al. (arXiv:2309.14509, section 3.2): all-to-alls of q, k, v and out; KV copies and "
    "backward derived here"
)


def settings(problem: Problem, options: Options) -> Iterator[FrameworkSetting]:
    """Name what frameworks call it."""
    del options
    yield megatron(problem, "a2a", None, (problem.cp, 1))
    yield deepspeed(problem)
    yield packaged(problem, "yunchang/ulysses", f"UlyssesAttention (degree {problem.cp})")


STRATEGY = Strategy(
    name="ulysses",
    summary="all-to-all from tokens to heads and back",
    paper="Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509, section 3",
    plan=plan,
    defaults=Options(),
    aliases=("a2a",),
    volume=partial(turn_volume, _VOLUME),
    alternatives=alternatives,
    settings=settings,
    training=Training(released=ring_loop),
    checks=Checks(
        options=("prune=false",),
        layers=("checkpoint=layer,offload=true",),
        least_heads=lambda cp: cp,
    ),
)
