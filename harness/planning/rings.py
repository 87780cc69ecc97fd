"""Rings: queries stay, keys and values visit rank after rank, and their gradients with them."""

from collections.abc import Callable, Iterator
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
        for each in rounds:
            each.attend(step)
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
    heads = b.problem.all_heads
    seats = tuple(
        Seat(b.queries.owned[rank], b.keys.owned[rank], heads) for rank in range(b.problem.cp)
    )
    for rank in range(b.problem.cp):
        hold_tokens(b, rank)
    circulate(b, Ring(seats, b.problem.cp, source, came_from))
    for rank in range(b.problem.cp):
        finish_tokens(b, rank)


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

    def attend(self, step: int) -> None:
        """Attend the keys that visit at a step."""
        for rank, seat in enumerate(self.ring.seats) if step < self.ring.steps else ():
            kv, version = self.ring.seats[self.ring.source(rank, step)].kv, seat.version
            self.b.tile(rank, seat.q, kv, seat.heads, q_version=version, kv_version=version)

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
