"""PlanBuilder: the verbs that strategies speak.

A strategy says who holds what, and then tiles, sends and finishes. The builder trims each tile to
what the pattern needs, derives the edges from the one readiness rule, and numbers the tasks.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import pairwise
from operator import or_

from harness.plan import heads as head_sets
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Residency
from harness.plan.sharding import Sharding
from harness.plan.tasks import (
    Collective,
    CollectiveKind,
    Finish,
    Leg,
    Merge,
    Piece,
    Place,
    Resident,
    Task,
    Tensor,
    Tile,
    Transfer,
    ordered,
)
from harness.planning.need import NeedCut, cut_at_need

KV = (Tensor.K, Tensor.V)
OUT_PARTS = (Tensor.OUT_PART, Tensor.LSE_PART)
KV_GRADS = (Tensor.DK_PART, Tensor.DV_PART)

Chunks = tuple[int, ...]
Tensors = tuple[Tensor, ...]

_FORWARD = Direction.FORWARD  # a long ring makes a million tiles, and enums are slow to ask
_Q, _LSE, _DOUT, _OUT, _DQ_PART = (
    (tensor,) for tensor in (Tensor.Q, Tensor.LSE, Tensor.DOUT, Tensor.OUT, Tensor.DQ_PART)
)
_DELTA = (Tensor.DELTA,)


class PlanBuilder:
    """Collect the tasks of one plan.

    Args:
        problem: The problem.
        strategy: Name that the plan will carry.
        direction: Forward or backward.
        queries: Who owns which query tokens.
        keys: Who owns which key tokens; equal to `queries` for self-attention.
        prune: Leave out transfers that the pattern makes useless.
        cut: Which of the tokens move, and are cut where need ends if transfers are pruned.
        groups: Per rank, the group that holds its tokens together; None = every rank its own.
        align: Tokens that cuts are rounded to, so that more than the need moves.

    Attributes:
        queries: Who owns which parts of the query chunks, after the cuts.
        keys: The same, of the key chunks.
        parts_q: Per query chunk that was given, its parts.
        parts_kv: The same, of key chunks.
        given_keys: Who owns which key chunks, before the cuts.
    """

    def __init__(
        self,
        problem: Problem,
        strategy: str,
        direction: Direction,
        queries: Sharding,
        keys: Sharding,
        *,
        prune: bool = True,
        cut: NeedCut = NeedCut.KEYS,
        groups: Sequence[int] | None = None,
        align: int = 1,
    ) -> None:
        self.problem = problem
        self.strategy = strategy
        self.direction = direction
        self.prune = prune
        together = range(problem.cp) if groups is None else groups
        parts_q, parts_kv = cut_at_need(
            problem.pattern, queries, keys, cut if prune else NeedCut.WHOLE, together, align
        )
        self.queries, self.parts_q = parts_q.sharding, parts_q.of
        self.keys, self.parts_kv = parts_kv.sharding, parts_kv.of
        self.given_keys = keys
        areas = problem.pattern.areas(self.queries.chunks, self.keys.chunks)
        self._area: list[list[int]] = areas.tolist()
        # Per query chunk, the bit set of the key chunks that it attends.
        self._row = [sum(1 << j for j, area in enumerate(row) if area) for row in self._area]
        self._attended = reduce(or_, self._row, 0)
        self._asked: dict[tuple[Tensor, Chunks, int, int], Piece] = {}  # by query heads
        self._groups: dict[tuple[Tensors, Chunks, int, int], tuple[Piece, ...]] = {}
        self._places = [Place(rank) for rank in range(problem.cp)]
        self._named: dict[tuple[Tensor, Chunks, int, int], Piece] = {}  # by heads of its own kind
        self._initial: list[Resident] = []
        self._tasks: list[Task] = []
        self._outputs: list[Resident] = []
        self._saved: list[Resident] = []
        self._residency: Residency | None = None

    # What the pattern needs -----------------------------------------------------------------

    def area(self, q: Chunks, kv: Chunks) -> int:
        """Unmasked pairs per head between query chunks and key chunks."""
        return sum([self._area[i][j] for i in q for j in kv])

    def needed_kv(self, q: Chunks, kv: Chunks) -> Chunks:
        """Those of the key chunks that some of the query chunks attend."""
        met = 0
        for i in q:
            met |= self._row[i]
        return _among(kv, [j for j in kv if met >> j & 1])

    def needed_q(self, q: Chunks, kv: Chunks) -> Chunks:
        """Those of the query chunks that attend some of the key chunks."""
        wanted = 0
        for j in kv:
            wanted |= 1 << j
        return _among(q, [i for i in q if self._row[i] & wanted])

    def key_parts(self, chunks: Iterable[int]) -> Chunks:
        """The parts of key chunks that were given."""
        return tuple([part for chunk in chunks for part in self.parts_kv[chunk]])

    def attended_kv(self, kv: Chunks) -> Chunks:
        """Those of the key chunks that some query attends."""
        return tuple([j for j in kv if self._attended >> j & 1])

    def attending_q(self, q: Chunks) -> Chunks:
        """Those of the query chunks that attend some key."""
        return tuple([i for i in q if self._row[i]])

    def tokens(self, tensor: Tensor, chunks: Chunks) -> int:
        """Tokens in chunks of a tensor; a weight counts as one."""
        if tensor.is_weight:
            return 1
        table = self.keys.chunks if tensor.on_kv else self.queries.chunks
        return sum(len(table[c]) for c in chunks)

    # Residency ------------------------------------------------------------------------------

    def hold(
        self, rank: int, tensors: Iterable[Tensor], chunks: Chunks, heads: int, version: int = 0
    ) -> None:
        """Let a rank hold pieces before the first task; `heads` are query heads."""
        for tensor in tensors:
            piece = self.piece(tensor, chunks, heads, version)
            if piece.heads and self.tokens(tensor, chunks):
                self._initial.append(Resident(self.place(rank), piece))

    def hold_piece(self, place: Place, piece: Piece) -> None:
        """Let a place hold one exact piece before the first task."""
        if piece.chunks and piece.heads and self.tokens(piece.tensor, piece.chunks):
            self._initial.append(Resident(place, piece))

    def piece(self, tensor: Tensor, chunks: Chunks, heads: int, version: int = 0) -> Piece:
        """Name a piece by its query heads; for a key tensor these become their KV heads.

        Empty chunks are left out: they hold nothing and move nothing.
        """
        key = (tensor, chunks, heads, version)
        piece = self._asked.get(key)
        if piece is None:
            own = self.problem.kv_heads(heads) if tensor.on_kv else heads
            piece = self._asked[key] = self.exact_piece(tensor, chunks, own, version)
        return piece

    def pieces(
        self, tensors: Tensors, chunks: Chunks, heads: int, version: int = 0
    ) -> tuple[Piece, ...]:
        """Name the pieces of several tensors by their query heads; those that hold something."""
        key = (tensors, chunks, heads, version)
        found = self._groups.get(key)
        if found is None:
            named = [self.piece(tensor, chunks, heads, version) for tensor in tensors]
            found = tuple([piece for piece in named if piece.chunks and piece.heads])
            self._groups[key] = found
        return found

    def place(self, rank: int) -> Place:
        """A rank's device; always the same value of one of the problem's ranks."""
        return self._places[rank] if 0 <= rank < len(self._places) else Place(rank)

    def exact_piece(self, tensor: Tensor, chunks: Chunks, heads: int, version: int = 0) -> Piece:
        """Name a piece by the heads of its own kind (KV heads for a key tensor)."""
        key = (tensor, chunks, heads, version)
        piece = self._named.get(key)
        if piece is None:
            table = self.keys.chunks if tensor.on_kv else self.queries.chunks
            piece = Piece(tensor, tuple([c for c in chunks if table[c]]), heads, version)
            self._named[key] = piece
        return piece

    def output(
        self, rank: int, tensors: Iterable[Tensor], chunks: Chunks, heads: int, version: int = 0
    ) -> None:
        """Promise that results end at a rank."""
        for tensor in tensors:
            self.output_piece(rank, self.piece(tensor, chunks, heads, version))

    def output_piece(self, rank: int, piece: Piece) -> None:
        """Promise that one exact piece ends at a rank."""
        if piece.chunks and piece.heads:
            self._outputs.append(Resident(self.place(rank), piece))

    def save(
        self, rank: int, tensors: Iterable[Tensor], chunks: Chunks, heads: int, version: int = 0
    ) -> None:
        """Promise that a rank keeps pieces for the backward plan."""
        for tensor in tensors:
            piece = self.piece(tensor, chunks, heads, version)
            if piece.chunks and piece.heads:
                self._saved.append(Resident(self.place(rank), piece))

    def save_piece(self, place: Place, piece: Piece) -> None:
        """Promise that a place keeps one exact piece for the backward plan."""
        if piece.chunks and piece.heads:
            self._saved.append(Resident(place, piece))

    # Tasks ----------------------------------------------------------------------------------

    def add(self, task: Task) -> int:
        """Append a task with the edges that the readiness rule asks for; return its id."""
        if self._residency is None:
            self._residency = Residency(tuple(self._initial))
        index = len(self._tasks)
        self._tasks.append(ordered(task, self._residency.requires(index, task)))
        return index

    def tile(
        self,
        rank: int,
        q: Chunks,
        kv: Chunks,
        heads: int,
        *,
        q_version: int = 0,
        kv_version: int = 0,
        delta: bool = False,
    ) -> None:
        """Attend query chunks to key chunks on a rank, trimmed to what the pattern needs.

        Args:
            rank: Where.
            q: Query chunks.
            kv: Key chunks.
            heads: Bit set of query heads.
            q_version: Version of q and dout that it reads.
            kv_version: Version of k and v that it reads.
            delta: Backward reads delta, which is there already, and not out.
        """
        kv = self.needed_kv(q, kv)
        q = self.needed_q(q, kv)
        if not (q and heads):
            return
        pieces = self.pieces
        reads = pieces(_Q, q, heads, q_version) + pieces(KV, kv, heads, kv_version)
        if self.direction is _FORWARD:
            writes = pieces(OUT_PARTS, q, heads)
        else:
            reads += pieces(_LSE, q, heads) + pieces(_DOUT, q, heads, q_version)
            reads += pieces(_DELTA if delta else _OUT, q, heads)
            writes = pieces(_DQ_PART, q, heads) + pieces(KV_GRADS, kv, heads)
        place, area = self.place(rank), self.area(q, kv)
        self.add(Tile(place, self.direction, reads, writes, area))

    def send(
        self,
        src: int,
        dst: int,
        tensors: Iterable[Tensor],
        chunks: Chunks,
        heads: int,
        *,
        version: int = 0,
        arrive: int | None = None,
    ) -> None:
        """Move pieces from one rank to another; a partial result leaves its source.

        They arrive under `arrive`, or else under the version that they had.
        """
        pieces = self.pieces(tuple(tensors), chunks, heads, version)
        if pieces and src != dst:
            arriving = version if arrive is None else arrive
            self.add(Transfer(Leg(self.place(src), self.place(dst), pieces, arriving)))

    def collective(self, kind: CollectiveKind, legs: Iterable[Leg]) -> None:
        """Issue legs as one operation."""
        kept = tuple(
            leg._replace(pieces=pieces)
            for leg in legs
            if (pieces := tuple(p for p in leg.pieces if p.chunks and p.heads))
        )
        if kept:
            self.add(Collective(kind, kept))

    def merge(
        self, rank: int, tensors: Iterable[Tensor], chunks: Chunks, heads: int, version: int
    ) -> None:
        """Fold an arrived partial result into the rank's accumulators."""
        self.merge_pieces(rank, [self.piece(t, chunks, heads, version) for t in tensors])

    def merge_pieces(self, rank: int, pieces: Iterable[Piece]) -> None:
        """Fold arrived pieces into the rank's accumulators, in this order."""
        solid = tuple(piece for piece in pieces if piece.chunks and piece.heads)
        if solid:
            self.add(Merge(self.place(rank), solid))

    def finish(self, rank: int, tensors: Iterable[Tensor], chunks: Chunks, heads: int) -> None:
        """Turn complete accumulators into results."""
        self.finish_pieces(rank, [self.piece(tensor, chunks, heads) for tensor in tensors])

    def finish_pieces(self, rank: int, pieces: Iterable[Piece]) -> None:
        """Turn complete accumulators, named piece by piece, into results."""
        solid = tuple(piece for piece in pieces if piece.chunks and piece.heads)
        if solid:
            self.add(Finish(self.place(rank), solid))

    def build(self) -> Plan:
        """Return the plan."""
        return Plan(
            problem=self.problem,
            strategy=self.strategy,
            direction=self.direction,
            q_chunks=self.queries.chunks,
            kv_chunks=self.keys.chunks,
            initial=tuple(self._initial),
            tasks=tuple(self._tasks),
            outputs=tuple(self._outputs),
            saved=tuple(self._saved),
        )


def _among(all_of: Chunks, found: list[int]) -> Chunks:
    """Return the chunks that were found, in their order; the same object if all were."""
    return all_of if len(found) == len(all_of) else tuple(found)


def shard_both(problem: Problem, how: Callable[[int, int], Sharding]) -> tuple[Sharding, Sharding]:
    """Shard queries and keys the same way, each by its own length."""
    queries = how(problem.seqlen_q, problem.cp)
    if problem.seqlen_kv == problem.seqlen_q:
        return queries, queries
    return queries, how(problem.seqlen_kv, problem.cp)


def balanced_heads(problem: Problem, ranks: int) -> tuple[int, ...]:
    """Deal query heads to ranks: contiguous, the fullest as small as can be, KV copies fewest.

    A rank needs a copy of each KV head that one of its query heads uses. Among all ways to cut the
    heads into runs of at most ceil(heads_q / ranks), take one with the fewest copies, and among
    those one whose runs differ least.

    Returns:
        Per rank, the bit set of its query heads.
    """
    cap = -(-problem.heads_q // ranks)
    heads, group = problem.heads_q, problem.group
    # best[h] = (KV copies, sum of squared runs, cuts) for the first h heads on r ranks so far.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for rank in range(ranks):
        grown: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for done, (copies, spread, cuts) in best.items():
            for stop in range(done + 1, min(done + cap, heads - (ranks - rank - 1)) + 1):
                used = (stop - 1) // group - done // group + 1
                choice = (copies + used, spread + (stop - done) ** 2, (*cuts, stop))
                if stop not in grown or choice < grown[stop]:
                    grown[stop] = choice
        best = grown
    cuts = (0, *best[heads][2])
    return tuple(head_sets.span(start, stop) for start, stop in pairwise(cuts))
