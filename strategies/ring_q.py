"""Ring pass-Q: queries travel a ring, keys stay; partial outputs go home and merge there.

At step t rank r attends the queries of rank r - t to its own keys, while it passes them to rank
r + 1. Where few queries meet many keys, as after a long prompt that is cached, this moves less than
passing keys.

    step    0        1        2        3        home=alltoall           home=ring
    rank 0  q0·k0    q3·k0    q2·k0    q1·k0    all-to-all of           out3 -> 3 after step 1,
    rank 1  q1·k1    q0·k1    q3·k1    q2·k1    (out, lse), then        out2 -> 2 after step 2,
    rank 2  q2·k2    q1·k2    q0·k2    q3·k2    each owner merges       out1 -> 1 after step 3:
    rank 3  q3·k3    q2·k3    q1·k3    q0·k3    cp partial outputs      beside the next step

`carry=keys` passes keys as `ring` does (pass-KV), `carry=auto` what is predicted to be faster;
where nothing predicts, what is fewer bytes.

Backward, q, dout, lse and delta travel and dq with them, or keys with dk and dv as in `ring`:
whichever is fewer bytes, unless `backward` says it. For as many KV heads as query heads that is
queries: 12 d + 8 bytes a token and head against 16 d with float32 sums, 6 d + 8 against 8 d with
bfloat16 ones (BurstAttention's 25 %, but for lse and delta).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.planning.block_assignment import Carry, Traveller, faster_traveller, fewest_bytes
from harness.planning.builder import PlanBuilder
from harness.planning.closed_forms import Volume, query_ring_volume, ring_volume
from harness.planning.need import NeedCut
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, PRUNE, option, option_choice
from harness.planning.rings import Home, circulate, circulate_queries, cycle
from harness.planning.strategy import Checks, Context, Strategy, with_chunk
from harness.planning.token_owners import finish_tokens, hold_tokens, make_delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user may choose."""

    prune: bool = option(True, PRUNE)
    placement: Placement = option(Placement.ZIGZAG, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)
    carry: Carry = option(
        Carry.QUERIES, "what travels forward; auto: what is predicted to be faster, both ways"
    )
    home: Home = option(Home.ALL_TO_ALL, "how partial outputs come home")
    backward: Traveller | None = option(
        None, "what travels backward", unset="what is fewer bytes", reader=option_choice(Traveller)
    )


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in what travels."""
    options = with_chunk(problem, direction, options, context)
    if options.carry is Carry.AUTO:
        options = _faster(problem, direction, options, context)
    fewest = fewest_bytes(problem, Direction.BACKWARD)
    return replace(options, backward=options.backward or fewest)


@lru_cache(maxsize=64)
def _faster(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Decide what travels in one direction."""
    if direction is Direction.BACKWARD and options.backward is not None:
        return replace(options, carry=Carry.QUERIES)  # of no account backward
    ways = {each: _fixed(options, direction, each) for each in Traveller}

    def planned(each: Traveller) -> Plan:
        return plan(problem, direction, ways[each], context, STRATEGY.name)

    return ways[faster_traveller(problem, direction, context.evaluate, planned)]


def _fixed(options: Options, direction: Direction, traveller: Traveller) -> Options:
    if direction is Direction.BACKWARD:
        return replace(options, carry=Carry.QUERIES, backward=traveller)
    return replace(options, carry=Carry(traveller.value))


def _keys_travel(problem: Problem, direction: Direction, options: Options, ctx: Context) -> bool:
    filled = resolve(problem, direction, options, ctx)
    if direction is Direction.FORWARD:
        return filled.carry is Carry.KEYS
    return filled.backward is Traveller.KEYS


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a ring of all ranks; legal for every problem."""
    queries, keys = deal_tokens(problem.pattern, problem.cp, options.placement, options.chunk)
    prune, align = options.prune, context.align
    b = PlanBuilder(
        problem, name, direction, queries, keys, prune=prune, cut=NeedCut.BOTH, align=align
    )
    ranks = range(problem.cp)
    for rank in ranks:
        hold_tokens(b, rank)
    if _keys_travel(problem, direction, options, context):
        circulate(b, cycle(b, ranks))
    else:
        for rank in ranks if direction is Direction.BACKWARD else ():
            make_delta(b, rank)
        circulate_queries(b, cycle(b, ranks), options.home)
    for rank in ranks:
        finish_tokens(b, rank)
    return b.build()


_VOLUME = (
    "Meta (arXiv:2411.01783, section 3.5): cp - 1 blocks of Q pass each rank and cp - 1 partial "
    "outputs return; backward BurstAttention's (arXiv:2509.19836)"
)


def volume(
    problem: Problem, direction: Direction, options: Options, context: Context
) -> Volume | None:
    """Return the closed form of what travels."""
    keys = _keys_travel(problem, direction, options, context)
    form = ring_volume if keys else query_ring_volume
    return form(_VOLUME, problem, direction, options, context)


STRATEGY = Strategy(
    name="ring-q",
    summary="queries travel a ring, keys stay; partial outputs go home",
    paper="pass-Q of Yang et al., arXiv:2411.01783; TokenRing, arXiv:2412.20501 (home=ring); "
    "BurstAttention, arXiv:2509.19836 (backward)",
    plan=plan,
    defaults=Options(),
    resolve=resolve,
    volume=volume,
    weighs=lambda options: options.carry is Carry.AUTO,
    compared=("home=ring", "placement=contiguous"),
    checks=Checks(
        options=(
            "home=ring,backward=queries",
            "backward=queries,prune=false",
            "backward=keys",
            "carry=keys",
            "carry=auto",
        )
    ),
)
