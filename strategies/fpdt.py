"""FPDT: Ulysses chunk by chunk of the sequence (`parts`); what waits rests on the host.

Every rank owns a share of each part. Forward projects a part, trades tokens for heads, and attends
the keys of the parts that it needs, fetched from the host one by one; the next keys come while the
present ones are attended, so a rank holds two parts of keys. Then q, k, v, out and lse of the part
go to the host. Backward walks keys outside and queries inside:

    forward    q0·k0   q1·k0 q1·k1   q2·k0 q2·k1 q2·k2
    backward   k0·q0 k0·q1 k0·q2   k1·q1 k1·q2   k2·q2

dk and dv of a part are done after its walk; dq rests on the host between two walks.
"""

from dataclasses import dataclass, replace

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding, split
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.layers.chunked_layer import ChunkedLayer
from harness.planning.layers.layer_verbs import only_layers
from harness.planning.need import NeedCut
from harness.planning.options import option
from harness.planning.strategy import PLAIN, Checks, Context, Released, Strategy, Training

PART_TOKENS = 65536  # arXiv:2408.16978, section 5: the chunk that the authors take


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    parts: int | None = option(None, "parts of the sequence", unset="of 64k tokens")


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan the parts of a layer one after another.

    Raises:
        UnsupportedError: At attention scope, or there are more ranks than query heads.
    """
    del context
    only_layers(problem, name)
    cp = problem.cp
    if cp > problem.heads_q:
        raise UnsupportedError(
            f"fpdt: cp ({cp}) must not exceed heads_q ({problem.heads_q}): a rank without a head "
            "has no work",
            (f"fpdt at cp <= {problem.heads_q}",),
        )
    parts = _parts(problem, options)

    def shard(seqlen: int, cp: int) -> Sharding:
        owned = tuple(tuple(range(rank, parts * cp, cp)) for rank in range(cp))
        return Sharding(split(seqlen, parts * cp), owned)

    queries, keys = shard_both(problem, shard)
    b = PlanBuilder(problem, name, direction, queries, keys, cut=NeedCut.WHOLE)
    return ChunkedLayer(b, parts).plan()


def _parts(problem: Problem, options: Options) -> int:
    return options.parts or max(2, -(-problem.seqlen_q // PART_TOKENS))


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the number of parts."""
    del direction, context
    return replace(options, parts=_parts(problem, options))


def released_fpdt(options: Options) -> Released[Options]:
    """DeepSpeed's fpdt_layer.py: each part goes through the kernel alone.

    What rests on the host stays there until backward ends, dq in float32.
    """
    return Released(holding=replace(PLAIN, held=True), options=options)


STRATEGY = Strategy(
    name="fpdt",
    summary="a layer in parts of the sequence, the rest on the host",
    paper="Yao et al., FPDT, arXiv:2408.16978, section 4",
    plan=plan,
    defaults=Options(),
    layers_only=True,
    resolve=resolve,
    training=Training(released=released_fpdt, grows="parts"),
    checks=Checks(layers=("parts=3", "parts=3,checkpoint=layer")),
)
