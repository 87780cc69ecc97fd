"""Layers in stages of heads: the machine behind UPipe.

A stage projects its heads where the tokens live, moves them by an all-to-all, attends, and moves
out back by another. K and V stay until the last stage that uses them, and are released then.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import GATHERED, NO_HEADS, Free, Piece, Place, Tensor, from_rank, recomputed
from harness.planning.builder import KV, KV_GRADS, OUT_PARTS, Chunks, PlanBuilder
from harness.planning.collectives import HeadGroups, kv_grads_to_tokens, to_heads, to_tokens
from harness.planning.layers.layer_verbs import (
    add_gradients,
    add_output,
    add_projection,
    finish_x,
    finish_y,
    hold_layer,
    output_weight_gradients,
    start_gradients,
)

O = TypeVar("O")  # noqa: E741  # the dataclass of a strategy's options


class Shape(NamedTuple):
    """How ranks and heads are cut into groups and stages."""

    ring: int
    """Groups of the ring."""
    ranks: int
    """Ranks of a group."""
    stage_heads: int
    """U: query heads of a stage, over all ranks of a group."""


def stage_shape(name: str, heads: int, cp: int, options: object) -> Shape:
    """Return the shape for so many query heads.

    Args:
        name: Of the strategy that asks, for what may be typed instead.
        heads: Query heads.
        cp: Ranks.
        options: With `ring`, `stage_heads` (U; None is one head a rank) and `short_last`.

    Raises:
        UnsupportedError: They do not divide; names those that do.
    """
    asked: Any = options
    ring, short_last = asked.ring, asked.short_last
    rings = [r for r in range(1, cp + 1) if cp % r == 0 and heads % (cp // r) == 0]
    if ring not in rings:
        raise UnsupportedError(
            f"{name}: ring ({ring}) must divide cp ({cp}) into groups whose size divides heads_q "
            f"({heads})",
            tuple(f"{name}:ring={r}" for r in rings),
        )
    ranks = cp // ring
    u = asked.stage_heads or ranks
    divides = u <= heads if short_last else heads % u == 0
    if u % ranks or not divides:
        groups = f"{name}:ring={ring}," if ring > 1 else f"{name}:"
        legal = [
            f"{groups}stage_heads={n}" for n in range(ranks, heads + 1, ranks) if heads % n == 0
        ]
        if u % ranks == 0 and u < heads:
            legal.append(f"{groups}stage_heads={u},short_last=true")
        rule = "not exceed" if short_last else "divide"
        raise UnsupportedError(
            f"{name}: stage_heads ({u}) must be a multiple of the {ranks} ranks that share a stage "
            f"and {rule} heads_q ({heads})",
            tuple(legal),
        )
    return Shape(ring, ranks, u)


def other_stages(problem: Problem, options: O) -> Iterator[O]:
    """Yield a short last stage, stages of nearly so many heads, and rings of smaller groups."""
    asked: Any = options
    if asked.stage_heads is not None:
        yield replace(asked, short_last=True)
        heads = range(1, problem.heads_q + 1)
        for u in sorted(heads, key=lambda u: (abs(u - asked.stage_heads), u)):
            yield replace(asked, stage_heads=u)
    for ring in range(2, problem.cp + 1):
        if problem.cp % ring == 0:
            yield replace(asked, ring=ring, stage_heads=None)


@dataclass(frozen=True, slots=True)
class Stages:
    """Query heads stage by stage, and with them when each KV head comes and goes.

    A KV head comes to the ranks that use it when the first of them does, and its gradient leaves
    when the last of them is done; so it crosses the network once per rank that uses it.

    Attributes:
        problem: The problem.
        heads: Per stage and rank, the query heads that it attends (bit set).
    """

    problem: Problem
    heads: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        """How many stages."""
        return len(self.heads)

    def all_of(self, rank: int) -> int:
        """Query heads of a rank, over all stages."""
        return _union(stage[rank] for stage in self.heads)

    def in_stage(self, stage: int) -> int:
        """Query heads of a stage, over all ranks."""
        return _union(self.heads[stage])

    def new_kv(self, stage: int) -> tuple[int, ...]:
        """Per rank, all query heads of the KV heads that come to it in a stage."""
        earlier = _union(self._kv_heads(before) for before in range(stage))
        return self._of_ranks(self._kv_heads(stage) & ~earlier)

    def released_kv(self, stage: int) -> tuple[int, ...]:
        """Per rank, its own query heads of the KV heads that it is done with in a stage."""
        later = _union(self._kv_heads(after) for after in range(stage + 1, len(self.heads)))
        whole = self._of_ranks(self._kv_heads(stage) & ~later)
        return tuple(heads & self.all_of(rank) for rank, heads in enumerate(whole))

    def sets(self) -> tuple[list[int], list[int]]:
        """Query heads of each stage, and KV heads that are done in each, over all ranks."""
        kv_heads = self.problem.kv_heads
        stages = range(len(self.heads))
        done = [kv_heads(_union(self.released_kv(stage))) for stage in stages]
        return [self.in_stage(stage) for stage in stages], [heads for heads in done if heads]

    def _kv_heads(self, stage: int) -> int:
        return self.problem.kv_heads(self.in_stage(stage))

    def _of_ranks(self, kv_heads: int) -> tuple[int, ...]:
        problem = self.problem
        return tuple(
            problem.query_heads(kv_heads & problem.kv_heads(self.all_of(rank)))
            for rank in range(len(self.heads[0]))
        )


def _union(sets: Iterable[int]) -> int:
    whole = 0
    for each in sets:
        whole |= each
    return whole


class StagedLayer:
    """A layer in stages of heads, on one group of ranks or on several that form a ring.

    Args:
        b: Collects the tasks.
        stages: Who attends which heads, and when.
        ring: How many groups; ranks of a group are neighbours.
        save_gathered: Save gathered q, k and v; else backward projects and trades them again.
        resend: Visiting keys go when they were attended, and come again in the next stage; else
            they stay as long as stages need them.
    """

    def __init__(
        self, b: PlanBuilder, stages: Stages, ring: int, *, save_gathered: bool, resend: bool
    ) -> None:
        self.b, self.stages, self.ring, self.resend = b, stages, ring, resend
        self.ranks = range(b.problem.cp)
        size = len(self.ranks) // ring
        self.groups = tuple(tuple(range(r * size, (r + 1) * size)) for r in range(ring))
        self.again = 0 if b.direction is Direction.FORWARD else recomputed(1)
        self.keeps = save_gathered
        for rank in self.ranks:
            hold_layer(b, rank)

    # Who has what ---------------------------------------------------------------------------

    def all_to_all(self, heads: tuple[int, ...]) -> HeadGroups:
        """A trade of these heads inside the groups."""
        return HeadGroups(self.groups, heads)

    def whole(self, rank: int) -> Chunks:
        """The query chunks of a rank's group."""
        group = self.groups[rank // len(self.groups[0])]
        return tuple(sorted(c for peer in group for c in self.b.queries.owned[peer]))

    def keys(self, rank: int) -> Chunks:
        """The key chunks of a rank's group that anybody attends."""
        return self.b.attended_kv(self.whole(rank)) if self.b.prune else self.whole(rank)

    def visited(self, rank: int, step: int) -> int:
        """The rank whose keys visit a rank at a step of the ring."""
        return (rank - step * len(self.groups[0])) % len(self.ranks)

    def own_out(self, rank: int, stage: int) -> Piece:
        """Out of a stage's heads of a rank's own tokens."""
        heads = self.stages.in_stage(stage)
        return self.b.piece(Tensor.OUT, self.b.queries.owned[rank], heads, GATHERED)

    def gathered(self, rank: int, stage: int) -> list[Piece]:
        """Pieces of a stage that a rank saves, if q, k and v are saved."""
        b, heads = self.b, self.stages.heads[stage][rank]
        q = b.attending_q(self.whole(rank)) if b.prune else self.whole(rank)
        come = self.stages.new_kv(stage)[rank]
        return [
            b.piece(Tensor.Q, q, heads, GATHERED),
            *(b.piece(tensor, self.keys(rank), come, GATHERED) for tensor in KV),
            b.piece(Tensor.OUT, self.whole(rank), heads),
        ]

    # What both directions do ----------------------------------------------------------------

    def project_to_heads(self, stage: int) -> None:
        """Project the heads of a stage, and all-to-all them: tokens become heads."""
        b, new_kv = self.b, self.stages.new_kv(stage)
        new = 0
        for heads in new_kv:
            new |= heads
        for rank in self.ranks:
            own = b.queries.owned[rank]
            add_projection(b, rank, b.piece(Tensor.Q, own, self.stages.in_stage(stage), self.again))
            for tensor in KV:
                add_projection(b, rank, b.piece(tensor, own, new, self.again))
        to_heads(b, self.all_to_all(self.stages.heads[stage]), Tensor.Q, version=self.again)
        for tensor in KV:
            to_heads(b, self.all_to_all(new_kv), tensor, version=self.again)

    def attend(self, stage: int) -> None:
        """Attend the own group's keys, then those of the others as they visit."""
        b, heads = self.b, self.stages.heads[stage]
        come = heads if self.resend else self.stages.new_kv(stage)
        for step in range(self.ring):
            for rank in self.ranks if step + 1 < self.ring else ():
                following = (rank + len(self.groups[0])) % len(self.ranks)
                keys = self.keys(self.visited(rank, step))
                b.send(rank, following, KV, keys, come[following], version=GATHERED)
            for rank in self.ranks:
                keys = self.keys(self.visited(rank, step))
                b.tile(
                    rank,
                    self.whole(rank),
                    keys,
                    heads[rank],
                    q_version=GATHERED,
                    kv_version=GATHERED,
                )
            if self.resend and step:
                self.release_kv(stage, step)

    def release_kv(self, stage: int, step: int) -> None:
        """Release the keys that visited at a step: they were attended, and passed on before."""
        for rank in self.ranks:
            keys, heads = self.keys(self.visited(rank, step)), self.stages.heads[stage][rank]
            pieces = [self.b.piece(tensor, keys, heads, GATHERED) for tensor in KV]
            if pieces[0].chunks:
                self.b.add(Free(Place(rank), tuple(pieces)))

    # Directions -----------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Plan the builder's direction."""
        return self.forward() if self.b.direction is Direction.FORWARD else self.backward()

    def forward(self) -> Plan:
        """Plan y, and what is left for backward."""
        b, stages = self.b, self.stages
        for stage in range(len(stages)):
            self.project_to_heads(stage)
            self.attend(stage)
            for rank in self.ranks:
                b.finish(rank, OUT_PARTS, self.whole(rank), stages.heads[stage][rank])
            to_tokens(b, self.all_to_all(stages.heads[stage]), Tensor.OUT)
        for rank in self.ranks:
            own = b.queries.owned[rank]
            add_output(b, rank, [b.piece(Tensor.OUT, own, b.problem.all_heads, GATHERED)])
            finish_y(b, rank, own)
            for place, piece in self.left(rank):
                b.save_piece(place, piece)
        return b.build()

    def left(self, rank: int) -> list[tuple[Place, Piece]]:
        """Pieces that a forward plan leaves on a rank, besides weights."""
        b, pieces = self.b, []
        for stage in range(len(self.stages)):
            pieces += self.gathered(rank, stage) if self.keeps else []
            pieces.append(self.own_out(rank, stage))
            pieces.append(b.piece(Tensor.LSE, self.whole(rank), self.stages.heads[stage][rank]))
        if b.direction is Direction.FORWARD:
            pieces.append(b.exact_piece(Tensor.X, b.queries.owned[rank], NO_HEADS))
        return [(Place(rank), piece) for piece in pieces]

    def backward(self) -> Plan:
        """Plan dx and the weights' gradients."""
        b, stages, count = self.b, self.stages, range(len(self.stages))
        for rank in self.ranks:
            for place, piece in self.left(rank):
                b.hold_piece(place, piece)
        for rank in self.ranks:
            own = b.queries.owned[rank]
            outs = [self.own_out(rank, stage) for stage in count]
            start_gradients(b, rank, b.piece(Tensor.DOUT, own, b.problem.all_heads), outs)
        for stage in count:
            trade = self.all_to_all(stages.heads[stage])
            if not self.keeps:
                self.project_to_heads(stage)
                to_heads(b, trade, Tensor.OUT, version=GATHERED, arrive=0)
            to_heads(b, trade, Tensor.DOUT)
            self.attend(stage)
            for rank in self.ranks:
                b.finish(rank, [Tensor.DQ_PART], self.whole(rank), stages.heads[stage][rank])
            to_tokens(b, trade, Tensor.DQ)
            self.input_gradients(stage)
        for rank in self.ranks:
            finish_x(b, rank, b.queries.owned[rank])
            output_weight_gradients(b, rank, *stages.sets())
        return b.build()

    def input_gradients(self, stage: int) -> None:
        """Bring home the gradients of keys that are done with, and add all of a stage to dx."""
        b, released = self.b, self.stages.released_kv(stage)
        for step in range(1, self.ring):
            for rank in self.ranks:
                home = self.visited(rank, step)
                keys = b.needed_kv(self.whole(rank), self.keys(home))
                b.send(rank, home, KV_GRADS, keys, released[rank], arrive=from_rank(rank))
                b.merge(home, KV_GRADS, keys, released[rank], from_rank(rank))
        done = kv_grads_to_tokens(b, self.all_to_all(released)) if any(released) else []
        for rank in self.ranks:
            own, heads = b.queries.owned[rank], self.stages.in_stage(stage)
            grads = [b.piece(Tensor.DQ, own, heads, GATHERED)]
            grads += [piece for at, piece in done if at == rank]
            add_gradients(b, rank, grads)
