"""Contributions that every accumulator has absorbed: the symbolic half of the proof.

Each accumulator cell (place, tensor, chunk, set of heads) carries the set of partners whose
contributions it has: key chunks for out and dq, (query chunk, query heads) for dk and dv; at layer
scope, heads for y, (projection, heads) for dx and token chunks for weights. Tiles and products add
partners, merges join disjoint sets, transfers move them, and a finish must find exactly what the
problem asks for. Nothing of size S x S is ever made.
"""

from collections.abc import Iterable, Sequence

from harness.errors import (
    LateContributionError,
    LostResultError,
    MaskedPairError,
    MissedPairError,
    RepeatedPairError,
)
from harness.plan import heads as head_sets
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.tasks import (
    FINISHED,
    NO_HEADS,
    Finish,
    Free,
    Leg,
    Linear,
    Merge,
    Piece,
    Place,
    Task,
    Tensor,
    Tile,
    legs_of,
)

CoveredCell = tuple[Place, Tensor, int, int]
"""(place, tensor, chunk, atom of heads)."""

_BY_KEYS = frozenset({Tensor.OUT_PART, Tensor.DQ_PART})
_BY_QUERIES = frozenset({Tensor.DK_PART, Tensor.DV_PART})
_LSE = Tensor.LSE_PART  # `shapes` keeps it beside its output, whose partners are its own
_KV_PARTS = (Tensor.DK_PART, Tensor.DV_PART)


class Coverage:
    """Absorb a plan's tasks one by one; each breach raises its own error."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        problem = plan.problem
        self.areas: list[list[int]] = problem.pattern.areas(plan.q_chunks, plan.kv_chunks).tolist()
        self.q_atoms, self.kv_atoms = _head_atoms(plan)
        self.kv_of = {atom: problem.kv_heads(atom) for atom in self.q_atoms}
        self.absorbed: dict[CoveredCell, int] = {}
        self.visiting: dict[tuple[CoveredCell, int], int] = {}
        # Accumulators that are away: the task that took them and what they had.
        self.away: dict[CoveredCell, tuple[int, int]] = {}
        # Where results are finished: what left there may come home; if it lacks something, the
        # finish says so.
        self.homes = {
            (task.place, piece.tensor, chunk)
            for task in plan.tasks
            if isinstance(task, Finish)
            for piece in task.parts
            for chunk in piece.chunks
        }
        self.area_done = 0
        self._atoms_of: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._wanted: dict[tuple[Tensor, int, int], int] = {}
        self._pairs_of: dict[tuple[tuple[int, ...], int], dict[int, int]] = {}
        self._keys_of: dict[tuple[int, tuple[int, ...]], int] = {}
        n_q = len(plan.q_chunks)
        # Bit of (query chunk i, query atom a) in the set that a dk or dv cell absorbs.
        self.pair_bit = {
            (i, atom): 1 << (index * n_q + i)
            for index, atom in enumerate(self.q_atoms)
            for i in range(n_q)
        }

    def unmasked(self, index: int, tile: Tile) -> None:
        """Check a tile's area.

        Raises:
            MaskedPairError: It attends only what the pattern masks, or declares a wrong area.
        """
        area = sum([self.areas[i][j] for i in tile.q for j in tile.kv])
        if area != tile.area or area == 0:
            raise MaskedPairError(
                "a tile attends what the pattern allows and nothing else",
                rank=tile.place.rank,
                task=index,
                detail=f"it declares an area of {tile.area}; the pattern has {area} there",
            )

    def absorb(self, index: int, task: Task) -> None:
        """Advance by one task.

        Raises:
            RepeatedPairError: A contribution comes a second time.
            LateContributionError: A contribution comes after its accumulator left.
            MissedPairError: A result is finished without a contribution.
            LostResultError: A partial result is dropped.
        """
        match task:
            case Tile():
                self._tile(index, task)
            case Linear():
                self._linear(index, task)
            case Merge():
                for piece in task.sources:
                    if piece.tensor is not _LSE:
                        self._merge(index, task.place, piece)
            case Finish():
                for piece in task.parts:
                    if piece.tensor is not _LSE:
                        self._finish(index, task.place, piece)
            case Free():
                self._free(index, task)
            case _:
                for leg in legs_of(task):
                    self._move(index, leg)

    def whole_area(self) -> None:
        """Check that the tiles' areas add up to the pattern's.

        Raises:
            MissedPairError: They fall short.
            RepeatedPairError: They exceed it.
        """
        wanted = sum(map(sum, self.areas)) * self.plan.problem.heads_q
        if self.area_done != wanted:
            kind = MissedPairError if self.area_done < wanted else RepeatedPairError
            raise kind(
                "the tiles' areas add up to the pattern's",
                rank=None,
                task=None,
                detail=f"{self.area_done} instead of {wanted} pairs",
            )

    def sums(self, tensor: Tensor, heads: int, places: Iterable[Place]) -> None:
        """Check that the partial results of a weight, left at places, sum to the whole.

        Raises:
            MissedPairError: A contribution is in none of them.
            RepeatedPairError: One is in two of them.
        """
        for atom in self.split(heads, tensor):
            total = 0
            for place in places:
                bits = self.absorbed.get((place, tensor, 0, atom), 0)
                if total & bits:
                    raise self._repeated(None, (place, tensor, 0, atom), total & bits)
                total |= bits
            missing = self.wanted(tensor, 0, atom) & ~total
            if missing:
                raise self._missed(None, None, (tensor, 0, atom), missing)

    # Contributions --------------------------------------------------------------------------

    def _tile(self, index: int, tile: Tile) -> None:
        if tile.direction is self.plan.direction:  # a forward tile of a backward plan is done again
            self.area_done += tile.area * tile.heads.bit_count()
        atoms, place = self.split(tile.heads, Tensor.Q), tile.place
        tensor = Tensor.OUT_PART if tile.direction is Direction.FORWARD else Tensor.DQ_PART
        for i in tile.q:
            bits = self._keys_met(i, tile.kv)
            for atom in atoms:
                self._add(index, (place, tensor, i, atom), bits)
        if tile.direction is Direction.FORWARD:
            return
        for j in tile.kv:
            met = tuple(i for i in tile.q if self.areas[i][j])
            for kv_atom, pairs in self._pairs(met, tile.heads).items():
                for tensor in _KV_PARTS:
                    self._add(index, (place, tensor, j, kv_atom), pairs)

    def _linear(self, index: int, task: Linear) -> None:
        for piece in task.writes:
            tensor = piece.tensor
            if not tensor.is_part:
                continue
            if tensor.is_weight:
                bits = _bits(c for c in task.reads[0].chunks if self.plan.q_chunks[c])
            elif tensor is Tensor.Y_PART:
                bits = task.reads[0].heads
            else:
                bits = task.reads[0].heads << self._shift(task.reads[0].tensor)
            for chunk in piece.chunks:
                for atom in self.split(piece.heads, tensor):
                    self._add(index, (task.place, tensor, chunk, atom), bits)

    def _shift(self, gradient: Tensor) -> int:
        """Where the heads of dq, dk and dv stand in the set that dx absorbs."""
        problem = self.plan.problem
        before = {Tensor.DQ: 0, Tensor.DK: problem.heads_q}
        return before.get(gradient, problem.heads_q + problem.heads_kv)

    def _free(self, index: int, task: Free) -> None:
        for piece in task.pieces:
            if piece.tensor.is_part:
                raise LostResultError(
                    "a partial result is merged or finished, never dropped",
                    rank=task.place.rank,
                    task=index,
                    detail=f"{piece} is freed",
                )

    def _move(self, index: int, leg: Leg) -> None:
        for piece in leg.pieces:
            if not piece.tensor.is_part or piece.tensor is _LSE:
                continue
            for chunk in piece.chunks:
                for atom in self.split(piece.heads, piece.tensor):
                    bits = self._take(index, (leg.src, piece.tensor, chunk, atom), piece.version)
                    cell = (leg.dst, piece.tensor, chunk, atom)
                    if leg.version:
                        self.visiting[cell, leg.version] = bits
                    else:
                        self._join(index, cell, bits)

    def _merge(self, index: int, place: Place, piece: Piece) -> None:
        for chunk in piece.chunks:
            for atom in self.split(piece.heads, piece.tensor):
                cell = (place, piece.tensor, chunk, atom)
                self._join(index, cell, self._take(index, cell, piece.version))

    def _finish(self, index: int, place: Place, piece: Piece) -> None:
        for chunk in piece.chunks:
            for atom in self.split(piece.heads, piece.tensor):
                cell = (place, piece.tensor, chunk, atom)
                found = self._take(index, cell, piece.version)
                missing = self.wanted(piece.tensor, chunk, atom) & ~found
                if missing:
                    raise self._missed(index, place.rank, cell[1:], missing)

    def _take(self, index: int, cell: CoveredCell, version: int) -> int:
        if version:
            return self.visiting.pop((cell, version), 0)
        bits = self.absorbed.pop(cell, 0)
        self.away[cell] = (index, bits)
        return bits

    def _join(self, index: int, cell: CoveredCell, bits: int) -> None:
        """Add what arrived; an accumulator that left may come home, and then be added to again."""
        if cell in self.away and (cell[:3] in self.homes or not self.away[cell][1] & ~bits):
            del self.away[cell]
        self._add(index, cell, bits)

    def _add(self, index: int, cell: CoveredCell, bits: int) -> None:
        if cell in self.away:
            place, tensor, chunk, atom = cell
            raise LateContributionError(
                "an accumulator leaves after its last contribution",
                rank=place.rank,
                task=index,
                detail=f"{tensor.value} of chunk {chunk} heads {head_sets.text(atom)} left in "
                f"task {self.away[cell][0]} and grows again",
            )
        known = self.absorbed.get(cell, 0)
        if known & bits:
            raise self._repeated(index, cell, known & bits)
        self.absorbed[cell] = known | bits

    # Partners -------------------------------------------------------------------------------

    def wanted(self, tensor: Tensor, chunk: int, atom: int) -> int:
        """The partners that a cell must have absorbed when it is finished."""
        key = (tensor, chunk, atom)
        if key not in self._wanted:
            self._wanted[key] = self._want(tensor, chunk, atom)
        return self._wanted[key]

    def _want(self, tensor: Tensor, chunk: int, atom: int) -> int:
        problem = self.plan.problem
        if tensor in _BY_KEYS:
            return self._keys_met(chunk, tuple(range(len(self.plan.kv_chunks))))
        if tensor in _BY_QUERIES:
            met = tuple(i for i, row in enumerate(self.areas) if row[chunk])
            return self._pairs(met, problem.all_heads).get(atom, 0)
        if tensor is Tensor.Y_PART:
            return problem.all_heads
        if tensor is Tensor.DX_PART:
            return head_sets.span(0, problem.heads_q + 2 * problem.heads_kv)
        return _bits(c for c, tokens in enumerate(self.plan.q_chunks) if tokens)

    def split(self, heads: int, tensor: Tensor) -> tuple[int, ...]:
        """Cut a set of heads of a tensor into atoms."""
        if tensor.is_headless:
            return (NO_HEADS,)
        key = (heads, tensor.on_kv)
        if key not in self._atoms_of:
            atoms = self.kv_atoms if tensor.on_kv else self.q_atoms
            self._atoms_of[key] = tuple(atom for atom in atoms if atom & heads)
        return self._atoms_of[key]

    def _keys_met(self, i: int, kv: tuple[int, ...]) -> int:
        row = self.areas[i]
        if len(kv) == 1:  # most tiles of a ring: nothing to keep
            return 1 << kv[0] if row[kv[0]] else 0
        key = (i, kv)
        if key not in self._keys_of:
            self._keys_of[key] = _bits(j for j in kv if row[j])
        return self._keys_of[key]

    def _pairs(self, met: tuple[int, ...], heads: int) -> dict[int, int]:
        """Per KV atom, the bits of (query chunk, query atom) that these heads contribute."""
        key = (met, heads)
        if key not in self._pairs_of:
            found: dict[int, int] = {}
            for atom in self.split(heads, Tensor.Q):
                bits = 0
                for i in met:
                    bits |= self.pair_bit[i, atom]
                for kv_atom in self.kv_atoms:
                    if kv_atom & self.kv_of[atom]:
                        found[kv_atom] = found.get(kv_atom, 0) | bits
            self._pairs_of[key] = found
        return self._pairs_of[key]

    def _partners(self, tensor: Tensor, bits: int) -> str:
        problem = self.plan.problem
        if tensor in _BY_QUERIES:
            return f"query chunks {sorted({i for (i, _), b in self.pair_bit.items() if b & bits})}"
        if tensor in _BY_KEYS:
            return f"key chunks {head_sets.text(bits)}"
        if tensor is Tensor.Y_PART:
            return f"heads {head_sets.text(bits)}"
        if tensor is Tensor.DX_PART:
            start, texts = 0, []
            for name, count in (
                ("q", problem.heads_q),
                ("k", problem.heads_kv),
                ("v", problem.heads_kv),
            ):
                heads = bits >> start & head_sets.span(0, count)
                texts += [f"{name} heads {head_sets.text(heads)}"] if heads else []
                start += count
            return ", ".join(texts)
        return f"token chunks {head_sets.text(bits)}"

    def _repeated(self, index: int | None, cell: CoveredCell, bits: int) -> RepeatedPairError:
        place, tensor, chunk, atom = cell
        return RepeatedPairError(
            "every contribution is added to a result once",
            rank=place.rank,
            task=index,
            detail=f"{tensor.value} of chunk {chunk} heads {head_sets.text(atom)} already "
            f"has {self._partners(tensor, bits)}",
        )

    def _missed(
        self, index: int | None, rank: int | None, cell: tuple[Tensor, int, int], bits: int
    ) -> MissedPairError:
        tensor, chunk, atom = cell
        return MissedPairError(
            "a result is finished when every contribution is in it",
            rank=rank,
            task=index,
            detail=f"{FINISHED[tensor].value} of chunk {chunk} heads {head_sets.text(atom)} "
            f"lacks {self._partners(tensor, bits)}",
        )


def _bits(members: Iterable[int]) -> int:
    bits = 0
    for member in members:
        bits |= 1 << member
    return bits


def _head_atoms(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut heads so that every set in the plan is a union of parts."""
    problem = plan.problem
    q_sets, kv_sets = {problem.all_heads}, {problem.kv_heads(problem.all_heads)}
    for task in plan.tasks:
        for piece in _pieces(task):
            if not piece.tensor.is_headless:
                (kv_sets if piece.tensor.on_kv else q_sets).add(piece.heads)
    for _, piece in plan.outputs:
        if piece.tensor.is_part:
            (kv_sets if piece.tensor.on_kv else q_sets).add(piece.heads)
    kv_sets |= {problem.kv_heads(heads) for heads in q_sets}
    kv_atoms = head_sets.atoms(sorted(kv_sets))
    # A query atom stays inside one KV atom, so that its contributions go to one cell.
    groups = {_queries_of(problem.group, atom) for atom in kv_atoms}
    return head_sets.atoms(sorted(q_sets | groups)), kv_atoms


def _queries_of(group: int, kv_heads: int) -> int:
    heads = 0
    for head in head_sets.members(kv_heads):
        heads |= head_sets.span(head * group, (head + 1) * group)
    return heads


def _pieces(task: Task) -> Sequence[Piece]:
    match task:
        case Tile():
            return task.reads[:2]
        case Linear():
            return task.reads + task.writes
        case Merge():
            return task.sources
        case Finish():
            return task.parts
        case _:
            return [piece for leg in legs_of(task) for piece in leg.pieces if piece.tensor.is_part]
