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

from dataclasses import dataclass, replace
from functools import partial

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding, contiguous, subdivided, zigzag
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.layers.layer_verbs import only_layers
from harness.planning.layers.staged_layer import StagedLayer, Stages, other_stages, stage_shape
from harness.planning.need import NeedCut
from harness.planning.options import PRUNE, option
from harness.planning.strategy import Checks, Context, Strategy, Training, staged_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)
    ring: int = option(1, "ranks of the ring axis")
    stage_heads: int | None = option(
        None, "query heads of a stage over all ranks", unset="one a rank"
    )
    short_last: bool = option(
        False, "let the last stage be short where stages do not divide the heads"
    )
    in_order: bool = option(
        False, "stages take heads in their natural order, and keys are sent again"
    )
    save_gathered: bool = option(
        False, "save gathered q, k and v rather than project again in backward"
    )
    resend: bool = option(False, "with a ring, send keys again in each stage rather than keep them")


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
    ring, ranks, u = stage_shape("upipe", problem.heads_q, problem.cp, options)

    def shard(seqlen: int, cp: int) -> Sharding:
        return contiguous(seqlen, cp) if ring == 1 else subdivided(zigzag(seqlen, ring), ranks)

    queries, keys = shard_both(problem, shard)
    b = PlanBuilder(problem, name, direction, queries, keys, prune=options.prune, cut=NeedCut.WHOLE)
    heads = head_stages(problem, ranks, u, in_order=options.in_order)
    stages = Stages(problem, tuple(stage * ring for stage in heads))
    saves, resend = options.save_gathered, options.resend
    return StagedLayer(b, stages, ring, save_gathered=saves, resend=resend).plan()


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the heads of a stage."""
    del direction, context
    shape = stage_shape("upipe", problem.heads_q, problem.cp, options)
    return replace(options, stage_heads=shape.stage_heads)


STRATEGY = Strategy(
    name="upipe",
    summary="a layer in stages of few heads, each a small Ulysses",
    paper="Untied Ulysses, arXiv:2602.21196, section 3.3",
    plan=plan,
    defaults=Options(),
    layers_only=True,
    resolve=resolve,
    alternatives=other_stages,
    # Stages stay inside a node.
    training=Training(released=staged_loop, on_nodes=lambda nodes: Options(ring=nodes)),
    checks=Checks(
        layers=(
            *("save_gathered=true", "in_order=true", "ring=2", "ring=2,resend=true"),
            *(f"stage_heads={u}" for u in (1, 2, 4, 5, 7, 8, 10, 14, 16, 20, 28, 32, 40, 64)),
            *(f"stage_heads={u},short_last=true" for u in (12, 24)),
            *("in_order=true,round_sent=true", "checkpoint=layer,offload=true"),
        ),
        divides=partial(stage_shape, "upipe"),
    ),
)
