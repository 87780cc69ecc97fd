"""Striped attention: rank r owns tokens r, r + cp, r + 2cp, ...; then a ring as usual.

Under a causal pattern every (rank, step) is a triangle over its own indices, with the diagonal when
the keys' stripe is not later than the queries', without it otherwise:

    keys from rank <= r:  j <= i          keys from rank > r:  j <= i - 1

so all ranks carry the same work at every step, up to half a diagonal.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import stripe
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.closed_forms import ring_volume
from harness.planning.frameworks import FrameworkSetting, packaged
from harness.planning.options import PRUNE, option
from harness.planning.rings import Holder, ring_attention
from harness.planning.strategy import Context, Strategy, Training, ring_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a ring of all ranks over stripes; legal for every problem."""
    cp = problem.cp

    def source(rank: int, step: int) -> int:
        return (rank - step) % cp

    def came_from(rank: int, step: int) -> Holder:
        return (rank - 1) % cp, step - 1

    queries, keys = shard_both(problem, stripe)
    b = PlanBuilder(
        problem, name, direction, queries, keys, prune=options.prune, align=context.align
    )
    ring_attention(b, source, came_from)
    return b.build()


_VOLUME = (
    "Liu et al. (arXiv:2310.01889, section 3): cp - 1 blocks of K and V pass each rank; backward "
    "adds their gradients, in accumulator precision; placement changes no volume"
)


def settings(problem: Problem, options: Options) -> Iterator[FrameworkSetting]:
    """Name what frameworks call it."""
    del options
    yield packaged(problem, "ring-flash-attn/stripe", "stripe_flash_attn_func(causal=True)")


STRATEGY = Strategy(
    name="stripe",
    summary="ring over every cp-th token; balanced for causal at every step",
    paper="Brandon et al., Striped Attention, arXiv:2311.09431, section 3",
    plan=plan,
    defaults=Options(),
    aliases=("strip", "striped"),
    volume=partial(ring_volume, _VOLUME),
    settings=settings,
    training=Training(released=ring_loop),
)
