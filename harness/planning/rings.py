"""Rings: queries stay, keys and values visit rank after rank, and their gradients with them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.plan.problem import Direction
from harness.plan.tasks import from_rank
from harness.planning.builder import KV, KV_GRADS, Chunks, PlanBuilder
from harness.planning.token_owners import finish_tokens, hold_tokens

Holder = tuple[int, int]
"""A (rank, step) of a ring: who holds visiting keys, and when."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Chunks and heads that one rank of a ring works on.

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
        came_from: (rank, step) -> the (rank, earlier step) that passes these keys on.
    """

    seats: tuple[Seat, ...]
    steps: int
    source: Callable[[int, int], int]
    came_from: Callable[[int, int], Holder]


def circulate(b: PlanBuilder, *rings: Ring) -> None:
    """Let every rank's keys visit the other ranks, attending at each stop.

    At a step each rank first passes on what later steps need, then attends what visits it, so that
    the transfer of the next keys runs beside the kernel. Backward, dk and dv of visiting keys
    travel from each rank that added to them to the next, and home after the last.

    With `b.prune`, keys go no further than somebody needs them, and gradients skip ranks that have
    nothing to add; without, everything travels the whole ring as in the original algorithm.

    Args:
        b: Collects the tasks.
        rings: One, or several that turn at the same time, step by step, with keys of their own.
    """
    rounds = [_Round(b, ring) for ring in rings]
    for step in range(max(ring.steps for ring in rings)):
        for each in rounds:
            each.send(step)
        _attend(b, rings, step)
        for each in rounds:
            each.pass_on(step)
    for each in rounds:
        each.come_home()


def ring_attention(
    b: PlanBuilder, source: Callable[[int, int], int], came_from: Callable[[int, int], Holder]
) -> None:
    """Write a whole plan in which every rank keeps its queries and keys travel all ranks.

    Args:
        b: Collects the tasks.
        source: As in `Ring`.
        came_from: As in `Ring`.
    """
    rings_attention(b, [Ring(seats(b), b.problem.cp, source, came_from)])


def rings_attention(b: PlanBuilder, rings: Iterable[Ring]) -> None:
    """Write a whole plan of rings that turn at the same time, each with keys of its own.

    Args:
        b: Collects the tasks.
        rings: Together they carry every key to every rank.
    """
    for rank in range(b.problem.cp):
        hold_tokens(b, rank)
    circulate(b, *rings)
    for rank in range(b.problem.cp):
        finish_tokens(b, rank)


def seats(b: PlanBuilder, part: int = 0, parts: int = 1) -> tuple[Seat, ...]:
    """Seat every rank with its queries and, of each `parts` of its key chunks, the `part`-th."""
    return tuple(
        Seat(b.queries.owned[rank], b.keys.owned[rank][part::parts], b.problem.all_heads)
        for rank in range(b.problem.cp)
    )


def cycle(b: PlanBuilder, order: Sequence[int], part: int = 0, parts: int = 1) -> Ring:
    """A ring that visits all ranks in an order: `order[i]` passes keys on to `order[i + 1]`.

    Args:
        b: Who owns which keys.
        order: Every rank once.
        part: Which part of each of its key chunks a rank sends this way.
        parts: Into how many each key chunk was `cut`.
    """
    at = {rank: position for position, rank in enumerate(order)}

    def source(rank: int, step: int) -> int:
        return order[(at[rank] - step) % len(order)]

    def came_from(rank: int, step: int) -> Holder:
        return source(rank, 1), step - 1

    return Ring(seats(b, part, parts), len(order), source, came_from)


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
                onward.setdefault(ring.came_from(rank, step), set()).update(mine)
    return needs


def _attend(b: PlanBuilder, rings: Iterable[Ring], step: int) -> None:
    """Attend what visits at a step: one tile where keys of several rings meet the same queries."""
    visits: dict[tuple[int, Chunks, int, int], Chunks] = {}
    for ring in rings:
        for rank, seat in enumerate(ring.seats) if step < ring.steps else ():
            kv, met = (
                ring.seats[ring.source(rank, step)].kv,
                (rank, seat.q, seat.heads, seat.version),
            )
            visits[met] = tuple(sorted((*visits[met], *kv))) if met in visits else kv
    for (rank, q, heads, version), kv in visits.items():
        b.tile(rank, q, kv, heads, q_version=version, kv_version=version)


class _Round:
    """Work of the ranks of one ring at each step."""

    def __init__(self, b: PlanBuilder, ring: Ring) -> None:
        self.b, self.ring, self.needs = b, ring, _needs(b, ring)
        self.grads = _GradientRoutes(b, ring) if b.direction is Direction.BACKWARD else None
        self.onward: dict[Holder, list[Holder]] = {}
        for step in range(1, ring.steps):
            for rank in range(len(ring.seats)):
                self.onward.setdefault(ring.came_from(rank, step), []).append((rank, step))

    def send(self, step: int) -> None:
        """Pass on the keys that visit at a step to whom they visit next."""
        for rank in range(len(self.ring.seats)):
            for following in self.onward.get((rank, step), ()):
                seat = self.ring.seats[following[0]]
                keys = self.needs[following]
                self.b.send(rank, following[0], KV, keys, seat.heads, version=seat.version)

    def pass_on(self, step: int) -> None:
        """Pass on the gradients of the keys that visit at a step."""
        if self.grads is not None and step < self.ring.steps:
            for rank in range(len(self.ring.seats)):
                self.grads.pass_on(rank, step)

    def come_home(self) -> None:
        """Fold the gradients that travelled into their owners'."""
        if self.grads is not None:
            self.grads.come_home()


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
