"""Gathers: keys are brought together, attended once per rank, and their gradients returned.

Flat, each rank gets what it lacks straight from its owner. In two steps what several GPUs of a node
need enters the node once: GPU i of one node sends to GPU i of the other, so that all NICs share the
load, and that one spreads it. Gradients go the same way back, summed inside a node before they
leave it.

    node 0              node 1          keys of rank 1, needed by 4, 6 and 7:
    0 1 2 3 ----NIC---> 4 5 6 7         first 1 -> 5 beside 0 -> 4, 2 -> 6 and 3 -> 7,
                        5 -NVLink-> 4 6 7         then 5 -> 4, 6 and 7
"""

from dataclasses import dataclass

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding
from harness.plan.tasks import GATHERED, CollectiveKind, Leg, Piece, from_rank
from harness.planning.builder import KV, KV_GRADS, Chunks, PlanBuilder
from harness.planning.collectives import gather_attention
from harness.planning.token_owners import finish_tokens, hold_tokens


def plan_gathers(
    problem: Problem,
    name: str,
    direction: Direction,
    dealt: tuple[Sharding, Sharding],
    *,
    prune: bool = True,
    gpus_per_node: int | None = None,
    at_once: bool = False,
) -> Plan:
    """Plan a gather of keys, one tile per rank and, backward, the return of their gradients.

    Args:
        problem: The problem.
        name: Name that the plan will carry.
        direction: Forward or backward.
        dealt: Who owns queries, and keys.
        prune: Leave out transfers that the pattern makes useless.
        gpus_per_node: Gather in two steps over nodes of so many ranks; divides cp. None is flat.
        at_once: Add all partial gradients that a rank got in one task.
    """
    b = PlanBuilder(problem, name, direction, *dealt, prune=prune)
    if gpus_per_node is not None:
        _TwoSteps(b, gpus_per_node, at_once).attention()
    elif problem.cp > 1:
        gather_attention(b, at_once=at_once)
    else:  # nothing to gather
        hold_tokens(b, 0)
        b.tile(0, b.queries.owned[0], b.keys.owned[0], problem.all_heads)
        finish_tokens(b, 0)
    return b.build()


@dataclass(frozen=True, slots=True)
class _TwoSteps:
    """Between nodes once per chunk, and inside nodes to whoever needs it.

    Attributes:
        b: Collects the tasks.
        gpus: Ranks of a node.
        at_once: As in `plan_gathers`.
    """

    b: PlanBuilder
    gpus: int
    at_once: bool

    def attention(self) -> None:
        """Write the whole plan, as `gather_attention`."""
        b, ranks = self.b, range(self.b.problem.cp)
        for rank in ranks:
            hold_tokens(b, rank)
        reach = self.gather()
        for rank in ranks:
            heads = b.problem.all_heads
            b.tile(rank, b.queries.owned[rank], reach[rank], heads, kv_version=GATHERED)
        if b.direction is Direction.BACKWARD:
            self.return_gradients()
        for rank in ranks:
            finish_tokens(b, rank)

    def gather(self) -> dict[int, Chunks]:
        """Bring to every rank the key chunks that its queries need; return them per rank."""
        for rail in range(self.gpus):
            self.b.collective(
                CollectiveKind.ALL_GATHER,
                [
                    self._leg(owner, gate, self._needed_in(gate, owner), 0)
                    for owner in self._rail(rail)
                    for gate in self._rail(rail)
                    if gate != owner
                ],
            )
        for node in self._nodes():
            self.b.collective(CollectiveKind.ALL_GATHER, self._spread(node))
        every = tuple(range(len(self.b.keys.chunks)))
        return {
            rank: self.b.needed_kv(self.b.queries.owned[rank], every)
            for rank in range(self.b.problem.cp)
        }

    def return_gradients(self) -> None:
        """Bring partial dk and dv home: summed at one rank of each node, then at the owner."""
        sums: list[tuple[int, int, Chunks]] = []
        for node in self._nodes():
            moves = [
                (src, gate, self._chunks_through(gate, src))
                for gate in node
                for src in node
                if src != gate
            ]
            self._return(moves)
            sums += moves
        self._merge(sums)
        for rail in range(self.gpus):
            moves = [
                (gate, owner, self._needed_in(gate, owner))
                for owner in self._rail(rail)
                for gate in self._rail(rail)
                if gate != owner
            ]
            self._return(moves)
            self._merge(moves)

    def _nodes(self) -> list[range]:
        cp = self.b.problem.cp
        return [range(first, first + self.gpus) for first in range(0, cp, self.gpus)]

    def _rail(self, number: int) -> range:
        """The GPUs of one number, one of each node."""
        return range(number, self.b.problem.cp, self.gpus)

    def _node_of(self, rank: int) -> range:
        first = rank // self.gpus * self.gpus
        return range(first, first + self.gpus)

    def _needed_in(self, gate: int, owner: int) -> Chunks:
        """The chunks of an owner that some rank of a node needs."""
        queries = tuple(c for rank in self._node_of(gate) for c in self.b.queries.owned[rank])
        return self.b.needed_kv(queries, self.b.keys.owned[owner])

    def _chunks_through(self, gate: int, rank: int) -> Chunks:
        """The chunks that a rank needs from all owners that share a rail with one of its node."""
        queries = self.b.queries.owned[rank]
        owners = self._rail(gate % self.gpus)
        needed = (self.b.needed_kv(queries, self.b.keys.owned[owner]) for owner in owners)
        return tuple(sorted(chunk for chunks in needed for chunk in chunks))

    def _spread(self, node: range) -> list[Leg]:
        legs = []
        for dst in node:
            for gate in node:
                own = self.b.needed_kv(self.b.queries.owned[dst], self.b.keys.owned[gate])
                legs.append(self._leg(gate, dst, own, 0))
                if dst != gate:
                    mine = set(own)
                    passed = [c for c in self._chunks_through(gate, dst) if c not in mine]
                    legs.append(self._leg(gate, dst, tuple(passed), GATHERED))
        return legs

    def _leg(self, src: int, dst: int, chunks: Chunks, version: int) -> Leg:
        pieces = self.b.pieces(KV, chunks, self.b.problem.all_heads, version)
        return Leg(self.b.place(src), self.b.place(dst), pieces, GATHERED)

    def _return(self, moves: list[tuple[int, int, Chunks]]) -> None:
        heads = self.b.problem.all_heads
        self.b.collective(
            CollectiveKind.REDUCE_SCATTER,
            [
                Leg(
                    self.b.place(src),
                    self.b.place(dst),
                    self.b.pieces(KV_GRADS, chunks, heads),
                    from_rank(src),
                )
                for src, dst, chunks in moves
            ],
        )

    def _merge(self, moves: list[tuple[int, int, Chunks]]) -> None:
        b, got = self.b, dict[tuple[int, int], list[Piece]]()
        for number, (src, dst, chunks) in enumerate(moves):
            pieces = b.pieces(KV_GRADS, chunks, b.problem.all_heads, from_rank(src))
            got.setdefault((dst, 0 if self.at_once else number), []).extend(pieces)
        for (dst, _), parts in got.items():
            b.merge_pieces(dst, parts)
