"""Rings: keys visit rank after rank and queries stay, or queries travel and keys stay.

Partial gradients of what travels go with it; partial outputs of queries that travel go straight
home.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from harness.plan.problem import Direction
from harness.plan.tasks import Tensor, from_rank
from harness.planning.builder import KV, KV_GRADS, Chunks, PlanBuilder, Tensors
from harness.planning.token_owners import (
    Move,
    exchange_outputs,
    finish_tokens,
    hold_tokens,
    merge_outputs,
    send_outputs,
)

Holder = tuple[int, int]
"""A (rank, step) of a ring: who holds visiting keys, and when."""


@dataclass(frozen=True, slots=True)
class RingSeat:
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

    seats: tuple[RingSeat, ...]
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
    rounds = [_Round(b, ring, _KEYS) for ring in rings]
    for step in range(max(ring.steps for ring in rings)):
        for each in rounds:
            each.send(step)
        _attend(b, rings, step)
        for each in rounds:
            each.pass_on(step)
    for each in rounds:
        each.come_home()


class Home(StrEnum):
    """How partial (out, lse) of queries that travelled come home.

    ALL_TO_ALL: Together, after the last step (Meta's pass-Q, arXiv:2411.01783).
    RING: Each straight after its step, the other way round, beside the next step (TokenRing,
        arXiv:2412.20501).
    """

    ALL_TO_ALL = "alltoall"
    RING = "ring"


def circulate_queries(b: PlanBuilder, ring: Ring, home: Home) -> None:
    """Let every rank's queries visit the other ranks' keys: `circulate` with the roles exchanged.

    Forward, partial (out, lse) come home as `home` says and are merged in the order of the steps.
    Backward, delta (see `make_delta`), lse and dout travel with q, and dq from each rank that added
    to it to the next, and home after the last, as in BurstAttention (arXiv:2509.19836).

    Args:
        b: Collects the tasks.
        ring: How queries travel; `source` and `came_from` are about them.
        home: How partial outputs come home.
    """
    backward = b.direction is Direction.BACKWARD
    turn = _Round(b, ring, _BACKWARD_QUERIES if backward else _FORWARD_QUERIES)
    visits = [[] if backward else _visits(b, ring, step) for step in range(ring.steps)]
    for step in range(ring.steps):
        turn.send(step)
        for rank, seat in enumerate(ring.seats):
            q = ring.seats[ring.source(rank, step)].q
            b.tile(rank, q, seat.kv, seat.heads, delta=True)
        turn.pass_on(step)
        if home is Home.RING:
            merge_outputs(b, visits[step - 1] if step else [])
            send_outputs(b, visits[step])
    turn.come_home()
    if home is Home.ALL_TO_ALL:
        exchange_outputs(b, chain(*visits))
    merge_outputs(b, visits[-1] if home is Home.RING else chain(*visits))


def _visits(b: PlanBuilder, ring: Ring, step: int) -> list[Move]:
    """Whose queries ranks attend at a step away from their home."""
    found: list[Move] = []
    for rank, seat in enumerate(ring.seats):
        home = ring.source(rank, step)
        if home != rank:
            found.append((rank, home, b.needed_q(ring.seats[home].q, seat.kv)))
    return found


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


def seats(b: PlanBuilder, part: int = 0, parts: int = 1) -> tuple[RingSeat, ...]:
    """Seat every rank with its queries and, of each `parts` of its key chunks, the `part`-th."""
    return tuple(
        RingSeat(
            b.queries.owned[rank],
            b.key_parts(b.given_keys.owned[rank][part::parts]),
            b.problem.all_heads,
        )
        for rank in range(b.problem.cp)
    )


def cycle(b: PlanBuilder, order: Sequence[int], part: int = 0, parts: int = 1) -> Ring:
    """A ring that visits all ranks in an order: `order[i]` passes keys on to `order[i + 1]`.

    Args:
        b: Who owns which keys.
        order: Every rank once.
        part: Which part of each of its key chunks a rank sends this way.
        parts: Into how many each key chunk was cut (`sharding.cut_each`).
    """
    at = {rank: position for position, rank in enumerate(order)}

    def source(rank: int, step: int) -> int:
        return order[(at[rank] - step) % len(order)]

    def came_from(rank: int, step: int) -> Holder:
        return source(rank, 1), step - 1

    return Ring(seats(b, part, parts), len(order), source, came_from)


@dataclass(frozen=True, slots=True)
class _Cargo:
    """What travels.

    Attributes:
        tensors: What each visit brings.
        parts: Partial results that grow at each visit and travel too.
        queries: Whether it is queries that travel.
    """

    tensors: Tensors
    parts: Tensors = ()
    queries: bool = False

    def of(self, seat: RingSeat) -> Chunks:
        """What a rank is home to."""
        return seat.q if self.queries else seat.kv

    def needed(self, b: PlanBuilder, seat: RingSeat, visiting: Chunks) -> Chunks:
        """Those of the visiting chunks that a rank has work with."""
        if self.queries:
            return b.needed_q(visiting, seat.kv)
        return b.needed_kv(seat.q, visiting)


_KEYS = _Cargo(KV, KV_GRADS)
_FORWARD_QUERIES = _Cargo((Tensor.Q,), queries=True)
_BACKWARD_QUERIES = _Cargo(
    (Tensor.Q, Tensor.LSE, Tensor.DOUT, Tensor.DELTA), (Tensor.DQ_PART,), queries=True
)


def _needs(b: PlanBuilder, ring: Ring, cargo: _Cargo) -> dict[Holder, Chunks]:
    """Chunks that must reach each (rank, step): for itself and for those it passes them to."""
    needs: dict[Holder, Chunks] = {}
    onward: dict[Holder, set[int]] = {}  # what those need to whom a holder passes chunks
    for step in reversed(range(ring.steps)):
        for rank, seat in enumerate(ring.seats):
            visiting = cargo.of(ring.seats[ring.source(rank, step)])
            mine = cargo.needed(b, seat, visiting) if b.prune else visiting
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

    def __init__(self, b: PlanBuilder, ring: Ring, cargo: _Cargo) -> None:
        self.b, self.ring, self.cargo, self.needs = b, ring, cargo, _needs(b, ring, cargo)
        backward = b.direction is Direction.BACKWARD
        self.grads = _GradientRoutes(b, ring, cargo) if backward else None
        self.onward: dict[Holder, list[Holder]] = {}
        for step in range(1, ring.steps):
            for rank in range(len(ring.seats)):
                self.onward.setdefault(ring.came_from(rank, step), []).append((rank, step))

    def send(self, step: int) -> None:
        """Pass on what visits at a step to whom it visits next."""
        for rank in range(len(self.ring.seats)):
            for following in self.onward.get((rank, step), ()):
                seat = self.ring.seats[following[0]]
                chunks, tensors = self.needs[following], self.cargo.tensors
                self.b.send(rank, following[0], tensors, chunks, seat.heads, version=seat.version)

    def pass_on(self, step: int) -> None:
        """Pass on the gradients of what visits at a step."""
        if self.grads is not None and step < self.ring.steps:
            for rank in range(len(self.ring.seats)):
                self.grads.pass_on(rank, step)

    def come_home(self) -> None:
        """Fold the gradients that travelled into their owners'."""
        if self.grads is not None:
            self.grads.come_home()


class _GradientRoutes:
    """Where the partial gradients of each chunk that travels stop on their way home."""

    def __init__(self, b: PlanBuilder, ring: Ring, cargo: _Cargo) -> None:
        self.b, self.ring, self.cargo = b, ring, cargo
        # Per chunk of a source: the ranks that it stops at, in step order.
        self.stops: dict[tuple[int, int], list[int]] = {}
        for step in range(ring.steps):
            for rank, seat in enumerate(ring.seats):
                source = ring.source(rank, step)
                visiting = cargo.of(ring.seats[source])
                needed = cargo.needed(b, seat, visiting)
                for chunk in visiting:
                    stops = self.stops.setdefault((source, chunk), [])
                    adds = chunk in needed
                    # The original ring carries the sum from home through every rank; pruned, the
                    # home keeps its own share and only ranks that add are visited.
                    if (adds and (step or not b.prune)) or (stops and not b.prune):
                        stops.append(rank)

    def _groups(self, rank: int, source: int, move: int) -> Iterator[tuple[int, Chunks]]:
        """Yield (neighbour, chunks): the stop `move` places from `rank`, per chunk of a source."""
        found: dict[int, list[int]] = {}
        for chunk in self.cargo.of(self.ring.seats[source]):
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
            self.b.merge(rank, self.cargo.parts, chunks, heads, from_rank(previous))
        for following, chunks in self._groups(rank, source, +1):
            if following != rank:
                self.b.send(
                    rank, following, self.cargo.parts, chunks, heads, arrive=from_rank(rank)
                )

    def come_home(self) -> None:
        """Fold the travelled sums into the owners' accumulators."""
        arrived: dict[tuple[int, int], list[int]] = {}
        for (source, chunk), stops in self.stops.items():
            if stops and stops[-1] != source:
                arrived.setdefault((source, stops[-1]), []).append(chunk)
        for (source, last), chunks in arrived.items():
            heads = self.ring.seats[source].heads
            self.b.merge(source, self.cargo.parts, tuple(chunks), heads, from_rank(last))
