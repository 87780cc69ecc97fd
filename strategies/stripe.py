"""Striped attention: rank r owns tokens r, r + cp, r + 2cp, ...; then a ring as usual.

Under a causal pattern every (rank, step) is a triangle over its own indices, with the diagonal when
the keys' stripe is not later than the queries', without it otherwise:

    keys from rank <= r:  j <= i          keys from rank > r:  j <= i - 1

so all ranks carry the same work at every step, up to half a diagonal.
"""

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import stripe
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.rings import one_ring
from harness.planning.strategy import Context, Options, Strategy


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a ring of all ranks over stripes; legal for every problem."""
    del context
    queries, keys = shard_both(problem, stripe)
    b = PlanBuilder(problem, name, direction, queries, keys, prune=options.prune)
    one_ring(b)
    return b.build()


STRATEGY = Strategy(
    name="stripe",
    summary="ring over every cp-th token; balanced for causal at every step",
    paper="Brandon et al., Striped Attention, arXiv:2311.09431, section 3",
    plan=plan,
    accepts=frozenset({"prune"}),
)
