"""Bidirectional ring: half of each rank's keys travel to the right, half to the left.

Each link carries half the bytes in either direction, so that a transfer takes half the time where
links are full duplex. At step t rank r attends the right half of rank r - t and the left half of
rank r + t.

    step    0            1            2
    rank 0  q0·(a0 b0)   q0·(a2 b1)   q0·(a1 b2)      a: goes to the right, b: to the left
    rank 1  q1·(a1 b1)   q1·(a0 b2)   q1·(a2 b0)
    rank 2  q2·(a2 b2)   q2·(a1 b0)   q2·(a0 b1)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding, contiguous, cut_each
from harness.planning.builder import PlanBuilder, shard_both
from harness.planning.closed_forms import Volume
from harness.planning.options import PRUNE, option
from harness.planning.rings import cycle, rings_attention
from harness.planning.strategy import Checks, Context, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)
    ways: int | None = option(None, "directions that keys travel", unset="2 from 3 ranks on")


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan one ring, or two that turn against each other.

    Raises:
        UnsupportedError: There are not one or two ways.
    """
    cp = problem.cp
    ways = resolve(problem, direction, options, context).ways or 1

    def shard(seqlen: int, cp: int) -> Sharding:
        return cut_each(contiguous(seqlen, cp), ways)

    queries, keys = shard_both(problem, shard)
    b = PlanBuilder(problem, name, direction, queries, keys, prune=options.prune)
    orders = (range(cp), range(cp)[::-1])[:ways]
    rings_attention(b, [cycle(b, order, way, ways) for way, order in enumerate(orders)])
    return b.build()


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in the number of ways: two ranks are each other's right and left."""
    del direction, context
    ways = options.ways or (2 if problem.cp > 2 else 1)
    if ways > 2:
        raise UnsupportedError(
            f"bothways: ways ({ways}) must be 1 or 2: a ring has two directions", ("ways=2",)
        )
    return replace(options, ways=ways)


def alternatives(problem: Problem, options: Options) -> Iterator[Options]:
    """Yield both numbers of ways."""
    del problem
    for ways in (2, 1):
        yield replace(options, ways=ways)


def volume(
    problem: Problem, direction: Direction, options: Options, context: Context
) -> Volume | None:
    """Count cp - 1 shards of keys, and backward as many of their gradients, whichever way."""
    del context
    cp, full = problem.cp, problem.seqlen_q * problem.seqlen_kv
    if problem.seqlen_kv % (2 * cp) or problem.pattern.total_area != full:
        return None
    widths = problem.heads_kv * (problem.head_dim + problem.head_dim_v)
    shard = problem.batch * problem.seqlen_kv // cp * widths
    received = (cp - 1) * shard * problem.dtype.bytes
    formula = "(cp-1) T heads_kv (d_k + d_v) b"
    if direction is Direction.BACKWARD and cp > 1:
        hops = cp - 1 if options.prune else cp
        part = problem.dtype.bytes if problem.round_sent else problem.dtype.accumulator_bytes
        received += hops * shard * part
        formula += " + hops T heads_kv (d_k + d_v) a"
    return Volume(
        received_bytes=(received,) * cp,
        formula=formula,
        source="derived: the ring's volume, half of it in either direction of each link",
    )


STRATEGY = Strategy(
    name="bothways",
    summary="two rings that turn against each other, half of the keys in each",
    paper="an example of this project",
    plan=plan,
    defaults=Options(),
    resolve=resolve,
    alternatives=alternatives,
    volume=volume,
    checks=Checks(options=("ways=2,prune=false",)),
)
