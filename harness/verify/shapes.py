"""The shape of every task: its pieces exist, fit one another, and are what its kernel takes.

Judged before anything else looks at a task, so that the other rules and the executor may rely on
it. An output and its log-sum-exp are one partial result in two tensors: they are made, moved,
merged and finished side by side, so that nothing can part them.
"""

import reprlib
from collections.abc import Iterable, Sequence

from harness.errors import CycleError, MisfitError
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.tasks import (
    LINEAR_FORMS,
    NO_CHUNKS,
    NO_HEADS,
    Collective,
    Delta,
    Finish,
    Free,
    Leg,
    Linear,
    LinearOp,
    Memory,
    Merge,
    Piece,
    Place,
    Resident,
    Scope,
    Task,
    Tensor,
    Tile,
    Transfer,
    legs_of,
    ranks_of,
)

_TILE_READS = {
    Direction.FORWARD: ((Tensor.Q, Tensor.K, Tensor.V),),
    Direction.BACKWARD: tuple(
        (Tensor.Q, Tensor.K, Tensor.V, Tensor.LSE, Tensor.DOUT, last)
        for last in (Tensor.OUT, Tensor.DELTA)
    ),
}
_TILE_WRITES = {
    Direction.FORWARD: (Tensor.OUT_PART, Tensor.LSE_PART),
    Direction.BACKWARD: (Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART),
}
_TILE_SIDES = {
    (way, reads, _TILE_WRITES[way]): tuple([t.on_kv for t in (*reads, *_TILE_WRITES[way])])
    for way, forms in _TILE_READS.items()
    for reads in forms
}
"""Of each form of a tile, which of its pieces lie on keys."""
_ROTATED = frozenset({Tensor.Q, Tensor.K, Tensor.DQ, Tensor.DK})
_ON_KV = frozenset(tensor for tensor in Tensor if tensor.on_kv)
_TOKENLESS = frozenset(tensor for tensor in Tensor if tensor.is_weight)
_HEADLESS = frozenset(tensor for tensor in Tensor if tensor.is_headless)
_PARTS = frozenset(tensor for tensor in Tensor if tensor.is_part)
_OUT, _LSE = Tensor.OUT_PART, Tensor.LSE_PART
_FORWARD = Direction.FORWARD  # enums are slow to ask, plans long
_DEVICE = Memory.DEVICE


class Shapes:
    """Judge the tasks and residents of one plan."""

    def __init__(self, plan: Plan) -> None:
        problem = plan.problem
        self.plan = plan
        self._cp = problem.cp
        self._rotary = problem.rotary is not None
        self._all_q, self._all_kv = problem.all_heads, problem.kv_heads(problem.all_heads)
        # Most pieces of a plan name the same few rows of chunks: each is judged once.
        self._rows: tuple[set[tuple[int, ...]], set[tuple[int, ...]]] = (set(), set())

    def resident(self, resident: Resident) -> None:
        """Judge a piece that a plan has before the first task or after the last one.

        Raises:
            MisfitError: It has a rank, chunk or head that the plan lacks.
        """
        place, piece = resident
        if not 0 <= place.rank < self._cp:
            raise MisfitError(
                "a piece lies on a rank of the plan",
                rank=place.rank,
                task=None,
                detail=f"{piece.tensor.value} at the start or the end",
            )
        broken = self._broken(piece)
        if broken:
            rule, value = broken
            where = f"a piece of {piece.tensor.value} at the start or the end"
            raise MisfitError(rule, rank=place.rank, task=None, detail=f"{where} has {value}")

    def task(self, index: int, task: Task) -> None:
        """Judge a task.

        Raises:
            MisfitError: Its pieces do not exist, do not fit, or it cannot run where it is.
            CycleError: It waits for a task that does not come before it.
        """
        self._fit(index, task)
        after = task.after
        if after and (min(after) < 0 or max(after) >= index):
            raise CycleError(
                "tasks come in an order in which each follows what it waits for",
                rank=ranks_of(task)[0],
                task=index,
                detail=f"it waits for {reprlib.repr([t for t in after if not 0 <= t < index])}",
            )

    # Pieces ---------------------------------------------------------------------------------

    def _broken(self, piece: Piece) -> tuple[str, str] | None:
        """The rule that a piece breaks, and the value; None if it fits the plan."""
        tensor, chunks, heads, _ = piece
        if tensor in _TOKENLESS:
            known = chunks == NO_CHUNKS
        else:
            rows = self._rows[tensor in _ON_KV]
            known = chunks in rows
            if not known and self._is_row(tensor, chunks):
                rows.add(chunks)
                known = True
        if not known:
            rule = "the chunks of a piece are some of the plan's, each once"
            return rule, f"chunks {reprlib.repr(chunks)}"
        if tensor in _HEADLESS:
            most = NO_HEADS
        else:
            most = self._all_kv if tensor in _ON_KV else self._all_q
        if not 0 < heads <= most:
            return (
                "the heads of a piece are some of the problem's",
                f"bit set {reprlib.repr(heads)}",
            )
        return None

    def _is_row(self, tensor: Tensor, chunks: tuple[int, ...]) -> bool:
        table = self.plan.kv_chunks if tensor in _ON_KV else self.plan.q_chunks
        return (
            bool(chunks)
            and 0 <= min(chunks) <= max(chunks) < len(table)
            and len(set(chunks)) == len(chunks)
        )

    def _exist(self, index: int, task: Task, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            broken = self._broken(piece)
            if broken:
                rule, value = broken
                raise _misfit(index, task, rule, f"a piece of {piece.tensor.value} has {value}")

    # Tasks ----------------------------------------------------------------------------------

    def _fit(self, index: int, task: Task) -> None:
        match task:
            case Transfer() | Collective():
                self._legs(index, task)
                return
            case Free():
                self._some(index, task, task.pieces)
            case Tile():
                self._tile(index, task)
            case Linear():
                self._linear(index, task)
            case Delta():
                self._delta(index, task)
            case Merge():
                self._merge(index, task)
            case Finish():
                self._finish(index, task)
        self._on_a_rank(index, task, task.place)
        if task.place.memory is not _DEVICE and not isinstance(task, Free):
            raise _misfit(index, task, "a device computes; the host only stores")

    def _on_a_rank(self, index: int, task: Task, place: Place) -> None:
        if not 0 <= place.rank < self._cp:
            raise _misfit(index, task, "a task runs on a rank of the plan", f"rank {place.rank}")

    def _some(self, index: int, task: Task, pieces: Sequence[Piece]) -> None:
        if not pieces:
            raise _misfit(index, task, "a task has at least one piece to work on")
        self._exist(index, task, pieces)

    def _legs(self, index: int, task: Transfer | Collective) -> None:
        legs = legs_of(task)
        if not legs:
            raise _misfit(index, task, "a collective has at least one leg")
        for leg in legs:
            self._on_a_rank(index, task, leg.src)
            self._on_a_rank(index, task, leg.dst)
            self._some(index, task, leg.pieces)
            self._leg(index, task, leg)

    def _leg(self, index: int, task: Task, leg: Leg) -> None:
        src, dst, pieces, _ = leg
        if src.rank != dst.rank and not (src.memory is _DEVICE is dst.memory):
            raise _misfit(
                index,
                task,
                "ranks exchange what is on their devices",
                f"{src.memory.value} of rank {src.rank} to {dst.memory.value} of rank {dst.rank}",
            )
        _side_by_side(index, task, pieces)

    def _tile(self, index: int, tile: Tile) -> None:
        reads = tuple([piece.tensor for piece in tile.reads])
        writes = tuple([piece.tensor for piece in tile.writes])
        way = tile.direction
        # A layer's backward plan may attend forward again, to make what was not saved.
        again = way is _FORWARD and self.plan.scope is Scope.LAYER
        sides = _TILE_SIDES.get((way, reads, writes))
        if (
            sides is None
            or (way is not self.plan.direction and not again)
            or any(piece.version for piece in tile.writes)
        ):
            raise _misfit(
                index,
                tile,
                "a tile reads and writes what its kernel does, in order",
                f"{', '.join(reads)} -> {', '.join(writes)}",
            )
        self._exist(index, tile, tile.reads[:2])
        q, kv, heads = tile.q, tile.kv, tile.heads
        kv_heads = self.plan.problem.kv_heads(heads)
        for on_kv, piece in zip(sides, tile.reads + tile.writes, strict=True):
            if piece.chunks != (kv if on_kv else q) or piece.heads != (
                kv_heads if on_kv else heads
            ):
                raise _misfit(
                    index,
                    tile,
                    "the pieces of a tile cover its queries, keys and heads",
                    f"{piece} does not fit queries {tile.q} and keys {tile.kv}",
                )

    def _linear(self, index: int, task: Linear) -> None:
        pieces = (*task.reads, *task.writes)
        form = (task.op, tuple(piece.tensor for piece in task.reads))
        if [LINEAR_FORMS.get(form)] != [piece.tensor for piece in task.writes]:
            raise _misfit(index, task, "a product is one of LINEAR_FORMS")
        chunks = {piece.chunks for piece in pieces if piece.tensor not in _TOKENLESS}
        heads = {piece.heads for piece in pieces if piece.tensor not in _HEADLESS}
        if (
            len(chunks) != 1
            or len(heads) != 1
            or any(piece.version for piece in task.writes if piece.tensor in _PARTS)
        ):
            raise _misfit(
                index,
                task,
                "the pieces of a product have the same tokens and heads",
                ", ".join(map(str, pieces)),
            )
        self._exist(index, task, pieces)
        rotated = any(piece.tensor in _ROTATED for piece in pieces)
        if task.rotary and (not rotated or task.op is LinearOp.OUTPUT):
            raise _misfit(index, task, "only q, k and their gradients are rotated")
        if rotated and task.rotary is not self._rotary:
            raise _misfit(index, task, "every q and k is rotated if the problem says so")

    def _delta(self, index: int, task: Delta) -> None:
        out, dout = task.out, task.dout
        if (out.tensor, dout.tensor) != (Tensor.OUT, Tensor.DOUT) or (
            (out.chunks, out.heads) != (dout.chunks, dout.heads)
        ):
            raise _misfit(
                index, task, "delta joins out and dout of the same rows", f"{out} and {dout}"
            )
        self._exist(index, task, (out,))

    def _merge(self, index: int, task: Merge) -> None:
        self._some(index, task, task.sources)
        if any(p.tensor not in _PARTS or not p.version for p in task.sources):
            raise _misfit(index, task, "a merge folds arrived partial results into version 0")
        _side_by_side(index, task, task.sources)

    def _finish(self, index: int, task: Finish) -> None:
        self._some(index, task, task.parts)
        if any(piece.tensor not in _PARTS for piece in task.parts):
            raise _misfit(index, task, "a finish turns partial results into results")
        _side_by_side(index, task, task.parts)


def _side_by_side(index: int, task: Task, pieces: Sequence[Piece]) -> None:
    """Every partial output is followed by the log-sum-exp that weighs it, and none comes alone."""
    before: Piece | None = None  # the output whose lse must come now
    for piece in pieces:
        tensor = piece.tensor
        if before is None and tensor is not _LSE:
            before = piece if tensor is _OUT else None
        elif before is not None and tensor is _LSE and piece[1:] == before[1:]:
            before = None
        else:
            before = before or piece
            break
    if before is not None:
        raise _misfit(
            index,
            task,
            "a partial output and its lse stay side by side, out first",
            f"{before} comes without its other half",
        )


def _misfit(index: int, task: Task, rule: str, detail: str = "") -> MisfitError:
    ranks = ranks_of(task)
    return MisfitError(rule, rank=ranks[0] if ranks else None, task=index, detail=detail)
