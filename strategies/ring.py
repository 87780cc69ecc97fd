"""Ring attention: queries stay, keys and values travel a ring of ranks.

At step t rank r attends the keys of rank r - t, while it passes them to rank r + 1. After cp steps
every query has met every key; partial outputs merge by log-sum-exp.

    step    0        1        2        3
    rank 0  q0·k0    q0·k3    q0·k2    q0·k1
    rank 1  q1·k1    q1·k0    q1·k3    q1·k2
    rank 2  q2·k2    q2·k1    q2·k0    q2·k3
    rank 3  q3·k3    q3·k2    q3·k1    q3·k0

Under a causal pattern contiguous chunks leave the last rank with almost twice the mean work; other
placements are options, `zigzag` and `stripe` also strategies of their own.
`ring-classic` sends everything around the whole ring whether or not the pattern needs it.
"""

from dataclasses import dataclass
from functools import partial

from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.planning.builder import PlanBuilder
from harness.planning.closed_forms import ring_volume
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, PRUNE, option
from harness.planning.rings import Holder, ring_attention
from harness.planning.strategy import Checks, Context, Strategy, Training, ring_loop, with_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)
    placement: Placement = option(Placement.CONTIGUOUS, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a ring of all ranks; legal for every problem."""
    del context
    cp = problem.cp

    def source(rank: int, step: int) -> int:
        return (rank - step) % cp

    def came_from(rank: int, step: int) -> Holder:
        return (rank - 1) % cp, step - 1

    queries, keys = deal_tokens(problem.pattern, cp, options.placement, options.chunk)
    b = PlanBuilder(problem, name, direction, queries, keys, prune=options.prune)
    ring_attention(b, source, came_from)
    return b.build()


_VOLUME = (
    "Liu et al. (arXiv:2310.01889, section 3): cp - 1 blocks of K and V pass each rank; backward "
    "adds their gradients, in accumulator precision"
)

PAPER = "Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, figure 2"

STRATEGY = Strategy(
    name="ring",
    summary="keys travel a ring; contiguous chunks",
    paper=PAPER,
    plan=plan,
    defaults=Options(),
    aliases=("p2p",),
    resolve=with_chunk,
    volume=partial(ring_volume, _VOLUME),
    training=Training(released=ring_loop),
    checks=Checks(options=("placement=balanced,chunk=3",)),
)

CLASSIC = Strategy(
    name="ring-classic",
    summary="the same ring, sending everything everywhere",
    paper=PAPER,
    plan=plan,
    defaults=Options(prune=False),
    resolve=with_chunk,
    volume=partial(ring_volume, _VOLUME),
    training=Training(
        released=ring_loop,
        note="ring and ring-classic: backward, ring keeps its own keys' gradients at home while "
        "others' pass by; in ring-classic one set goes all the way round, which takes less memory",
    ),
    checks=Checks(layers=("round_sent=true",)),
)
