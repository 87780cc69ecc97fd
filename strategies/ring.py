"""Ring attention: queries stay, keys and values travel a ring of ranks.

At step t rank r attends the keys of rank r - t, while it passes them to rank r + 1. After cp steps
every query has met every key; partial outputs merge by log-sum-exp.

    step    0        1        2        3
    rank 0  q0·k0    q0·k3    q0·k2    q0·k1
    rank 1  q1·k1    q1·k0    q1·k3    q1·k2
    rank 2  q2·k2    q2·k1    q2·k0    q2·k3
    rank 3  q3·k3    q3·k2    q3·k1    q3·k0

With `direction=both` half of each chunk (a) travels to the right and half (b) to the left, so that
full-duplex links carry half the bytes each way.

    step    0            1            2
    rank 0  q0·(a0 b0)   q0·(a2 b1)   q0·(a1 b2)
    rank 1  q1·(a1 b1)   q1·(a0 b2)   q1·(a2 b0)
    rank 2  q2·(a2 b2)   q2·(a1 b0)   q2·(a0 b1)

Under a causal pattern contiguous chunks leave the last rank with almost twice the mean work; other
placements are options, `zigzag` and `stripe` also strategies of their own.
`ring-classic` sends everything around the whole ring whether or not the pattern needs it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement, cut_each
from harness.planning.builder import PlanBuilder
from harness.planning.closed_forms import ring_volume
from harness.planning.frameworks import FrameworkSetting, megatron, packaged, torchtitan
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, PRUNE, option
from harness.planning.rings import Holder, Ring, rings_attention, seats
from harness.planning.strategy import Checks, Context, Strategy, Training, ring_loop, with_chunk


class Way(StrEnum):
    """Which way round keys travel."""

    RIGHT = "right"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)
    placement: Placement = option(Placement.CONTIGUOUS, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)
    direction: Way = option(Way.RIGHT, "which way round keys travel; both: half of each chunk each")


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a ring of all ranks, or two that turn against each other; legal for every problem."""
    cp = problem.cp
    ways = (1, -1) if options.direction is Way.BOTH else (1,)
    dealt = deal_tokens(problem.pattern, cp, options.placement, options.chunk)
    queries, keys = (cut_each(sharding, len(ways)) for sharding in dealt)
    b = PlanBuilder(
        problem, name, direction, queries, keys, prune=options.prune, align=context.align
    )

    def ring(part: int, way: int) -> Ring:
        def source(rank: int, step: int) -> int:
            return (rank - way * step) % cp

        def came_from(rank: int, step: int) -> Holder:
            return (rank - way) % cp, step - 1

        return Ring(seats(b, part, len(ways)), cp, source, came_from)

    rings_attention(b, [ring(part, way) for part, way in enumerate(ways)])
    return b.build()


_VOLUME = (
    "Liu et al. (arXiv:2310.01889, section 3): cp - 1 blocks of K and V pass each rank; backward "
    "adds their gradients, in accumulator precision"
)

PAPER = "Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, figure 2"


def settings(problem: Problem, options: Options) -> Iterator[FrameworkSetting]:
    """Name what frameworks call it: they send everything, needed or not."""
    if options.direction is not Way.RIGHT:
        return
    if options.placement is Placement.DOCUMENTS:
        yield megatron(problem, "p2p", options.placement, (1, problem.cp))
    text = problem.pattern.text
    if options.placement is Placement.CONTIGUOUS and (not options.prune or text == "full"):
        yield torchtitan(problem, "alltoall", options.placement)
        yield packaged(
            problem, "ring-flash-attn/ring", f"ring_flash_attn_func(causal={text != 'full'})"
        )


STRATEGY = Strategy(
    name="ring",
    summary="keys travel a ring; contiguous chunks",
    paper=PAPER,
    plan=plan,
    defaults=Options(),
    aliases=("p2p",),
    resolve=with_chunk,
    volume=partial(ring_volume, _VOLUME),
    compared=("direction=both", "placement=balanced", "placement=documents"),
    settings=settings,
    training=Training(released=ring_loop),
    checks=Checks(
        options=("placement=balanced,chunk=3", "direction=both", "direction=both,prune=false")
    ),
)

CLASSIC = Strategy(
    name="ring-classic",
    summary="the same ring, sending everything everywhere",
    paper=PAPER,
    plan=plan,
    defaults=Options(prune=False),
    resolve=with_chunk,
    volume=partial(ring_volume, _VOLUME),
    settings=settings,
    training=Training(
        released=ring_loop,
        note="ring and ring-classic: backward, ring keeps its own keys' gradients at home while "
        "others' pass by; in ring-classic one set goes all the way round, which takes less memory",
    ),
    checks=Checks(layers=("round_sent=true",)),
)
