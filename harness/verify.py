"""Prove a plan right before anything runs it.

The proof is symbolic. Each accumulator cell (place, tensor, chunk, set of heads) carries the set of
partners whose contributions it has absorbed: key chunks for out and dq, (query chunk, query heads)
for dk and dv. Tiles add partners, merges join disjoint sets, transfers move them, and a finish must
find exactly the partners that the pattern asks for. Presence and edges come from the one readiness
rule in `residency`. Nothing of size S x S is ever made.
"""

from collections.abc import Iterable, Sequence

from harness import heads as head_sets
from harness.errors import (
    CapacityError,
    CycleError,
    LateContributionError,
    LostResultError,
    MaskedPairError,
    MissedPairError,
    PlanError,
    RepeatedPairError,
    UnorderedError,
)
from harness.plan import (
    FINISHED,
    Finish,
    Leg,
    Merge,
    Piece,
    Place,
    Plan,
    Task,
    Tensor,
    Tile,
    grid,
    legs_of,
    ranks_of,
)
from harness.problem import Direction
from harness.residency import Program, Residency, Step, program_of

_RESULTS = {
    Direction.FORWARD: ((Tensor.OUT, Tensor.Q),),
    Direction.BACKWARD: ((Tensor.DQ, Tensor.DOUT), (Tensor.DK, Tensor.K), (Tensor.DV, Tensor.V)),
}
_BY_KEY = frozenset({Tensor.DK_PART, Tensor.DV_PART})
_GRID_RANKS = 8
_Cell = tuple[Place, Tensor, int, int]


def verify(plan: Plan, owners: Sequence[tuple[tuple[int, ...], ...]] | None = None) -> Program:
    """Prove a plan and return it resolved.

    Args:
        plan: The plan.
        owners: Who must end with what: per rank the query chunks, then per rank the key chunks.
            None takes the plan's outputs at their word about the rank, but still asks for every
            (chunk, head) exactly once.

    Returns:
        The plan with every piece resolved to slabs.

    Raises:
        PlanError: A subclass for the rule that breaks; a small plan's grid is attached as a note.
    """
    try:
        return _Proof(plan).run(owners)
    except PlanError as error:
        if plan.problem.cp <= _GRID_RANKS:
            error.add_note(grid(plan, mark=error.task))
        raise


class _Proof:
    """The state of one proof: what every accumulator cell has absorbed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        problem = plan.problem
        self.areas: list[list[int]] = problem.pattern.areas(plan.q_chunks, plan.kv_chunks).tolist()
        self.q_atoms, self.kv_atoms = _head_atoms(plan)
        self.kv_of = {atom: problem.kv_heads(atom) for atom in self.q_atoms}
        self.absorbed: dict[_Cell, int] = {}
        self.versioned: dict[tuple[_Cell, int], int] = {}
        self.left: dict[_Cell, int] = {}
        self.area_done = 0
        self._atoms_of: dict[tuple[int, bool], tuple[int, ...]] = {}
        self._wanted: dict[tuple[Tensor, int, int], int] = {}
        self._partner_bits: dict[tuple[tuple[int, ...], int], dict[int, int]] = {}
        n_q = len(plan.q_chunks)
        # Bit of (query chunk i, query atom a) in the set that a dk or dv cell absorbs.
        self.pair_bit = {
            (i, atom): 1 << (index * n_q + i)
            for index, atom in enumerate(self.q_atoms)
            for i in range(n_q)
        }

    def run(self, owners: Sequence[tuple[tuple[int, ...], ...]] | None) -> Program:
        plan = self.plan
        residency = Residency(plan.initial)
        initial = len(residency.slabs)
        steps: list[Step] = []
        for index, task in enumerate(plan.tasks):
            step = residency.apply(index, task)
            self._edges(index, task, step)
            self._absorb(index, task)
            steps.append(step)
        self._nothing_left(residency)
        self._whole_area()
        _outputs(plan, owners)
        return program_of(plan, residency, initial, steps)

    # Edges ----------------------------------------------------------------------------------

    def _edges(self, index: int, task: Task, step: Step) -> None:
        if any(earlier >= index or earlier < 0 for earlier in task.after):
            raise CycleError(
                "tasks come in an order in which each follows what it waits for",
                rank=ranks_of(task)[0],
                task=index,
                detail=f"it waits for {[t for t in task.after if not 0 <= t < index]}",
            )
        missing = step.requires.difference(task.after)
        if missing:
            raise UnorderedError(
                "a task has an edge to the producer and the readers of what it touches",
                rank=ranks_of(task)[0],
                task=index,
                detail=f"no edge to task {min(missing)}",
            )

    # Contributions --------------------------------------------------------------------------

    def _absorb(self, index: int, task: Task) -> None:
        match task:
            case Tile():
                self._tile(index, task)
            case Merge():
                for piece in task.sources:
                    self._merge(index, task.place, piece)
            case Finish():
                for piece in task.parts:
                    self._finish(index, task.place, piece)
            case _:
                for leg in legs_of(task):
                    self._move(leg)

    def _tile(self, index: int, tile: Tile) -> None:
        rank = tile.place.rank
        self._shapes(index, tile)
        area = 0
        for i in tile.q:
            row = self.areas[i]
            area += sum(row[j] for j in tile.kv)
        if area != tile.area or area == 0:
            raise MaskedPairError(
                "a tile attends what the pattern allows and nothing else",
                rank=rank,
                task=index,
                detail=f"it declares an area of {tile.area}; the pattern has {area} there",
            )
        self.area_done += area * tile.heads.bit_count()
        atoms = self._split(tile.heads, on_kv=False)
        place = tile.place
        if tile.direction is Direction.FORWARD:
            for i in tile.q:
                bits = self._keys_met(i, tile.kv)
                for atom in atoms:
                    for tensor in (Tensor.OUT_PART, Tensor.LSE_PART):
                        self._add(index, (place, tensor, i, atom), bits)
            return
        for i in tile.q:
            bits = self._keys_met(i, tile.kv)
            for atom in atoms:
                self._add(index, (place, Tensor.DQ_PART, i, atom), bits)
        for j in tile.kv:
            met = [i for i in tile.q if self.areas[i][j]]
            for kv_atom, pair in self._pairs(tuple(met), tile.heads).items():
                for tensor in (Tensor.DK_PART, Tensor.DV_PART):
                    self._add(index, (place, tensor, j, kv_atom), pair)

    def _shapes(self, index: int, tile: Tile) -> None:
        """The pieces of a tile fit one another."""
        kv_heads = self.plan.problem.kv_heads(tile.heads)
        for piece in (*tile.reads, *tile.writes):
            on_kv = piece.tensor.on_kv
            wants = (tile.kv, kv_heads) if on_kv else (tile.q, tile.heads)
            if (piece.chunks, piece.heads) != wants:
                raise MaskedPairError(
                    "the pieces of a tile cover its queries, keys and heads",
                    rank=tile.place.rank,
                    task=index,
                    detail=f"{piece} does not fit queries {tile.q} and keys {tile.kv}",
                )

    def _keys_met(self, i: int, kv: Sequence[int]) -> int:
        row, bits = self.areas[i], 0
        for j in kv:
            if row[j]:
                bits |= 1 << j
        return bits

    def _pairs(self, met: tuple[int, ...], heads: int) -> dict[int, int]:
        """Per KV atom, the bits of (query chunk, query atom) that these heads contribute."""
        key = (met, heads)
        if key not in self._partner_bits:
            found: dict[int, int] = {}
            for atom in self._split(heads, on_kv=False):
                bits = 0
                for i in met:
                    bits |= self.pair_bit[i, atom]
                for kv_atom in self.kv_atoms:
                    if kv_atom & self.kv_of[atom]:
                        found[kv_atom] = found.get(kv_atom, 0) | bits
            self._partner_bits[key] = found
        return self._partner_bits[key]

    def _add(self, index: int, cell: _Cell, bits: int) -> None:
        place, tensor, chunk, atom = cell
        if cell in self.left:
            raise LateContributionError(
                "an accumulator leaves after its last contribution",
                rank=place.rank,
                task=index,
                detail=f"{tensor.value} of chunk {chunk} heads {head_sets.text(atom)} left in "
                f"task {self.left[cell]} and grows again",
            )
        self._join(index, cell, bits)

    def _join(self, index: int, cell: _Cell, bits: int) -> None:
        place, tensor, chunk, atom = cell
        known = self.absorbed.get(cell, 0)
        if known & bits:
            raise RepeatedPairError(
                "every unmasked (query, key, head) is attended once",
                rank=place.rank,
                task=index,
                detail=f"{tensor.value} of chunk {chunk} heads {head_sets.text(atom)} already "
                f"has {self._partners(tensor, known & bits)}",
            )
        self.absorbed[cell] = known | bits

    def _partners(self, tensor: Tensor, bits: int) -> str:
        if tensor not in _BY_KEY:
            return f"key chunks {head_sets.text(bits)}"
        pairs = sorted({i for (i, _), bit in self.pair_bit.items() if bit & bits})
        return f"query chunks {pairs}"

    def _move(self, leg: Leg) -> None:
        for piece in leg.pieces:
            if piece.tensor.is_part:
                for chunk in piece.chunks:
                    for atom in self._split(piece.heads, on_kv=piece.tensor.on_kv):
                        bits = self._take(leg.src, piece, chunk, atom)
                        cell = (leg.dst, piece.tensor, chunk, atom)
                        self.versioned[cell, leg.version] = bits

    def _take(self, place: Place, piece: Piece, chunk: int, atom: int) -> int:
        cell = (place, piece.tensor, chunk, atom)
        if piece.version:
            return self.versioned.pop((cell, piece.version), 0)
        self.left[cell] = len(self.left)
        return self.absorbed.pop(cell, 0)

    def _merge(self, index: int, place: Place, piece: Piece) -> None:
        for chunk in piece.chunks:
            for atom in self._split(piece.heads, on_kv=piece.tensor.on_kv):
                bits = self._take(place, piece, chunk, atom)
                self._join(index, (place, piece.tensor, chunk, atom), bits)

    def _finish(self, index: int, place: Place, piece: Piece) -> None:
        for chunk in piece.chunks:
            for atom in self._split(piece.heads, on_kv=piece.tensor.on_kv):
                wanted = self._want(piece.tensor, chunk, atom)
                missing = wanted & ~self._take(place, piece, chunk, atom)
                if missing:
                    raise MissedPairError(
                        "a result is finished when every unmasked (query, key, head) is in it",
                        rank=place.rank,
                        task=index,
                        detail=f"{FINISHED[piece.tensor].value} of chunk {chunk} heads "
                        f"{head_sets.text(atom)} lacks {self._partners(piece.tensor, missing)}",
                    )

    def _want(self, tensor: Tensor, chunk: int, atom: int) -> int:
        key = (tensor, chunk, atom)
        if key not in self._wanted:
            if tensor not in _BY_KEY:
                bits = self._keys_met(chunk, range(len(self.plan.kv_chunks)))
            else:
                met = tuple(i for i, row in enumerate(self.areas) if row[chunk])
                bits = self._pairs(met, self.plan.problem.all_heads)[atom]
            self._wanted[key] = bits
        return self._wanted[key]

    def _split(self, heads: int, *, on_kv: bool) -> tuple[int, ...]:
        key = (heads, on_kv)
        if key not in self._atoms_of:
            atoms = self.kv_atoms if on_kv else self.q_atoms
            self._atoms_of[key] = tuple(atom for atom in atoms if atom & heads)
        return self._atoms_of[key]

    # The whole ------------------------------------------------------------------------------

    def _nothing_left(self, residency: Residency) -> None:
        for place, tensor, chunk in residency.left():
            raise LostResultError(
                "every partial result is merged and finished",
                rank=place.rank,
                task=None,
                detail=f"{tensor.value} of chunk {chunk} is left on {place.memory.value}",
            )

    def _whole_area(self) -> None:
        wanted = sum(map(sum, self.areas)) * self.plan.problem.heads_q
        if self.area_done != wanted:
            rule = "the tiles' areas add up to the pattern's"
            kind = MissedPairError if self.area_done < wanted else RepeatedPairError
            raise kind(
                rule, rank=None, task=None, detail=f"{self.area_done} instead of {wanted} pairs"
            )


def _outputs(plan: Plan, owners: Sequence[tuple[tuple[int, ...], ...]] | None) -> None:
    """Every (chunk, head) of every result is promised to its owner exactly once."""
    problem = plan.problem
    for result, _ in _RESULTS[plan.direction]:
        table = plan.kv_chunks if result.on_kv else plan.q_chunks
        all_heads = problem.kv_heads(problem.all_heads) if result.on_kv else problem.all_heads
        missing = {chunk: all_heads for chunk, tokens in enumerate(table) if tokens}
        for place, piece in plan.outputs:
            if piece.tensor is not result:
                continue
            for chunk in piece.chunks:
                if owners is not None and chunk not in owners[result.on_kv][place.rank]:
                    raise _lost(place.rank, result, chunk, piece.heads, "ends at another's rank")
                if piece.heads & ~missing.get(chunk, 0):
                    raise _lost(place.rank, result, chunk, piece.heads, "ends twice")
                missing[chunk] &= ~piece.heads
        for chunk, heads in missing.items():
            if heads:
                raise _lost(None, result, chunk, heads, "ends nowhere")


def _lost(rank: int | None, tensor: Tensor, chunk: int, heads: int, what: str) -> LostResultError:
    return LostResultError(
        "every output and gradient ends at its owner once",
        rank=rank,
        task=None,
        detail=f"{tensor.value} of chunk {chunk} heads {head_sets.text(heads)} {what}",
    )


def _head_atoms(plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut heads so that every set in the plan is a union of parts."""
    problem = plan.problem
    q_sets, kv_sets = {problem.all_heads}, {problem.kv_heads(problem.all_heads)}
    for task in plan.tasks:
        for piece in _pieces(task):
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


def _pieces(task: Task) -> Iterable[Piece]:
    match task:
        case Tile():
            return (task.reads[0], task.reads[1])
        case Merge():
            return task.sources
        case Finish():
            return task.parts
        case _:
            return (piece for leg in legs_of(task) for piece in leg.pieces)


def check_capacity(peaks_bytes: Sequence[int], capacity_bytes: int) -> None:
    """Refuse a plan whose ranks need more memory than their device has.

    Raises:
        CapacityError: Names the fullest rank.
    """
    peak = max(peaks_bytes, default=0)
    if peak > capacity_bytes:
        raise CapacityError(
            "the peak memory of every rank fits its device",
            rank=list(peaks_bytes).index(peak),
            task=None,
            detail=f"{peak} bytes of {capacity_bytes}",
        )
