"""Ring attention: queries stay, keys and values travel a ring of ranks.

At step t rank r attends the keys of rank r - t, while it passes them to rank r + 1. After cp steps
every query has met every key; partial outputs merge by log-sum-exp.

    step    0        1        2        3
    rank 0  q0·k0    q0·k3    q0·k2    q0·k1
    rank 1  q1·k1    q1·k0    q1·k3    q1·k2
    rank 2  q2·k2    q2·k1    q2·k0    q2·k3
    rank 3  q3·k3    q3·k2    q3·k1    q3·k0

Under a causal pattern contiguous chunks leave the last rank with almost twice the mean work.
`ring-classic` sends everything around the whole ring whether or not the pattern needs it.
"""

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import contiguous
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.rings import one_ring
from harness.planning.strategy import Context, Options, Strategy


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a ring of all ranks; legal for every problem."""
    del context
    queries, keys = shard_both(problem, contiguous)
    b = PlanBuilder(problem, name, direction, queries, keys, prune=options.prune)
    one_ring(b)
    return b.build()


PAPER = "Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889, figure 2"

STRATEGY = Strategy(
    name="ring",
    summary="keys travel a ring; contiguous chunks",
    paper=PAPER,
    plan=plan,
    accepts=frozenset({"prune"}),
)

CLASSIC = Strategy(
    name="ring-classic",
    summary="the same ring, sending everything everywhere",
    paper=PAPER,
    plan=plan,
    accepts=frozenset({"prune"}),
    defaults=Options(prune=False),
)
