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

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import contiguous
from harness.planning.builder import PlanBuilder, balanced_heads, shard_both
from harness.planning.rings import HeadGroups, Ring, head_attention, seats_of
from harness.planning.strategy import Context, Options, Strategy


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan two turns and one tile per rank.

    Raises:
        UnsupportedError: There are more ranks than query heads.
    """
    del context
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
    b = PlanBuilder(problem, name, direction, queries, keys, prune=options.prune)
    groups = HeadGroups((tuple(range(cp)),), balanced_heads(problem, cp))
    alone = Ring(
        seats_of(b, groups),
        steps=1,
        source=lambda rank, _: rank,
        parent=lambda rank, step: (rank, step),
    )
    head_attention(b, groups, alone)
    return b.build()


STRATEGY = Strategy(
    name="ulysses",
    summary="all-to-all from tokens to heads and back",
    paper="Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509, section 3",
    plan=plan,
    accepts=frozenset({"prune"}),
)
