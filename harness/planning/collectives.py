"""Collectives: tokens to heads and back by all-to-alls; keys gathered, their gradients summed."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.plan.problem import Direction
from harness.plan.tasks import GATHERED, CollectiveKind, Leg, Piece, Place, Tensor, from_rank
from harness.planning.builder import KV, KV_GRADS, OUT_PARTS, Chunks, PlanBuilder
from harness.planning.rings import RingSeat
from harness.planning.token_owners import finish_tokens, hold_tokens

# Gathers ------------------------------------------------------------------------------------


def all_gather(b: PlanBuilder, tensor: Tensor) -> dict[int, Chunks]:
    """Bring to every rank the key chunks that its queries need, as one piece.

    Returns:
        Per rank, the chunks that it then holds together.
    """
    heads = b.problem.all_heads
    reach: dict[int, Chunks] = {}
    legs = []
    for dst in range(b.problem.cp):
        for src in range(b.problem.cp):
            chunks = b.keys.owned[src]
            if b.prune:
                chunks = b.needed_kv(b.queries.owned[dst], chunks)
            reach[dst] = tuple(sorted((*reach.get(dst, ()), *chunks)))
            legs.append(Leg(Place(src), Place(dst), (b.piece(tensor, chunks, heads),), GATHERED))
    b.collective(CollectiveKind.ALL_GATHER, legs)
    return reach


def reduce_scatter(b: PlanBuilder, tensor: Tensor, *, at_once: bool = False) -> None:
    """Return every rank's partial gradient of keys to their owners, added there in rank order.

    Args:
        b: Collects the tasks.
        tensor: The gradient.
        at_once: Add all that an owner got in one task, not one by one.
    """
    heads = b.problem.all_heads
    legs, sums = [], []
    for dst in range(b.problem.cp):
        for src in range(b.problem.cp):
            chunks = b.needed_kv(b.queries.owned[src], b.keys.owned[dst])
            if src != dst:
                piece = b.piece(tensor, chunks, heads)
                legs.append(Leg(Place(src), Place(dst), (piece,), from_rank(src)))
                sums.append((dst, piece._replace(version=from_rank(src))))
    b.collective(CollectiveKind.REDUCE_SCATTER, legs)
    if at_once:
        for dst in range(b.problem.cp):
            b.merge_pieces(dst, [piece for owner, piece in sums if owner == dst])
    else:
        for dst, piece in sums:
            b.merge_pieces(dst, [piece])


def gather_attention(b: PlanBuilder, *, at_once: bool = False) -> None:
    """Write a whole plan in which every rank gathers the keys that it needs, and attends once.

    Backward gathers again, and partial gradients go home by a reduce-scatter.

    Args:
        b: Collects the tasks.
        at_once: As in `reduce_scatter`.
    """
    ranks = range(b.problem.cp)
    for rank in ranks:
        hold_tokens(b, rank)
    _, reach = (all_gather(b, tensor) for tensor in KV)  # the same for k and v
    for rank in ranks:
        b.tile(rank, b.queries.owned[rank], reach[rank], b.problem.all_heads, kv_version=1)
    if b.direction is Direction.BACKWARD:
        for tensor in KV_GRADS:
            reduce_scatter(b, tensor, at_once=at_once)
    for rank in ranks:
        finish_tokens(b, rank)


# All-to-alls --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Ranks that trade tokens for heads among themselves (Ulysses groups).

    Attributes:
        groups: Disjoint groups of ranks.
        heads: Per rank, the query heads that it attends (bit set).
        only: The chunks that are traded, of queries and of keys alike; None = all.
    """

    groups: tuple[tuple[int, ...], ...]
    heads: tuple[int, ...]
    only: Chunks | None = None

    def owned(self, b: PlanBuilder, rank: int, tensor: Tensor) -> Chunks:
        """The chunks of a rank that are traded."""
        own = (b.keys if tensor.on_kv else b.queries).owned[rank]
        if self.only is None:
            return own
        return tuple(chunk for chunk in own if chunk in self.only)

    def chunks(self, b: PlanBuilder, rank: int, tensor: Tensor) -> Chunks:
        """Chunks that a rank's group holds together, of those that are needed at all."""
        return tuple(
            sorted(
                chunk
                for peer in self.group(rank)
                for chunk in _wanted(b, tensor, self.owned(b, peer, tensor))
            )
        )

    def group(self, rank: int) -> tuple[int, ...]:
        """The group of a rank."""
        return next(group for group in self.groups if rank in group)


def to_heads(
    b: PlanBuilder,
    groups: HeadGroups,
    tensor: Tensor,
    *,
    version: int = 0,
    arrive: int = GATHERED,
) -> None:
    """All-to-all: each rank gives up its tokens' heads and gets its heads of the group's tokens."""
    ranks = range(b.problem.cp)
    wanted = [_wanted(b, tensor, groups.owned(b, rank, tensor)) for rank in ranks]
    places = [Place(rank) for rank in ranks]
    legs = [
        Leg(
            places[src],
            places[dst],
            (b.piece(tensor, wanted[src], groups.heads[dst], version),),
            arrive,
        )
        for group in groups.groups
        for dst in group
        for src in group
    ]
    b.collective(CollectiveKind.ALL_TO_ALL, legs)


def to_tokens(b: PlanBuilder, groups: HeadGroups, tensor: Tensor) -> None:
    """All-to-all back: each rank returns its heads' results to the tokens' owners."""
    ranks = range(b.problem.cp)
    whole = [_whole_heads(b, groups, rank, tensor) for rank in ranks]
    places = [Place(rank) for rank in ranks]
    legs = [
        Leg(
            places[src],
            places[dst],
            (b.exact_piece(tensor, groups.owned(b, dst, tensor), whole[src]),),
            GATHERED,
        )
        for group in groups.groups
        for dst in group
        for src in group
    ]
    b.collective(CollectiveKind.ALL_TO_ALL, legs)


def kv_grads_to_tokens(b: PlanBuilder, groups: HeadGroups) -> list[tuple[int, Piece]]:
    """Finish dk and dv of the groups' heads and return them to the tokens' owners.

    A KV head whose query heads all live on one rank is complete there and returns in the problem's
    dtype. One that was copied to several ranks returns as partial sums, added by the owner in rank
    order.

    Returns:
        (rank, piece) of what is then where.
    """
    for group in groups.groups:
        for rank in group:
            own = tuple(c for peer in group for c in groups.owned(b, peer, Tensor.DK))
            whole = _whole_heads(b, groups, rank, Tensor.DK)
            b.finish_pieces(rank, [b.exact_piece(t, tuple(sorted(own)), whole) for t in KV_GRADS])
    for tensor in (Tensor.DK, Tensor.DV):
        to_tokens(b, groups, tensor)
    return _sum_copies(b, groups)


def _sum_copies(b: PlanBuilder, groups: HeadGroups) -> list[tuple[int, Piece]]:
    shared = [
        b.problem.kv_heads(heads) & ~_whole_heads(b, groups, rank, Tensor.DK)
        for rank, heads in enumerate(groups.heads)
    ]
    for tensor in KV_GRADS:
        legs = [
            Leg(
                Place(src),
                Place(dst),
                (b.exact_piece(tensor, b.attended_kv(groups.owned(b, dst, tensor)), shared[src]),),
                from_rank(src),
            )
            for group in groups.groups
            for dst in group
            for src in group
        ]
        b.collective(CollectiveKind.REDUCE_SCATTER, legs)
    found: list[tuple[int, Piece]] = []
    for group in groups.groups:
        everything = 0
        for src in group:
            everything |= b.problem.kv_heads(groups.heads[src])
        for dst in group:
            own = groups.owned(b, dst, Tensor.DK)
            pieces: list[Piece] = [
                b.exact_piece(tensor, b.attended_kv(own), shared[src], from_rank(src))
                for src in group
                for tensor in KV_GRADS
            ]
            b.merge_pieces(dst, pieces)
            copied = 0
            for src in group:
                copied |= shared[src]
            b.finish_pieces(dst, [b.exact_piece(tensor, own, copied) for tensor in KV_GRADS])
            for tensor in (Tensor.DK, Tensor.DV):
                summed = b.exact_piece(tensor, own, copied)
                whole = b.exact_piece(tensor, own, everything & ~copied, GATHERED)
                found += [(dst, piece) for piece in (summed, whole) if piece.chunks and piece.heads]
    return found


# Plans that turn tokens into heads ----------------------------------------------------------


def seats_of(b: PlanBuilder, groups: HeadGroups) -> tuple[RingSeat, ...]:
    """Seat of each rank after the all-to-all: its heads, for all tokens of its group."""
    return tuple(
        RingSeat(
            tuple(sorted(c for peer in groups.group(rank) for c in b.queries.owned[peer])),
            groups.chunks(b, rank, Tensor.K),
            groups.heads[rank],
            GATHERED,
        )
        for rank in range(b.problem.cp)
    )


def hold_for_heads(b: PlanBuilder, seats: Sequence[RingSeat]) -> None:
    """Start a plan that turns tokens into heads: forward with the owners' tokens.

    Backward with what forward saved: q, k and v as gathered, out and lse of the rank's own heads.
    """
    for rank, seat in enumerate(seats):
        if b.direction is Direction.FORWARD:
            hold_tokens(b, rank)
        else:
            b.hold(rank, [Tensor.Q], _wanted(b, Tensor.Q, seat.q), seat.heads, GATHERED)
            b.hold(rank, KV, seat.kv, seat.heads, GATHERED)
            b.hold(rank, [Tensor.OUT, Tensor.LSE], seat.q, seat.heads)
            b.hold(rank, [Tensor.DOUT], b.queries.owned[rank], b.problem.all_heads)


def out_to_tokens(b: PlanBuilder, groups: HeadGroups, seats: Sequence[RingSeat]) -> None:
    """End a forward plan of heads: out goes back to the tokens' owners; see `save_for_heads`."""
    for rank, seat in enumerate(seats):
        b.finish(rank, OUT_PARTS, seat.q, seat.heads)
    to_tokens(b, groups, Tensor.OUT)
    for rank in range(len(seats)):
        b.output(rank, [Tensor.OUT], b.queries.owned[rank], b.problem.all_heads, GATHERED)
    save_for_heads(b, seats)


def save_for_heads(b: PlanBuilder, seats: Sequence[RingSeat]) -> None:
    """Save the gathered q, k and v with out and lse of the rank's own heads.

    So backward gathers only dout.
    """
    for rank, seat in enumerate(seats):
        b.save(rank, [Tensor.Q], _wanted(b, Tensor.Q, seat.q), seat.heads, GATHERED)
        b.save(rank, KV, seat.kv, seat.heads, GATHERED)
        b.save(rank, [Tensor.OUT, Tensor.LSE], seat.q, seat.heads)


def gradients_to_tokens(b: PlanBuilder, groups: HeadGroups, seats: Sequence[RingSeat]) -> None:
    """End a backward plan of heads: dq, dk and dv go back to the tokens' owners."""
    for rank, seat in enumerate(seats):
        b.finish(rank, [Tensor.DQ_PART], seat.q, seat.heads)
    to_tokens(b, groups, Tensor.DQ)
    for rank in range(b.problem.cp):
        b.output(rank, [Tensor.DQ], b.queries.owned[rank], b.problem.all_heads, GATHERED)
    for rank, piece in kv_grads_to_tokens(b, groups):
        b.output_piece(rank, piece)


def _wanted(b: PlanBuilder, tensor: Tensor, chunks: Chunks) -> Chunks:
    """Those of the chunks that take part in any attention, if useless transfers are left out."""
    if not b.prune:
        return chunks
    return b.attended_kv(chunks) if tensor.on_kv else b.attending_q(chunks)


def _whole_heads(b: PlanBuilder, groups: HeadGroups, rank: int, tensor: Tensor) -> int:
    """Heads of a tensor that a rank computes alone: its own, or KV heads with all their queries."""
    heads = groups.heads[rank]
    if not tensor.on_kv:
        return heads
    kv = b.problem.kv_heads(heads)
    rest = b.problem.all_heads & ~heads
    return kv & ~b.problem.kv_heads(rest)
