"""All-gather attention: fetch all keys that the local queries need, then attend in one go.

One collective brings k, one brings v; there is no overlap and no merge, so the forward error is
that of a single device. Backward gathers again (only the owner's keys are saved) and returns the
partial dk and dv with a reduce-scatter, which owners add in rank order.

Tokens are contiguous unless a placement is given, as in `ring`: that is plainest, and a window's or
a document's keys are then on few ranks. Llama 3 deals head-tail chunks: `placement=zigzag`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.planning.builder import PlanBuilder
from harness.planning.closed_forms import Volume, ring_volume
from harness.planning.collectives import gather_attention
from harness.planning.frameworks import FrameworkSetting, megatron, packaged, torchtitan
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, PRUNE, option
from harness.planning.strategy import Checks, Context, Strategy, with_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)
    placement: Placement = option(Placement.CONTIGUOUS, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan one gather and one tile per rank; legal for every problem."""
    queries, keys = deal_tokens(problem.pattern, problem.cp, options.placement, options.chunk)
    b = PlanBuilder(
        problem, name, direction, queries, keys, prune=options.prune, align=context.align
    )
    gather_attention(b)
    return b.build()


_VOLUME = (
    "Llama 3 (arXiv:2407.21783, section 3.3.2): an all-gather of K and V, cp - 1 shards each; "
    "backward gathers again and reduce-scatters the partial gradients"
)


def volume(
    problem: Problem, direction: Direction, options: Options, context: Context
) -> Volume | None:
    """Return the ring's closed form; a reduce-scatter never carries the owner's own share."""
    return ring_volume(_VOLUME, problem, direction, replace(options, prune=True), context)


def settings(problem: Problem, options: Options) -> Iterator[FrameworkSetting]:
    """Name what frameworks call it."""
    placement, causal = options.placement, problem.pattern.text != "full"
    if placement is not Placement.CONTIGUOUS:
        yield megatron(problem, "all_gather", placement, (1, problem.cp))
    yield torchtitan(problem, "allgather", placement)
    if placement is Placement.CONTIGUOUS and not (causal and options.prune):
        call = f"llama3_flash_attn_varlen_func(causal={causal})"
        yield packaged(problem, "ring-flash-attn/llama3", call)


STRATEGY = Strategy(
    name="allgather",
    summary="gather the needed keys, attend once (Llama 3 with placement=zigzag)",
    paper="Llama 3 (arXiv:2407.21783, section 3.3.2)",
    plan=plan,
    defaults=Options(),
    aliases=("llama3:placement=zigzag",),
    resolve=with_chunk,
    volume=volume,
    compared=(
        *(f"placement={each}" for each in ("zigzag", "stripe", "balanced", "documents")),
        "prune=false",
    ),
    settings=settings,
    checks=Checks(options=("placement=zigzag", "placement=documents")),
)
