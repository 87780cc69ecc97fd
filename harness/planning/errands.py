"""Bring operands to where blocks are computed, and partial results home: one at a time, or at once.

forward     q, (k, v)                             out, lse of a row
backward    (q, lse, dout, delta or out), (k, v)  dq of a row; dk, dv of a column
"""

from collections.abc import Iterable, Sequence

from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.tasks import CollectiveKind, Leg, Piece, Place, Tensor, Tile, from_rank
from harness.planning.builder import KV, KV_GRADS, OUT_PARTS, Chunks, PlanBuilder
from harness.planning.token_owners import Move, finish_tokens, hold_tokens, make_delta


class Errands:
    """Bring operands to where blocks are computed, and partial results home.

    Args:
        b: Collects the tasks.
        delta: Backward, compute delta at the owner of a row and ship that, not out.
    """

    def __init__(self, b: PlanBuilder, *, delta: bool) -> None:
        self.b = b
        backward = b.direction is Direction.BACKWARD
        self.delta = backward and delta
        row = (Tensor.LSE, Tensor.DOUT, Tensor.DELTA if self.delta else Tensor.OUT)
        self.row = (Tensor.Q, *row) if backward else (Tensor.Q,)
        self.row_parts = (Tensor.DQ_PART,) if backward else OUT_PARTS
        self._folds: list[tuple[int, Piece]] = []

    def start(self) -> None:
        """Hold every rank's own tokens; backward, compute delta of the rows that attend."""
        b = self.b
        for rank in range(b.problem.cp):
            hold_tokens(b, rank)
        for rank in range(b.problem.cp) if self.delta else ():
            make_delta(b, rank)

    def attend(self, rank: int, q: Chunks, kv: Chunks, versions: tuple[int, int] = (0, 0)) -> None:
        """Attend query chunks to those key chunks that they need, from copies of these versions."""
        kv = self.b.needed_kv(q, kv)
        q = self.b.needed_q(q, kv)
        if q:
            self.attend_all(rank, q, kv, versions)

    def attend_all(
        self, rank: int, q: Chunks, kv: Chunks, versions: tuple[int, int] = (0, 0)
    ) -> None:
        """As `attend`, with chunks that are not needed as well."""
        b, heads = self.b, self.b.problem.all_heads
        reads = [(Tensor.Q, q), *((tensor, kv) for tensor in KV), *((t, q) for t in self.row[1:])]
        writes = [(tensor, q) for tensor in self.row_parts]
        if b.direction is Direction.BACKWARD:
            writes += [(tensor, kv) for tensor in KV_GRADS]
        b.add(
            Tile(
                place=Place(rank),
                direction=b.direction,
                reads=tuple(
                    b.piece(tensor, chunks, heads, versions[tensor.on_kv])
                    for tensor, chunks in reads
                ),
                writes=tuple(b.piece(tensor, chunks, heads) for tensor, chunks in writes),
                area=b.area(q, kv),
            )
        )

    # One transfer at a time -----------------------------------------------------------------

    def bring_rows(self, src: int, dst: int, q: Chunks) -> None:
        """Send what a rank needs of rows."""
        self.b.send(src, dst, self.row, q, self.b.problem.all_heads)

    def bring_columns(self, src: int, dst: int, kv: Chunks) -> None:
        """Send what a rank needs of columns."""
        self.b.send(src, dst, KV, kv, self.b.problem.all_heads)

    def return_rows(self, src: int, dst: int, q: Chunks) -> None:
        """Send home the partial results of rows."""
        self._return(src, dst, self.row_parts, q)

    def return_columns(self, src: int, dst: int, kv: Chunks) -> None:
        """Send home the partial gradients of columns."""
        self._return(src, dst, KV_GRADS, kv)

    def _return(self, src: int, dst: int, parts: Iterable[Tensor], chunks: Chunks) -> None:
        if src == dst or not chunks:
            return
        parts, heads = tuple(parts), self.b.problem.all_heads
        self.b.send(src, dst, parts, chunks, heads, arrive=from_rank(src))
        self._fold(src, dst, parts, chunks)

    def _fold(self, src: int, dst: int, parts: Iterable[Tensor], chunks: Chunks) -> None:
        heads = self.b.problem.all_heads
        self._folds += [(dst, self.b.piece(t, chunks, heads, from_rank(src))) for t in parts]

    def relay(self, src: int, dst: int, on_kv: bool, chunks: Chunks) -> None:
        """Send a partial result to a rank that folds it before it sends its own sum home."""
        parts = KV_GRADS if on_kv else self.row_parts
        self.b.send(src, dst, parts, chunks, self.b.problem.all_heads, arrive=from_rank(src))

    def fold(self, rank: int, src: int, on_kv: bool, chunks: Chunks) -> None:
        """Fold what a rank relayed into a rank's own partial result."""
        parts = KV_GRADS if on_kv else self.row_parts
        self.b.merge(rank, parts, chunks, self.b.problem.all_heads, from_rank(src))

    # Many at once ---------------------------------------------------------------------------

    def gather_rows(self, moves: Sequence[Move], version: int) -> None:
        """Bring rows as one all-gather; what a rank has itself is copied beside it."""
        self._gather(self.row, moves, version)

    def gather_columns(self, moves: Sequence[Move], version: int) -> None:
        """As `gather_rows`, for columns."""
        self._gather(KV, moves, version)

    def _gather(self, tensors: Sequence[Tensor], moves: Sequence[Move], version: int) -> None:
        self.b.collective(
            CollectiveKind.ALL_GATHER,
            [
                Leg(Place(src), Place(dst), self._pieces(tensors, chunks), version)
                for src, dst, chunks in moves
            ],
        )

    def return_all_rows(self, moves: Sequence[Move]) -> None:
        """Send home partial results as one operation.

        Partial outputs cannot be summed on the way, so forward this is an all-to-all of (out, lse)
        that owners merge in order; gradients are a reduce-scatter.
        """
        forward = self.b.direction is Direction.FORWARD
        kind = CollectiveKind.ALL_TO_ALL if forward else CollectiveKind.REDUCE_SCATTER
        self._return_all(kind, self.row_parts, moves)

    def return_all_columns(self, moves: Sequence[Move]) -> None:
        """Send home partial dk and dv as one reduce-scatter."""
        self._return_all(CollectiveKind.REDUCE_SCATTER, KV_GRADS, moves)

    def _return_all(
        self, kind: CollectiveKind, parts: Sequence[Tensor], moves: Sequence[Move]
    ) -> None:
        away = [(src, dst, chunks) for src, dst, chunks in moves if src != dst and chunks]
        self.b.collective(
            kind,
            [
                Leg(Place(src), Place(dst), self._pieces(parts, chunks), from_rank(src))
                for src, dst, chunks in away
            ],
        )
        for src, dst, chunks in away:
            self._fold(src, dst, parts, chunks)

    def _pieces(self, tensors: Sequence[Tensor], chunks: Chunks) -> tuple[Piece, ...]:
        return tuple(self.b.piece(t, chunks, self.b.problem.all_heads) for t in tensors)

    # The end --------------------------------------------------------------------------------

    def end(self) -> Plan:
        """Fold what came home, in the order in which it was sent, finish, and return the plan."""
        b, together = self.b, {Tensor.OUT_PART: 2, Tensor.DK_PART: 2}
        folds = iter(self._folds)
        for dst, first in folds:
            rest = [next(folds)[1] for _ in range(together.get(first.tensor, 1) - 1)]
            b.merge_pieces(dst, [first, *rest])
        for rank in range(b.problem.cp):
            finish_tokens(b, rank)
        return b.build()
