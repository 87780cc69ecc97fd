"""Zigzag ring: rank r owns chunks r and 2cp-1-r, so a causal pattern loads all ranks alike.

cp = 4, 8 chunks, their owners, and how many chunk pairs a causal pattern asks of each chunk:

    chunk   0    1    2    3    4    5    6    7
    owner   0    1    2    3    3    2    1    0
    work   0.5  1.5  2.5  3.5  4.5  5.5  6.5  7.5      every rank: 8

Visiting keys from an earlier rank meet both chunks of the queries with their first half only; keys
from a later rank meet the second chunk with both halves: always half a full step. Any other pattern
is legal too; the placement then balances as well as it happens to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement, zigzag
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.closed_forms import ring_volume
from harness.planning.frameworks import FrameworkSetting, megatron, packaged, torchtitan
from harness.planning.options import PRUNE, option
from harness.planning.rings import Holder, ring_attention
from harness.planning.strategy import Checks, Context, Strategy, Training, ring_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a ring of all ranks over zigzag chunks; legal for every problem."""
    cp = problem.cp

    def source(rank: int, step: int) -> int:
        return (rank - step) % cp

    def came_from(rank: int, step: int) -> Holder:
        return (rank - 1) % cp, step - 1

    queries, keys = shard_both(problem, zigzag)
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
    yield megatron(problem, "p2p", Placement.ZIGZAG, (1, problem.cp))
    yield torchtitan(problem, "alltoall", Placement.ZIGZAG)
    yield packaged(problem, "ring-flash-attn/zigzag", "zigzag_ring_flash_attn_func(causal=True)")


STRATEGY = Strategy(
    name="zigzag",
    summary="ring over head-tail chunk pairs; balanced for causal",
    paper="head-tail chunks as in Llama 3, arXiv:2407.21783, section 3.3.2",
    plan=plan,
    defaults=Options(),
    aliases=("dual-chunk-swap", "head-tail"),
    volume=partial(ring_volume, _VOLUME),
    settings=settings,
    training=Training(released=ring_loop),
    checks=Checks(layers=("checkpoint=layer,sum_gradients=true",)),
)
