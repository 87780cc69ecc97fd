"""Double ring: an inner ring on a node's fast links, an outer ring between nodes.

Ranks are numbered node by node, w to a node. Outer step o brings a node the keys of node n - o;
its w inner steps pass them around inside. The keys for the next outer step leave for the next node
when an outer step begins, so the slow transfer has w kernels to hide behind, and all w ranks of a
node use their network cards at once.

    w = 2, 4 ranks   step (0,0)  (0,1)   (1,0)  (1,1)
    node 0  rank 0        k0      k1      k2     k3
            rank 1        k1      k0      k3     k2
    node 1  rank 2        k2      k3      k0     k1
            rank 3        k3      k2      k1     k0
"""

from dataclasses import dataclass, replace
from functools import partial
from math import gcd

from harness.errors import UnsupportedError
from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.planning.builder import PlanBuilder
from harness.planning.closed_forms import ring_volume
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, PRUNE, option
from harness.planning.rings import Holder, ring_attention
from harness.planning.strategy import Checks, Context, Strategy, chunk_filled, divisors_of_cp


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)
    placement: Placement = option(Placement.ZIGZAG, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)
    inner: int | None = option(None, "length of the inner ring", unset="the longest inside a node")


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan an inner and an outer ring.

    Raises:
        UnsupportedError: The inner length does not divide cp.
    """
    inner = _inner(problem, options, context)
    nodes = problem.cp // inner

    def source(rank: int, step: int) -> int:
        node, local = divmod(rank, inner)
        outer_step, inner_step = divmod(step, inner)
        return (node - outer_step) % nodes * inner + (local - inner_step) % inner

    def came_from(rank: int, step: int) -> Holder:
        node, local = divmod(rank, inner)
        if step % inner:
            return node * inner + (local - 1) % inner, step - 1
        return (node - 1) % nodes * inner + local, step - inner

    queries, keys = deal_tokens(problem.pattern, problem.cp, options.placement, options.chunk)
    b = PlanBuilder(
        problem, name, direction, queries, keys, prune=options.prune, align=context.align
    )
    ring_attention(b, source, came_from)
    return b.build()


def _inner(problem: Problem, options: Options, context: Context) -> int:
    cp = problem.cp
    node = min(context.gpus_per_node, cp)
    inner = options.inner or gcd(node, cp)  # so that no inner ring leaves its node
    if cp % inner:
        legal = tuple(f"double_ring:inner={w}" for w in range(1, cp + 1) if cp % w == 0)
        raise UnsupportedError(f"double_ring: inner ({inner}) must divide cp ({cp})", legal)
    return inner


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the length of the inner ring, and the chunk of a placement."""
    del direction
    filled = replace(options, inner=_inner(problem, options, context))
    return chunk_filled(problem, problem.cp, filled)


_VOLUME = "Gu et al. (arXiv:2406.18485, section 4.3): the ring's volume, over other links"

STRATEGY = Strategy(
    name="double_ring",
    summary="a ring inside each node, a ring between nodes",
    paper="Gu et al., LoongTrain, arXiv:2406.18485, section 4.3",
    plan=plan,
    defaults=Options(),
    resolve=resolve,
    volume=partial(ring_volume, _VOLUME),
    alternatives=partial(divisors_of_cp, "inner"),
    compared=("placement=stripe", "placement=contiguous"),
    degree="inner",
    checks=Checks(options=("inner=2", "placement=stripe")),
)
