"""From who computes each block to a whole plan: operands out, tiles, partial results home.

A block's rank gets the query chunk and the key chunk that it lacks straight from their owners, one
transfer per (chunk, destination). It accumulates there, and when a chunk's last block is done the
partial result goes home, where the owner folds all that come back in a fixed order.

    forward     q, (k, v)                             out, lse of a row
    backward    (q, lse, dout, delta or out), (k, v)  dq of a row; dk, dv of a column
"""

from collections.abc import Iterable, Iterator, Sequence

from harness.build import KV, KV_GRADS, OUT_PARTS, Chunks, PlanBuilder
from harness.plan import (
    CollectiveKind,
    Delta,
    Leg,
    Piece,
    Place,
    Plan,
    Tensor,
    Tile,
    from_rank,
)
from harness.problem import Direction, Problem
from harness.tiling import Allocation
from harness.verbs import finish_tokens, hold_tokens

Block = tuple[int, int]
"""A query chunk and a key chunk."""

Move = tuple[int, int, Chunks]
"""Source rank, destination rank, chunks."""


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
        b, heads = self.b, self.b.problem.all_heads
        for rank in range(b.problem.cp):
            hold_tokens(b, rank)
        if self.delta:
            for rank in range(b.problem.cp):
                out, dout = (
                    b.piece(tensor, b.attending_q(b.queries.owned[rank]), heads)
                    for tensor in (Tensor.OUT, Tensor.DOUT)
                )
                if out.chunks:
                    b.add(Delta(Place(rank), out, dout))

    def attend(self, rank: int, q: Chunks, kv: Chunks, versions: tuple[int, int] = (0, 0)) -> None:
        """Attend query chunks to key chunks on a rank, from copies of these versions."""
        b, heads = self.b, self.b.problem.all_heads
        kv = b.needed_kv(q, kv)
        q = b.needed_q(q, kv)
        if not q:
            return
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


def plan_allocation(
    problem: Problem,
    name: str,
    direction: Direction,
    allocation: Allocation,
    *,
    delta: bool = True,
) -> Plan:
    """Plan an allocation, one tile per block, in an order that a first-in-first-out stream can run.

    Transfers go in rounds by the distance from source to destination, so that each round is a
    matching of ports. A rank computes what it has first, then what arrives first, and of that the
    rows of others before its own, so that partial results leave early.

    Args:
        problem: What is computed.
        name: Name that the plan will carry.
        direction: Forward or backward.
        allocation: Who owns chunks and who computes blocks; blocks without allowed pairs are
            left out whoever they are given to.
        delta: Backward, ship delta with rows that are computed elsewhere; else ship out. Where no
            row leaves its owner, nothing is shipped and kernels take out.

    Raises:
        ValueError: Nobody computes a block that has allowed pairs.
    """
    work = _Work(problem, allocation)
    b = PlanBuilder(problem, name, direction, allocation.queries, allocation.keys)
    errands = Errands(b, delta=delta and work.rows_leave)
    errands.start()
    for src, dst, on_kv, chunk in work.moves():
        bring = errands.bring_columns if on_kv else errands.bring_rows
        bring(src, dst, (chunk,))
    rows, columns = work.last_uses()
    for rank, (i, j) in work.order():
        errands.attend(rank, (i,), (j,))
        if rows[rank, i] == j:
            errands.return_rows(rank, work.row_owner[i], (i,))
        if columns[rank, j] == i and direction is Direction.BACKWARD:
            errands.return_columns(rank, work.column_owner[j], (j,))
    return errands.end()


class _Work:
    """What an allocation asks of each rank, in order."""

    def __init__(self, problem: Problem, allocation: Allocation) -> None:
        self.cp = problem.cp
        self.row_owner, self.column_owner = allocation.queries.owner(), allocation.keys.owner()
        self.areas: list[list[int]] = problem.pattern.areas(
            allocation.queries.chunks, allocation.keys.chunks
        ).tolist()
        self.blocks: list[list[Block]] = [[] for _ in range(problem.cp)]
        for i, (row, areas) in enumerate(zip(allocation.cells, self.areas, strict=True)):
            for j, (rank, area) in enumerate(zip(row, areas, strict=True)):
                if not area:
                    continue
                if rank is None:
                    raise ValueError(
                        f"allocation: block ({i}, {j}) has {area} allowed pairs and must have a "
                        f"rank in 0..{problem.cp - 1}"
                    )
                self.blocks[rank].append((i, j))
        self._arrival = self._arrivals()
        for rank in range(self.cp):
            self.blocks[rank].sort(key=lambda block: self._priority(rank, block))

    @property
    def rows_leave(self) -> bool:
        """Whether some row is computed away from its owner."""
        return any(
            self.row_owner[i] != rank for rank, blocks in enumerate(self.blocks) for i, _ in blocks
        )

    def moves(self) -> list[tuple[int, int, bool, int]]:
        """(source, destination, whether a key chunk, chunk), in rounds."""
        return list(self._arrival)

    def _arrivals(self) -> dict[tuple[int, int, bool, int], int]:
        """Transfers in rounds -> how many their destination gets before."""
        needed = {
            (owner[chunk], rank, on_kv, chunk)
            for rank, blocks in enumerate(self.blocks)
            for block in blocks
            for on_kv, chunk in enumerate(block)
            for owner in (self.column_owner if on_kv else self.row_owner,)
            if owner[chunk] != rank
        }
        turns: dict[tuple[int, int], int] = {}
        rounds = []
        for src, dst, on_kv, chunk in sorted(needed):
            turn = turns[src, dst] = turns.get((src, dst), -1) + 1
            rounds.append(((dst - src) % self.cp, turn, src, dst, bool(on_kv), chunk))
        got = [0] * self.cp
        arrivals = {}
        for _, _, src, dst, on_kv, chunk in sorted(rounds):
            arrivals[src, dst, on_kv, chunk] = got[dst]
            got[dst] += 1
        return arrivals

    def _priority(self, rank: int, block: Block) -> tuple[int, bool, int, int]:
        i, j = block
        row = self._arrival.get((self.row_owner[i], rank, False, i), -1)
        column = self._arrival.get((self.column_owner[j], rank, True, j), -1)
        return max(row, column), self.row_owner[i] == rank, i, j

    def order(self) -> Iterator[tuple[int, Block]]:
        """All blocks in about the order in which ranks finish them, if areas were times."""
        ends = []
        for rank, blocks in enumerate(self.blocks):
            done = 0
            for at, (i, j) in enumerate(blocks):
                done += self.areas[i][j]
                ends.append((done, rank, at))
        for _, rank, at in sorted(ends):
            yield rank, self.blocks[rank][at]

    def last_uses(self) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
        """(rank, row) -> the key chunk of its last block there; (rank, column) -> likewise."""
        rows = {(r, i): j for r, blocks in enumerate(self.blocks) for i, j in blocks}
        columns = {(r, j): i for r, blocks in enumerate(self.blocks) for i, j in blocks}
        return rows, columns
