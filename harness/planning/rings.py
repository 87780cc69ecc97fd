"""The larger verbs that several strategies share: rings, and turns between tokens and heads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness.plan.problem import Direction
from harness.plan.tasks import GATHERED, CollectiveKind, Leg, Piece, Place, Tensor, from_rank
from harness.planning.builder import KV, KV_GRADS, OUT_PARTS, Chunks, PlanBuilder

Holder = tuple[int, int]
"""A (rank, step) of a ring: who holds visiting keys, and when."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank of a ring works on.

    Attributes:
        q: Query chunks.
        kv: Key chunks that it is home to.
        heads: Bit set of query heads.
        version: Version of q, k, v and dout here (`GATHERED` after a collective).
    """

    q: Chunks
    kv: Chunks
    heads: int
    version: int = 0


@dataclass(frozen=True, slots=True)
class Ring:
    """How keys travel.

    Attributes:
        seats: Per rank of the problem; ranks of different rings share one plan.
        steps: How many steps, the local one included.
        source: (rank, step) -> the rank whose keys visit `rank` at `step`; step 0 is its own.
        parent: (rank, step) -> the (rank, earlier step) that passes these keys on.
    """

    seats: tuple[Seat, ...]
    steps: int
    source: Callable[[int, int], int]
    parent: Callable[[int, int], Holder]


def circulate(b: PlanBuilder, ring: Ring) -> None:
    """Let every rank's keys visit the other ranks, attending at each stop.

    At a step each rank first passes on what later steps need, then attends what visits it, so that
    the transfer of the next keys runs beside the kernel. Backward, dk and dv of visiting keys
    travel from each rank that added to them to the next, and home after the last.

    With `b.prune`, keys go no further than somebody needs them, and gradients skip ranks that have
    nothing to add; without, everything travels the whole ring as in the original algorithm.
    """
    needs = _needs(b, ring)
    grads = _GradientRoutes(b, ring) if b.direction is Direction.BACKWARD else None
    ranks = range(len(ring.seats))
    children: dict[Holder, list[Holder]] = {}
    for step in range(1, ring.steps):
        for rank in ranks:
            children.setdefault(ring.parent(rank, step), []).append((rank, step))
    for step in range(ring.steps):
        for rank in ranks:
            for child in children.get((rank, step), ()):
                seat = ring.seats[child[0]]
                b.send(rank, child[0], KV, needs[child], seat.heads, version=seat.version)
        for rank in ranks:
            seat, source = ring.seats[rank], ring.seats[ring.source(rank, step)]
            b.tile(
                rank,
                seat.q,
                source.kv,
                seat.heads,
                q_version=seat.version,
                kv_version=seat.version,
            )
        if grads is not None:
            for rank in ranks:
                grads.pass_on(rank, step)
    if grads is not None:
        grads.come_home()


def ring_attention(
    b: PlanBuilder, source: Callable[[int, int], int], parent: Callable[[int, int], Holder]
) -> None:
    """Write a whole plan in which every rank keeps its queries and keys travel all ranks."""
    heads = b.problem.all_heads
    seats = tuple(
        Seat(b.queries.owned[rank], b.keys.owned[rank], heads) for rank in range(b.problem.cp)
    )
    for rank in range(b.problem.cp):
        hold_tokens(b, rank)
    circulate(b, Ring(seats, b.problem.cp, source, parent))
    for rank in range(b.problem.cp):
        finish_tokens(b, rank)


def one_ring(b: PlanBuilder) -> None:
    """Write a whole plan in which keys pass from each rank to the next, cp steps long."""
    cp = b.problem.cp
    ring_attention(
        b,
        source=lambda rank, step: (rank - step) % cp,
        parent=lambda rank, step: ((rank - 1) % cp, step - 1),
    )


def hold_tokens(b: PlanBuilder, rank: int) -> None:
    """Start with what the token owner has: q, k, v; backward also out, lse and dout."""
    heads = b.problem.all_heads
    b.hold(rank, [Tensor.Q], b.queries.owned[rank], heads)
    b.hold(rank, KV, b.keys.owned[rank], heads)
    if b.direction is Direction.BACKWARD:
        b.hold(rank, [Tensor.OUT, Tensor.LSE, Tensor.DOUT], b.queries.owned[rank], heads)


def finish_tokens(b: PlanBuilder, rank: int) -> None:
    """End at the token owner: finish its results, promise and save them."""
    q, kv, heads = b.queries.owned[rank], b.keys.owned[rank], b.problem.all_heads
    if b.direction is Direction.FORWARD:
        b.finish(rank, OUT_PARTS, q, heads)
        b.output(rank, [Tensor.OUT], q, heads)
        b.save(rank, [Tensor.Q, Tensor.OUT, Tensor.LSE], q, heads)
        b.save(rank, KV, kv, heads)
    else:
        b.finish(rank, [Tensor.DQ_PART], q, heads)
        b.finish(rank, KV_GRADS, kv, heads)
        output_gradients(b, rank)


def output_gradients(b: PlanBuilder, rank: int) -> None:
    """Promise that dq, dk and dv end at the token owner."""
    heads = b.problem.all_heads
    b.output(rank, [Tensor.DQ], b.queries.owned[rank], heads)
    b.output(rank, [Tensor.DK, Tensor.DV], b.keys.owned[rank], heads)


def _needs(b: PlanBuilder, ring: Ring) -> dict[Holder, Chunks]:
    """Chunks that must reach each (rank, step): for itself and for those it passes them to."""
    needs: dict[Holder, Chunks] = {}
    onward: dict[Holder, set[int]] = {}  # what those need to whom a holder passes keys
    for step in reversed(range(ring.steps)):
        for rank, seat in enumerate(ring.seats):
            kv = ring.seats[ring.source(rank, step)].kv
            mine = b.needed_kv(seat.q, kv) if b.prune else kv
            others = onward.pop((rank, step), None)
            if others is not None and not others.issubset(mine):
                mine = tuple(others.union(mine))
            needs[rank, step] = mine = tuple(sorted(mine)) if len(mine) > 1 else mine
            if step:
                onward.setdefault(ring.parent(rank, step), set()).update(mine)
    return needs


class _GradientRoutes:
    """Where dk and dv of each key chunk stop on their way home."""

    def __init__(self, b: PlanBuilder, ring: Ring) -> None:
        self.b = b
        self.ring = ring
        # Per key chunk of a source: the ranks that it stops at, in step order.
        self.stops: dict[tuple[int, int], list[int]] = {}
        for step in range(ring.steps):
            for rank, seat in enumerate(ring.seats):
                source = ring.source(rank, step)
                needed = b.needed_kv(seat.q, ring.seats[source].kv)
                for chunk in ring.seats[source].kv:
                    stops = self.stops.setdefault((source, chunk), [])
                    adds = chunk in needed
                    # The original ring carries the sum from home through every rank; pruned, the
                    # home keeps its own share and only ranks that add are visited.
                    if (adds and (step or not b.prune)) or (stops and not b.prune):
                        stops.append(rank)

    def _groups(self, rank: int, source: int, move: int) -> Iterator[tuple[int, Chunks]]:
        """Yield (neighbour, chunks): the stop `move` places from `rank`, per chunk of a source."""
        found: dict[int, list[int]] = {}
        for chunk in self.ring.seats[source].kv:
            stops = self.stops[source, chunk]
            if rank not in stops:
                continue
            at = stops.index(rank) + move
            if 0 <= at < len(stops):
                found.setdefault(stops[at], []).append(chunk)
            elif move > 0:
                found.setdefault(source, []).append(chunk)
        for neighbour, chunks in found.items():
            yield neighbour, tuple(chunks)

    def pass_on(self, rank: int, step: int) -> None:
        """Fold in what the previous stop sent, and send the sum to the next stop."""
        source = self.ring.source(rank, step)
        heads = self.ring.seats[rank].heads
        for previous, chunks in self._groups(rank, source, -1):
            self.b.merge(rank, KV_GRADS, chunks, heads, from_rank(previous))
        for following, chunks in self._groups(rank, source, +1):
            if following != rank:
                self.b.send(rank, following, KV_GRADS, chunks, heads, arrive=from_rank(rank))

    def come_home(self) -> None:
        """Fold the travelled sums into the owners' accumulators."""
        arrived: dict[tuple[int, int], list[int]] = {}
        for (source, chunk), stops in self.stops.items():
            if stops and stops[-1] != source:
                arrived.setdefault((source, stops[-1]), []).append(chunk)
        for (source, last), chunks in arrived.items():
            heads = self.ring.seats[source].heads
            self.b.merge(source, KV_GRADS, tuple(chunks), heads, from_rank(last))


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


def reduce_scatter(b: PlanBuilder, tensor: Tensor) -> None:
    """Return every rank's partial gradient of keys to their owners, added there in rank order."""
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
    for dst, piece in sums:
        b.merge_pieces(dst, [piece])


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


def head_attention(b: PlanBuilder, groups: HeadGroups, ring: Ring) -> None:
    """Write a whole plan that turns tokens into heads, attends in a ring, and turns back.

    Forward: all-to-all of q, k and v, the ring, all-to-all of out. Saved are the gathered q, k, v
    with out and lse of the rank's own heads, so backward gathers only dout.
    """
    ranks = range(b.problem.cp)
    everything = b.problem.all_heads
    if b.direction is Direction.FORWARD:
        for rank in ranks:
            hold_tokens(b, rank)
        for tensor in (Tensor.Q, *KV):
            to_heads(b, groups, tensor)
        circulate(b, ring)
        for rank, seat in enumerate(ring.seats):
            b.finish(rank, OUT_PARTS, seat.q, seat.heads)
        to_tokens(b, groups, Tensor.OUT)
        for rank, seat in enumerate(ring.seats):
            b.output(rank, [Tensor.OUT], b.queries.owned[rank], everything, GATHERED)
            b.save(rank, [Tensor.Q], _wanted(b, Tensor.Q, seat.q), seat.heads, GATHERED)
            b.save(rank, KV, seat.kv, seat.heads, GATHERED)
            b.save(rank, [Tensor.OUT, Tensor.LSE], seat.q, seat.heads)
        return
    for rank, seat in enumerate(ring.seats):
        b.hold(rank, [Tensor.Q], _wanted(b, Tensor.Q, seat.q), seat.heads, GATHERED)
        b.hold(rank, KV, seat.kv, seat.heads, GATHERED)
        b.hold(rank, [Tensor.OUT, Tensor.LSE], seat.q, seat.heads)
        b.hold(rank, [Tensor.DOUT], b.queries.owned[rank], everything)
    to_heads(b, groups, Tensor.DOUT)
    circulate(b, ring)
    for rank, seat in enumerate(ring.seats):
        b.finish(rank, [Tensor.DQ_PART], seat.q, seat.heads)
    to_tokens(b, groups, Tensor.DQ)
    for rank in ranks:
        b.output(rank, [Tensor.DQ], b.queries.owned[rank], everything, GATHERED)
    for rank, piece in kv_grads_to_tokens(b, groups):
        b.output_piece(rank, piece)


def seats_of(b: PlanBuilder, groups: HeadGroups) -> tuple[Seat, ...]:
    """What each rank works on after the turn: its heads of all its group's tokens."""
    return tuple(
        Seat(
            tuple(sorted(c for peer in groups.group(rank) for c in b.queries.owned[peer])),
            groups.chunks(b, rank, Tensor.K),
            groups.heads[rank],
            GATHERED,
        )
        for rank in range(b.problem.cp)
    )


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
