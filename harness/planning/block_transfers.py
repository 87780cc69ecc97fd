"""From who computes each block to a whole plan: operands out, tiles, partial results home.

A block's rank gets the query chunk and the key chunk that it lacks, from their owners or through
one GPU of its node (see `routes`). It accumulates there, and when a chunk's last block is done the
partial result goes home the same way, where the owner folds all that come back in a fixed order.

    forward     q, (k, v)                             out, lse of a row
    backward    (q, lse, dout, delta or out), (k, v)  dq of a row; dk, dv of a column
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import CollectiveKind, Leg, Piece, Place, Tensor, Tile, from_rank
from harness.planning.block_assignment import Allocation
from harness.planning.builder import KV, KV_GRADS, OUT_PARTS, Chunks, PlanBuilder
from harness.planning.need import NeedCut
from harness.planning.routes import Hop, RoutedChunk, gateways, routes
from harness.planning.token_owners import Move, finish_tokens, hold_tokens, make_delta

BlockIndex = tuple[int, int]
"""A query chunk and a key chunk."""


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


def plan_allocation(
    problem: Problem,
    name: str,
    direction: Direction,
    allocation: Allocation,
    *,
    delta: bool = True,
    gpus_per_node: int | None = None,
    cut: NeedCut = NeedCut.WHOLE,
    align: int = 1,
) -> Plan:
    """Plan an allocation, one tile per block, in an order that a first-in-first-out stream can run.

    Transfers go in rounds by the distance from source to destination, so that each round is a
    matching of ports. A rank computes what it has first, then what arrives first, and of that the
    rows of others before its own, so that partial results leave early.

    Args:
        problem: The problem.
        name: Name that the plan will carry.
        direction: Forward or backward.
        allocation: Who owns chunks and who computes blocks; blocks without allowed pairs are
            left out whoever they are given to.
        delta: Backward, ship delta with rows that are computed elsewhere; else ship out. Where no
            row leaves its owner, nothing is shipped and kernels take out.
        gpus_per_node: Cross to another node once per chunk, between GPUs of equal number, and go on
            inside it; divides cp. None sends straight to every rank.
        cut: `NeedCut.BLOCKS` moves just what is needed, `NeedCut.KEYS` where every block is at the
            owner of its queries, in both directions: chunks are cut alike in both.
        align: Tokens that what is sent of a chunk is rounded up to.

    Raises:
        ValueError: Nobody computes a block that has allowed pairs, or nodes are not whole.
    """
    per_node = gpus_per_node or problem.cp
    if problem.cp % per_node:
        raise ValueError(
            f"allocation: gpus_per_node ({per_node}) must divide cp ({problem.cp}); "
            "None sends straight to every rank"
        )
    work = _Work(problem, allocation, per_node)
    b = PlanBuilder(
        problem, name, direction, allocation.queries, allocation.keys, cut=cut, align=align
    )
    errands = Errands(b, delta=delta and work.rows_leave)
    errands.start()
    needs = _Needs(b, work)
    for src, dst, chunk in work.hops:
        bring = errands.bring_columns if chunk[0] else errands.bring_rows
        bring(src, dst, needs.through(dst, chunk))
    homecoming = _Homecoming(errands, work, needs)
    for rank, (i, j) in work.order():
        errands.attend_all(rank, needs.there(rank, (False, i)), needs.there(rank, (True, j)))
        if work.last_of_row[rank, i] == j:
            homecoming.finished(rank, (False, i))
        if work.last_of_column[rank, j] == i and direction is Direction.BACKWARD:
            homecoming.finished(rank, (True, j))
    return errands.end()


class _Needs:
    """Parts of chunks that ranks compute with, and parts that go through a rank to others."""

    def __init__(self, b: PlanBuilder, work: "_Work") -> None:
        self.gate = gateways(work.makers, work.owner, work.gpus_per_node)
        self._owner, self._parts = work.owner, (b.parts_q, b.parts_kv)
        self._own: dict[tuple[int, RoutedChunk], Chunks] = {}
        self._through: dict[tuple[int, RoutedChunk], Chunks] = {}
        for rank, blocks in enumerate(work.blocks):
            for i, j in blocks:
                q, kv = b.parts_q[i], b.parts_kv[j]
                self._add(rank, (False, i), b.needed_q(q, kv))
                self._add(rank, (True, j), b.needed_kv(q, kv))

    def _add(self, rank: int, chunk: RoutedChunk, parts: Chunks) -> None:
        for table, at in (
            (self._own, (rank, chunk)),
            (self._through, (self.gate.get((rank, chunk), rank), chunk)),
        ):
            known = table.get(at, ())
            if known != parts:
                table[at] = tuple(sorted({*known, *parts})) if known else parts

    def own(self, rank: int, chunk: RoutedChunk) -> Chunks:
        """Parts of a chunk that a rank computes with."""
        return self._own[rank, chunk]

    def there(self, rank: int, chunk: RoutedChunk) -> Chunks:
        """Parts of a chunk that a rank has to compute with.

        All of them where it owns the chunk, and else all that any of its blocks needs: so blocks of
        one chunk have the same parts, and can be fused.
        """
        if self._owner[chunk] == rank:
            return self._parts[chunk[0]][chunk[1]]
        return self._own[rank, chunk]

    def through(self, rank: int, chunk: RoutedChunk) -> Chunks:
        """Parts of a chunk that must reach a rank: for itself and for those it passes them to."""
        return self._through.get((rank, chunk), ()) or self.own(rank, chunk)


class _Homecoming:
    """Send partial results home when they are done, through one rank per node."""

    def __init__(self, errands: Errands, work: "_Work", needs: _Needs) -> None:
        self.errands = errands
        self.owner = work.owner
        self.needs = needs
        self.waits: dict[tuple[int, RoutedChunk], set[int]] = {}
        self.parts: dict[tuple[int, RoutedChunk], list[int]] = {}
        for (rank, chunk), gate in needs.gate.items():
            self.waits.setdefault((gate, chunk), set()).add(rank)
            if rank != gate:
                self.parts.setdefault((gate, chunk), []).append(rank)

    def finished(self, rank: int, chunk: RoutedChunk) -> None:
        """Take note that a rank's partial result of a chunk is done."""
        gate, on_kv = self.needs.gate.get((rank, chunk), rank), chunk[0]
        if gate != rank:
            self.errands.relay(rank, gate, on_kv, self.needs.own(rank, chunk))
        waits = self.waits.get((gate, chunk), set())
        waits.discard(rank)
        if waits:
            return
        for src in sorted(self.parts.get((gate, chunk), ())):
            self.errands.fold(gate, src, on_kv, self.needs.own(src, chunk))
        back = self.errands.return_columns if on_kv else self.errands.return_rows
        back(gate, self.owner[chunk], self.needs.through(gate, chunk))


class _Work:
    """Work and transfers of each rank under an allocation, in order.

    Attributes:
        owner: Rank that owns each chunk.
        makers: Ranks that compute some block of each chunk.
        hops: How chunks get to ranks that lack them, in order.
        last_of_row: (rank, row) -> the column of the last block of the row there.
        last_of_column: (rank, column) -> the row of the last block of the column there.
    """

    def __init__(self, problem: Problem, allocation: Allocation, gpus_per_node: int) -> None:
        self.gpus_per_node = gpus_per_node
        rows, columns = allocation.queries.owner(), allocation.keys.owner()
        self.owner: dict[RoutedChunk, int] = {(False, i): rank for i, rank in rows.items()}
        self.owner |= {(True, j): rank for j, rank in columns.items()}
        self.areas: list[list[int]] = problem.pattern.areas(
            allocation.queries.chunks, allocation.keys.chunks
        ).tolist()
        self.blocks: list[list[BlockIndex]] = [[] for _ in range(problem.cp)]
        self.makers: dict[RoutedChunk, set[int]] = {}
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
                self.makers.setdefault((False, i), set()).add(rank)
                self.makers.setdefault((True, j), set()).add(rank)
        self.hops: list[Hop] = routes(self.makers, self.owner, problem.cp, gpus_per_node)
        arrival: dict[tuple[int, RoutedChunk], int] = {}
        got = [0] * problem.cp
        for _, dst, chunk in self.hops:
            arrival[dst, chunk] = got[dst]
            got[dst] += 1

        for rank, mine in enumerate(self.blocks):
            mine.sort(key=partial(self._priority, arrival, rank))
        self.last_of_row = {(r, i): j for r, mine in enumerate(self.blocks) for i, j in mine}
        self.last_of_column = {(r, j): i for r, mine in enumerate(self.blocks) for i, j in mine}

    def _priority(
        self, arrival: Mapping[tuple[int, RoutedChunk], int], rank: int, block: BlockIndex
    ) -> tuple[int, bool, int, int]:
        row, column = (False, block[0]), (True, block[1])
        ready = max(arrival.get((rank, row), -1), arrival.get((rank, column), -1))
        return ready, self.owner[row] == rank, *block

    @property
    def rows_leave(self) -> bool:
        """Whether some row is computed away from its owner."""
        return any(
            self.makers.get(chunk, {rank}) - {rank}
            for chunk, rank in self.owner.items()
            if not chunk[0]
        )

    def order(self) -> Iterator[tuple[int, BlockIndex]]:
        """All blocks in about the order in which ranks finish them, if areas were times."""
        ends = []
        for rank, blocks in enumerate(self.blocks):
            done = 0
            for at, (i, j) in enumerate(blocks):
                done += self.areas[i][j]
                ends.append((done, rank, at))
        for _, rank, at in sorted(ends):
            yield rank, self.blocks[rank][at]
