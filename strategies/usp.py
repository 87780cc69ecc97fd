"""USP: Ulysses inside groups of U ranks, a ring between R groups; U x R = cp.

The head axis takes the fast links (neighbouring ranks) by default; `ring_inside` swaps the axes.
Tokens are zigzag chunk pairs of the R ring positions, each cut in order among the U ranks, so that
a gathered sequence is in ascending order and a causal pattern loads all ranks alike.

    U = 2, R = 2      ring position 0     ring position 1
    heads 0-15        rank 0              rank 2            <- a ring
    heads 16-31       rank 1              rank 3            <- a ring
                      all-to-all          all-to-all
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from harness.errors import UnsupportedError
from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement, Sharding, subdivided
from harness.plan.tasks import Tensor
from harness.planning.builder import PlanBuilder, balanced_heads
from harness.planning.closed_forms import mesh_volume
from harness.planning.collectives import (
    HeadGroups,
    gradients_to_tokens,
    hold_for_heads,
    out_to_tokens,
    seats_of,
    to_heads,
)
from harness.planning.frameworks import FrameworkSetting, megatron, packaged
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, PRUNE, option
from harness.planning.rings import Holder, Ring, circulate, ring_attention
from harness.planning.strategy import Checks, Context, Strategy, Training, chunk_filled, ring_loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    prune: bool = option(True, PRUNE)
    placement: Placement = option(Placement.ZIGZAG, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)
    ulysses: int | None = option(None, "ranks of the head axis", unset="the most inside a node")
    ring: int | None = option(None, "ranks of the ring axis", unset="what the other axis leaves")
    ring_inside: bool = option(False, "put the ring, not the head axis, on neighbouring ranks")


def degrees(problem: Problem, options: Options, context: Context) -> tuple[int, int]:
    """Choose (U, R): as asked, or the largest U that fits heads, node and cp.

    Raises:
        UnsupportedError: U x R is not cp or U exceeds heads_q; the legal U x R are listed.
    """
    cp, most = problem.cp, problem.heads_q
    legal = tuple(f"usp:{u}x{cp // u}" for u in range(1, cp + 1) if cp % u == 0 and u <= most)
    u = options.ulysses
    if u is None and options.ring is not None and cp % options.ring == 0:
        u = cp // options.ring
    if u is None:
        fast = min(context.gpus_per_node, problem.heads_kv, most)
        u = max(u for u in range(1, fast + 1) if cp % u == 0)
    r = options.ring or cp // u
    if u * r != cp or u > most:
        raise UnsupportedError(
            f"usp: {u} x {r} must be cp ({cp}), and the Ulysses degree at most heads_q ({most})",
            legal,
        )
    return u, r


def resolve(problem: Problem, direction: Direction, options: Options, context: Context) -> Options:
    """Fill in U and R, see `degrees`, and the chunk of a placement."""
    del direction
    u, r = degrees(problem, options, context)
    return chunk_filled(problem, r, replace(options, ulysses=u, ring=r))


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan a turn inside each group, a ring across groups, and the turn back.

    Raises:
        UnsupportedError: See `degrees`.
    """
    u, r = degrees(problem, options, context)

    def rank_at(head_axis: int, ring_axis: int) -> int:
        return head_axis * r + ring_axis if options.ring_inside else ring_axis * u + head_axis

    def axes(rank: int) -> tuple[int, int]:
        return divmod(rank, r) if options.ring_inside else divmod(rank, u)[::-1]

    def cut(placed: Sharding) -> Sharding:
        fine = subdivided(placed, u)
        owned = [fine.owned[axes(rank)[1] * u + axes(rank)[0]] for rank in range(problem.cp)]
        return Sharding(fine.chunks, tuple(owned))

    def source(rank: int, step: int) -> int:
        head_axis, ring_axis = axes(rank)
        return rank_at(head_axis, (ring_axis - step) % r)

    def came_from(rank: int, step: int) -> Holder:
        head_axis, ring_axis = axes(rank)
        return rank_at(head_axis, (ring_axis - 1) % r), step - 1

    placed = deal_tokens(problem.pattern, r, options.placement, options.chunk)
    queries, keys = map(cut, placed)
    on_ring, align = [axes(rank)[1] for rank in range(problem.cp)], context.align
    b = PlanBuilder(
        problem, name, direction, queries, keys, prune=options.prune, groups=on_ring, align=align
    )
    if u == 1:  # nobody to trade heads with: a turn would only copy
        ring_attention(b, source, came_from)
        return b.build()
    heads = balanced_heads(problem, u)
    groups = HeadGroups(
        tuple(tuple(rank_at(h, ring) for h in range(u)) for ring in range(r)),
        tuple(heads[axes(rank)[0]] for rank in range(problem.cp)),
    )
    seats = seats_of(b, groups)
    hold_for_heads(b, seats)
    forward = direction is Direction.FORWARD
    for tensor in (Tensor.Q, Tensor.K, Tensor.V) if forward else (Tensor.DOUT,):
        to_heads(b, groups, tensor)
    circulate(b, Ring(seats, r, source, came_from))
    if forward:
        out_to_tokens(b, groups, seats)
    else:
        gradients_to_tokens(b, groups, seats)
    return b.build()


_VOLUME = (
    "derived: Ulysses (arXiv:2309.14509) over U, ring (arXiv:2310.01889) over R, as USP "
    "(arXiv:2405.07719, section 3) composes them"
)


def settings(problem: Problem, options: Options) -> Iterator[FrameworkSetting]:
    """Name what frameworks call it."""
    u, r = options.ulysses, options.ring
    if options.ring_inside or not u or not r:
        return
    yield megatron(problem, "a2a+p2p", options.placement, (u, r))
    if options.placement is Placement.ZIGZAG:
        call = f"set_seq_parallel_pg({u}, {r}, ...), LongContextAttention(ring_impl_type='zigzag')"
        yield packaged(problem, f"yunchang/usp-zigzag:{u}x{r}", call)


STRATEGY = Strategy(
    name="usp",
    summary="Ulysses on fast links x ring between them",
    paper="Fang and Zhao, USP, arXiv:2405.07719, section 3",
    plan=plan,
    defaults=Options(),
    aliases=("a2a+p2p", "ulysses_ring"),
    mesh=("ulysses", "ring"),
    resolve=resolve,
    volume=partial(mesh_volume, _VOLUME, degrees),
    compared=("placement=stripe", "placement=balanced", "ring_inside=true"),
    settings=settings,
    training=Training(released=ring_loop),
    checks=Checks(options=("ring_inside=true",), layers=("checkpoint=attention,offload=true",)),
)
