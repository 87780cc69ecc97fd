"""Layers chunk by chunk of the sequence, the rest on the host: the machine behind FPDT.

The paper's chunk is a `part` here, because a chunk of a plan is what one rank owns of it. A rank
holds one part of queries and two of keys: those that it attends, and those that come next (the
paper's double buffer).
"""

from collections.abc import Iterable

from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.tasks import GATHERED, NO_HEADS, Memory, Piece, Place, Tensor
from harness.planning.builder import KV, OUT_PARTS, Chunks, PlanBuilder, balanced_heads
from harness.planning.collectives import HeadGroups, kv_grads_to_tokens, to_heads, to_tokens
from harness.planning.layers.layer_verbs import (
    add_gradients,
    add_output,
    add_projection,
    fetch,
    finish_x,
    finish_y,
    hold_layer,
    offload,
    output_weight_gradients,
    release,
    start_gradients,
)

_ROWS = (Tensor.Q, Tensor.LSE, Tensor.DOUT, Tensor.OUT)
_GATHERED = frozenset({Tensor.Q, Tensor.K, Tensor.V, Tensor.DOUT})


class ChunkedLayer:
    """A layer in parts of the sequence.

    Args:
        b: Collects the tasks; rank r owns chunk r of each part, part after part.
        parts: How many.
    """

    def __init__(self, b: PlanBuilder, parts: int) -> None:
        self.b = b
        cp = b.problem.cp
        self.ranks, self.parts = range(cp), range(parts)
        self.heads = balanced_heads(b.problem, cp)
        for rank in self.ranks:
            hold_layer(b, rank)

    def chunks(self, part: int) -> Chunks:
        """The chunks of a part, one of each rank."""
        return tuple(range(part * len(self.ranks), (part + 1) * len(self.ranks)))

    def own(self, rank: int, part: int) -> Chunks:
        """A rank's own chunk of a part."""
        return (self.chunks(part)[rank],)

    def all_to_all(self, part: int) -> HeadGroups:
        """A trade of a part's tokens among all ranks."""
        return HeadGroups((tuple(self.ranks),), self.heads, self.chunks(part))

    def held(self, rank: int, part: int, tensors: Iterable[Tensor]) -> list[Piece]:
        """A part as a rank holds it after the trade: of what is gathered, what takes part."""
        b, found = self.b, []
        for tensor in tensors:
            chunks, version = self.chunks(part), 0
            if tensor in _GATHERED:
                chunks = (b.attended_kv if tensor.on_kv else b.attending_q)(chunks)
                version = GATHERED
            found.append(b.piece(tensor, chunks, self.heads[rank], version))
        return found

    def out(self, rank: int, part: int) -> Piece:
        """Out of a rank's own tokens of a part."""
        return self.b.piece(Tensor.OUT, self.own(rank, part), self.b.problem.all_heads, GATHERED)

    def meets(self, q: int, kv: int) -> bool:
        """Whether some query of a part attends a key of another."""
        return self.b.area(self.chunks(q), self.chunks(kv)) > 0

    def tile(self, rank: int, q: int, kv: int) -> None:
        """Attend a part of queries to a part of keys."""
        self.b.tile(
            rank,
            self.chunks(q),
            self.chunks(kv),
            self.heads[rank],
            q_version=GATHERED,
            kv_version=GATHERED,
        )

    def resting(self, rank: int) -> list[tuple[Place, Piece]]:
        """Pieces that rest on the host between the two directions."""
        kinds = (Tensor.Q, *KV, Tensor.OUT, Tensor.LSE)
        pieces = [
            piece
            for part in self.parts
            for piece in (*self.held(rank, part, kinds), self.out(rank, part))
        ]
        return [(Place(rank, Memory.HOST), piece) for piece in pieces]

    # Forward --------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Plan the builder's direction."""
        return self.forward() if self.b.direction is Direction.FORWARD else self.backward()

    def forward(self) -> Plan:
        """Plan y part by part, and what rests on the host for backward."""
        b, projected = self.b, 0
        for part in self.parts:
            needs = [kv for kv in self.parts if kv != part and self.meets(part, kv)]
            # Keys of later parts that this one attends are projected ahead, and rest on the host.
            ahead = range(projected, max([part, *needs]) + 1)
            for kv in ahead:
                self.project_to_heads(kv, KV)
                for rank in self.ranks:
                    offload(b, rank, self.held(rank, kv, KV))
                    if kv != part or not self.meets(part, part):
                        release(b, rank, self.held(rank, kv, KV))
            projected = max(projected, ahead.stop)
            self.project_to_heads(part, (Tensor.Q,))
            first = [part] if self.meets(part, part) else []
            self.attend(part, [*first, *needs], set(first) if part in ahead else set())
            self.finish_part(part)
        for rank in self.ranks:
            b.save_piece(Place(rank), b.exact_piece(Tensor.X, b.queries.owned[rank], NO_HEADS))
            for place, piece in self.resting(rank):
                b.save_piece(place, piece)
        return b.build()

    def project_to_heads(self, part: int, tensors: tuple[Tensor, ...]) -> None:
        """Project a part, and all-to-all it: tokens become heads."""
        for rank in self.ranks:
            for tensor in tensors:
                own = self.own(rank, part)
                add_projection(self.b, rank, self.b.piece(tensor, own, self.b.problem.all_heads))
        for tensor in tensors:
            to_heads(self.b, self.all_to_all(part), tensor)

    def attend(self, part: int, needs: list[int], present: set[int]) -> None:
        """Attend a part to others; the next keys are fetched before the present are attended."""
        for at, kv in enumerate(needs):
            for soon in needs[at : at + 2]:
                for rank in self.ranks if soon not in present else ():
                    fetch(self.b, rank, self.held(rank, soon, KV))
                present.add(soon)
            for rank in self.ranks:
                self.tile(rank, part, kv)
                release(self.b, rank, self.held(rank, kv, KV))

    def finish_part(self, part: int) -> None:
        """Finish out and y of a part, and send what backward needs of it to the host."""
        b = self.b
        for rank in self.ranks:
            b.finish(rank, OUT_PARTS, self.chunks(part), self.heads[rank])
        to_tokens(b, self.all_to_all(part), Tensor.OUT)
        for rank in self.ranks:
            add_output(b, rank, [self.out(rank, part)])
            finish_y(b, rank, self.own(rank, part))
            kept = self.held(rank, part, (Tensor.Q, Tensor.OUT, Tensor.LSE))
            offload(b, rank, [*kept, self.out(rank, part)])

    # Backward -------------------------------------------------------------------------------

    def backward(self) -> Plan:
        """Plan dx and the weights' gradients: keys outside, queries inside."""
        b = self.b
        for rank in self.ranks:
            for place, piece in self.resting(rank):
                b.hold_piece(place, piece)
        for part in self.parts:
            self.start(part)
        grown: dict[int, Chunks] = {}
        for kv in self.parts:
            self.attend_keys(kv, grown)
        for rank in self.ranks:
            for part in self.parts:
                finish_x(b, rank, self.own(rank, part))
            every = b.problem.all_heads
            output_weight_gradients(b, rank, [every], [b.problem.kv_heads(every)])
        return b.build()

    def start(self, part: int) -> None:
        """Make dout of a part, trade it, and let it rest on the host."""
        b = self.b
        for rank in self.ranks:
            dout = b.piece(Tensor.DOUT, self.own(rank, part), b.problem.all_heads)
            fetch(b, rank, [self.out(rank, part)])
            start_gradients(b, rank, dout, [self.out(rank, part)])
        to_heads(b, self.all_to_all(part), Tensor.DOUT)
        for rank in self.ranks:
            offload(b, rank, self.held(rank, part, [Tensor.DOUT]))
            release(b, rank, self.held(rank, part, [Tensor.DOUT]))
        if not any(self.meets(part, kv) for kv in self.parts):
            self.end_rows(part)

    def attend_keys(self, kv: int, grown: dict[int, Chunks]) -> None:
        """Let all parts of queries attend a part of keys; the next rows are fetched ahead."""
        b, rows = self.b, [q for q in self.parts if self.meets(q, kv)]
        for rank in self.ranks if rows else ():
            fetch(b, rank, self.held(rank, kv, KV))
        for at, q in enumerate(rows):
            for soon in rows[at : at + 2] if at == 0 else rows[at + 1 : at + 2]:
                for rank in self.ranks:
                    fetch(b, rank, [*self.held(rank, soon, _ROWS), self.dq(rank, soon, grown)])
            for rank in self.ranks:
                self.tile(rank, q, kv)
                release(b, rank, self.held(rank, q, _ROWS))
            here = b.needed_q(self.chunks(q), self.chunks(kv))
            grown[q] = tuple(sorted({*grown.get(q, ()), *here}))
            if any(self.meets(q, later) for later in self.parts[kv + 1 :]):
                for rank in self.ranks:
                    offload(b, rank, [self.dq(rank, q, grown)])
            else:
                self.end_rows(q)
        for rank in self.ranks if rows else ():
            release(b, rank, self.held(rank, kv, KV))
        done = kv_grads_to_tokens(b, self.all_to_all(kv))
        for rank in self.ranks:
            add_gradients(b, rank, [piece for at, piece in done if at == rank])

    def dq(self, rank: int, part: int, grown: dict[int, Chunks]) -> Piece:
        """The rows of dq of a part that have grown so far."""
        return self.b.piece(Tensor.DQ_PART, grown.get(part, ()), self.heads[rank])

    def end_rows(self, part: int) -> None:
        """Finish dq of a part and add it to dx."""
        b = self.b
        for rank in self.ranks:
            b.finish(rank, [Tensor.DQ_PART], self.chunks(part), self.heads[rank])
        to_tokens(b, self.all_to_all(part), Tensor.DQ)
        for rank in self.ranks:
            own = self.own(rank, part)
            add_gradients(b, rank, [b.piece(Tensor.DQ, own, b.problem.all_heads, GATHERED)])
