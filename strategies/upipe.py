"""UPipe (Untied Ulysses): a layer in stages of few heads, each stage a small Ulysses.

A stage projects U query heads from x, trades tokens for heads, attends, and trades back, so that
buffers hold U heads and not all. Keys are traded once for all stages that use them, which takes the
heads out of their natural order; 16 query heads, 4 KV heads, U = cp = 4:

    stage   0           1           2            3
    q       0 4 8 12    1 5 9 13    2 6 10 14    3 7 11 15      rank i attends the i-th
    k, v    0 1 2 3     .           .            .              and keeps KV head i

Where U does not divide the query heads, `short_last` lets the last stage take what is left.
Backward saves x, out and lse, and projects and trades q, k and v again; `save_gathered` keeps them.
With a ring of R groups (`ring=R`) each group trades among its own ranks and keys visit the others;
visitors stay for the stages that use them, or with `resend` go at once and come again each time.
"""

from dataclasses import replace

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding, contiguous, subdivided, zigzag
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.layer_verbs import only_layers
from harness.planning.staged_layer import StagedLayer, Stages
from harness.planning.strategy import Context, Options, Strategy


def head_stages(
    problem: Problem, ranks: int, stage_heads: int, *, in_order: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Say which query heads each rank attends in each stage.

    Slot i of stage s, with g query heads per KV head; rank i // (U / ranks) takes it:

        U divides heads_kv       KV head (s // g) U + i, its query s mod g
        heads_kv divides U       KV head i // k, its query s k + i mod k, where k = U / heads_kv
        neither                  each rank takes its own heads_q / ranks heads in order

    Where U does not divide heads_q the last row holds, and the last stage has fewer heads.

    Args:
        problem: Its heads.
        ranks: Ranks that share the heads; divides U and heads_q.
        stage_heads: U.
        in_order: Stage s takes the query heads s U .. s U + U - 1 instead.

    Returns:
        Per stage and rank, the bit set of query heads.

    Source: arXiv:2602.21196, section 3.4 for the first row.
    """
    heads, group, u = problem.heads_q, problem.group, stage_heads
    each, share = u // ranks, heads // ranks

    def head(stage: int, slot: int) -> int:
        if in_order:
            return stage * u + slot
        if problem.heads_kv % u == 0:
            return (stage // group * u + slot) * group + stage % group
        if u % problem.heads_kv == 0 and heads % u == 0:
            kv, query = divmod(slot, u // problem.heads_kv)
            return kv * group + stage * (u // problem.heads_kv) + query
        rank, own = divmod(slot, min(each, share - stage * each))
        return rank * share + stage * each + own

    def taken(stage: int, rank: int) -> int:
        count = min(each, share - stage * each)
        return sum(1 << head(stage, slot) for slot in range(rank * count, (rank + 1) * count))

    return tuple(
        tuple(taken(stage, rank) for rank in range(ranks)) for stage in range(-(-heads // u))
    )


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan the stages of a layer.

    Raises:
        UnsupportedError: At attention scope; or U, the ring and the heads do not divide.
    """
    del context
    only_layers(problem, name)
    ring, ranks, u = stage_shape(problem.heads_q, problem.cp, options)

    def shard(seqlen: int, cp: int) -> Sharding:
        return contiguous(seqlen, cp) if ring == 1 else subdivided(zigzag(seqlen, ring), ranks)

    queries, keys = shard_both(problem, shard)
    b = PlanBuilder(problem, name, direction, queries, keys, prune=options.prune)
    stages = head_stages(problem, ranks, u, in_order=options.in_order)
    on_all = Stages(problem, tuple(stage * ring for stage in stages))
    return StagedLayer(
        b, on_all, ring, save_gathered=options.save_gathered, resend=options.resend
    ).plan()


def stage_shape(heads: int, cp: int, options: Options) -> tuple[int, int, int]:
    """Return (groups of the ring, ranks of a group, U) for so many query heads.

    Raises:
        UnsupportedError: They do not divide; names those that do.
    """
    ring = options.ring or 1
    rings = [r for r in range(1, cp + 1) if cp % r == 0 and heads % (cp // r) == 0]
    if ring not in rings:
        raise UnsupportedError(
            f"upipe: ring ({ring}) must divide cp ({cp}) into groups whose size divides heads_q "
            f"({heads})",
            tuple(f"upipe:ring={r}" for r in rings),
        )
    ranks = cp // ring
    u = options.stage_heads or ranks
    divides = u <= heads if options.short_last else heads % u == 0
    if u % ranks or not divides:
        groups = f"upipe:ring={ring}," if ring > 1 else "upipe:"
        legal = [
            f"{groups}stage_heads={n}" for n in range(ranks, heads + 1, ranks) if heads % n == 0
        ]
        if u % ranks == 0 and u < heads:
            legal.append(f"{groups}stage_heads={u},short_last=true")
        rule = "not exceed" if options.short_last else "divide"
        raise UnsupportedError(
            f"upipe: stage_heads ({u}) must be a multiple of the {ranks} ranks that share a stage "
            f"and {rule} heads_q ({heads})",
            tuple(legal),
        )
    return ring, ranks, u


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the ring and the heads of a stage."""
    del direction, context
    ring, _, u = stage_shape(problem.heads_q, problem.cp, options)
    return replace(options, ring=ring, stage_heads=u)


STRATEGY = Strategy(
    name="upipe",
    summary="a layer in stages of few heads, each a small Ulysses",
    paper="Untied Ulysses, arXiv:2602.21196, section 3.3",
    plan=plan,
    accepts=frozenset(
        {"prune", "stage_heads", "short_last", "ring", "in_order", "save_gathered", "resend"}
    ),
    defaults=Options(ring=1),
    resolve=resolve,
)
