"""Pieces, places and the tasks that read and write them: the words that a plan is written in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from harness.plan import heads as head_sets
from harness.plan.problem import Direction


class Tensor(StrEnum):
    """Tensor that a piece is a part of.

    `*_PART` are partial results in accumulator precision: a value that still lacks, or may lack,
    contributions. They are a linear resource: sending or finishing one takes it from its place.

    The input x and the output y of a layer, and their gradients, have no heads: their pieces use
    the one pseudo-head, bit 1 (`NO_HEADS`). Weights have no positions: their pieces use the one
    pseudo-chunk 0 (`NO_CHUNKS`).
    """

    __hash__ = str.__hash__  # an enum's own hash is a python function, and pieces are hashed a lot

    Q = "q"
    K = "k"
    V = "v"
    OUT = "out"
    LSE = "lse"
    DOUT = "dout"
    DELTA = "delta"
    DQ = "dq"
    DK = "dk"
    DV = "dv"
    OUT_PART = "out_part"
    LSE_PART = "lse_part"
    DQ_PART = "dq_part"
    DK_PART = "dk_part"
    DV_PART = "dv_part"
    X = "x"
    Y = "y"
    DX = "dx"
    DY = "dy"
    W_Q = "w_q"
    W_K = "w_k"
    W_V = "w_v"
    W_O = "w_o"
    DW_Q = "dw_q"
    DW_K = "dw_k"
    DW_V = "dw_v"
    DW_O = "dw_o"
    Y_PART = "y_part"
    DX_PART = "dx_part"
    DW_Q_PART = "dw_q_part"
    DW_K_PART = "dw_k_part"
    DW_V_PART = "dw_v_part"
    DW_O_PART = "dw_o_part"

    @property
    def is_part(self) -> bool:
        """Whether this is a partial result."""
        return self in _PARTS

    @property
    def on_kv(self) -> bool:
        """Whether the positions and heads that it has are those of keys (else of queries)."""
        return self in _ON_KV

    @property
    def is_weight(self) -> bool:
        """Whether it has heads but no positions."""
        return self in _WEIGHTS

    @property
    def is_headless(self) -> bool:
        """Whether it has positions but no heads."""
        return self in _HEADLESS


_PARTS = frozenset(tensor for tensor in Tensor if tensor.value.endswith("_part"))


_ON_KV = frozenset(
    tensor
    for tensor in Tensor
    if tensor.value.removesuffix("_part").removeprefix("d").removeprefix("w_") in ("k", "v")
)


_WEIGHTS = frozenset(tensor for tensor in Tensor if "w_" in tensor.value)


_HEADLESS = frozenset({Tensor.X, Tensor.Y, Tensor.DX, Tensor.DY, Tensor.Y_PART, Tensor.DX_PART})


NO_HEADS = 1
"""The heads of a piece of a tensor without heads."""


NO_CHUNKS = (0,)
"""The chunks of a piece of a tensor without positions."""


FINISHED = {part: Tensor(part.value.removesuffix("_part")) for part in Tensor if part.is_part}
"""Finished tensor of each partial result."""


GATHERED = 1
"""Version of a copy that a collective gathered beside the original."""


def from_rank(rank: int) -> int:
    """Version of a partial result that arrived from a rank."""
    return 2 + rank


def recomputed(times: int) -> int:
    """Version of a value computed again, the `times`-th time, 1 <= times."""
    return -times


class Memory(StrEnum):
    """Which of a rank's memories."""

    __hash__ = str.__hash__  # as for tensors

    DEVICE = "device"
    HOST = "host"


class Place(NamedTuple):
    """Where a piece lives."""

    rank: int
    memory: Memory = Memory.DEVICE


class Piece(NamedTuple):
    """Some chunks and heads of one tensor.

    Attributes:
        tensor: Which tensor.
        chunks: Indices into the plan's query or key chunk table, in storage order.
        heads: Bit set of query heads, or of KV heads where `tensor.on_kv`.
        version: 0 for the value itself; others tell copies in one place apart: `GATHERED`,
            `from_rank(s)` for a partial result that arrived from rank s, and `recomputed(n)`.
    """

    tensor: Tensor
    chunks: tuple[int, ...]
    heads: int
    version: int = 0

    def __str__(self) -> str:
        """Print as `k[3,4]h0-7`."""
        mark = f"'{self.version}" if self.version else ""
        chunks = ",".join(map(str, self.chunks))
        return f"{self.tensor.value}{mark}[{chunks}]h{head_sets.text(self.heads)}"


@dataclass(frozen=True, slots=True)
class Tile:
    """Attend query chunks to key chunks at one place, accumulating partial results.

    Attributes:
        place: Where.
        direction: Forward accumulates (out, lse); backward accumulates dq, dk, dv.
        reads: Forward q, k, v; backward q, k, v, lse, dout and out or delta, in this order.
        writes: The accumulators, version 0.
        area: Unmasked (query, key) pairs per head, exact.
        after: Ids of the tasks that come first.
    """

    place: Place
    direction: Direction
    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]
    area: int
    after: tuple[int, ...] = ()

    @property
    def q(self) -> tuple[int, ...]:
        """Query chunks."""
        return self.reads[0].chunks

    @property
    def kv(self) -> tuple[int, ...]:
        """Key chunks."""
        return self.reads[1].chunks

    @property
    def heads(self) -> int:
        """Bit set of query heads."""
        return self.reads[0].heads


class Leg(NamedTuple):
    """Pieces that move from one place to another; they arrive under `version`."""

    src: Place
    dst: Place
    pieces: tuple[Piece, ...]
    version: int = 0

    @property
    def arriving(self) -> tuple[Piece, ...]:
        """The pieces as they are named at the destination."""
        version = self.version
        for piece in self.pieces:
            if piece.version != version:
                break
        else:
            return self.pieces
        return tuple([Piece(p.tensor, p.chunks, p.heads, version) for p in self.pieces])


@dataclass(frozen=True, slots=True)
class Transfer:
    """One leg, alone."""

    leg: Leg
    after: tuple[int, ...] = ()


class CollectiveKind(StrEnum):
    """Which operation a group of legs forms."""

    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


@dataclass(frozen=True, slots=True)
class Collective:
    """Several legs issued as one operation.

    Legs of one destination, tensor and version arrive as one piece, in leg order. A leg whose two
    ends are the same place is a local copy and moves nothing over a link.
    """

    kind: CollectiveKind
    legs: tuple[Leg, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Merge:
    """Fold arrived partial results into the accumulators (version 0) of a place, in this order.

    (out_part, lse_part) merge by log-sum-exp; gradients add.
    """

    place: Place
    sources: tuple[Piece, ...]
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Turn complete accumulators into results in the problem's dtype.

    Rows without any contribution become out 0, lse -inf, gradient 0.
    """

    place: Place
    parts: tuple[Piece, ...]
    after: tuple[int, ...] = ()

    @property
    def results(self) -> tuple[Piece, ...]:
        """The finished pieces."""
        return tuple(Piece(FINISHED[p.tensor], p.chunks, p.heads, p.version) for p in self.parts)


@dataclass(frozen=True, slots=True)
class Delta:
    """Compute delta = rowsum(dout * out), in accumulator precision."""

    place: Place
    out: Piece
    dout: Piece
    after: tuple[int, ...] = ()

    @property
    def result(self) -> Piece:
        """The piece of delta."""
        return self.out._replace(tensor=Tensor.DELTA)


class LinearOp(StrEnum):
    """Which product of a layer's projections."""

    PROJECT = "project"
    OUTPUT = "output"
    INPUT_GRAD = "input_grad"
    WEIGHT_GRAD = "weight_grad"


@dataclass(frozen=True, slots=True)
class Linear:
    """Multiply by a layer's weights, for some heads, at one place.

    PROJECT makes q, k or v from x; OUTPUT adds the heads of out to y. INPUT_GRAD adds dq, dk or dv
    to dx, or makes dout from dy; WEIGHT_GRAD adds to a weight's gradient. `LINEAR_FORMS` lists all.

    Attributes:
        place: Where.
        op: Which product.
        reads: Its two factors; see `LINEAR_FORMS`.
        writes: Its one result: a `*_PART` accumulates (version 0), anything else is created.
        rotary: Whether q or k is rotated by its positions after the projection, and so dq or dk
            rotated back before its product. Never for v and out.
        after: Ids of the tasks that come first.
    """

    place: Place
    op: LinearOp
    reads: tuple[Piece, ...]
    writes: tuple[Piece, ...]
    rotary: bool = False
    after: tuple[int, ...] = ()


LINEAR_FORMS: Mapping[tuple[LinearOp, tuple[Tensor, ...]], Tensor] = {
    (LinearOp.PROJECT, (Tensor.X, Tensor.W_Q)): Tensor.Q,
    (LinearOp.PROJECT, (Tensor.X, Tensor.W_K)): Tensor.K,
    (LinearOp.PROJECT, (Tensor.X, Tensor.W_V)): Tensor.V,
    (LinearOp.OUTPUT, (Tensor.OUT, Tensor.W_O)): Tensor.Y_PART,
    (LinearOp.INPUT_GRAD, (Tensor.DY, Tensor.W_O)): Tensor.DOUT,
    (LinearOp.INPUT_GRAD, (Tensor.DQ, Tensor.W_Q)): Tensor.DX_PART,
    (LinearOp.INPUT_GRAD, (Tensor.DK, Tensor.W_K)): Tensor.DX_PART,
    (LinearOp.INPUT_GRAD, (Tensor.DV, Tensor.W_V)): Tensor.DX_PART,
    (LinearOp.WEIGHT_GRAD, (Tensor.X, Tensor.DQ)): Tensor.DW_Q_PART,
    (LinearOp.WEIGHT_GRAD, (Tensor.X, Tensor.DK)): Tensor.DW_K_PART,
    (LinearOp.WEIGHT_GRAD, (Tensor.X, Tensor.DV)): Tensor.DW_V_PART,
    (LinearOp.WEIGHT_GRAD, (Tensor.OUT, Tensor.DY)): Tensor.DW_O_PART,
}
"""Tensors that each product reads, in this order, and the tensor that it writes."""


@dataclass(frozen=True, slots=True)
class Free:
    """Release pieces before their last reader would (for instance after an offload)."""

    place: Place
    pieces: tuple[Piece, ...]
    after: tuple[int, ...] = ()


Task = Tile | Transfer | Collective | Merge | Finish | Delta | Linear | Free


class AccessMode(StrEnum):
    """Effect of a task on a piece."""

    READ = "read"
    TAKE = "take"
    CREATE = "create"
    ACCUMULATE = "accumulate"
    DROP = "drop"


_READ, _TAKE, _CREATE = (
    AccessMode.READ,
    AccessMode.TAKE,
    AccessMode.CREATE,
)  # enums are slow to ask, plans long


_ACCUMULATE, _DROP = AccessMode.ACCUMULATE, AccessMode.DROP


PieceEffect = tuple[Place, Piece, AccessMode]
"""One piece of one place that a task touches, and what the task does to it."""


def effects(task: Task) -> list[PieceEffect]:
    """List what a task touches: first what it reads or takes, then what it writes."""
    match task:
        case Tile():
            place = task.place
            touched = [(place, piece, _READ) for piece in task.reads]
            touched += [(place, piece, _ACCUMULATE) for piece in task.writes]
            return touched
        case Transfer():
            return _leg_effects((task.leg,))
        case Collective():
            return _leg_effects(task.legs)
        case Merge():
            into = [Piece(p.tensor, p.chunks, p.heads) for p in task.sources]
            touched = [(task.place, piece, _TAKE) for piece in task.sources]
            touched += [(task.place, piece, _ACCUMULATE) for piece in into]
            return touched
        case Finish():
            touched = [(task.place, piece, _TAKE) for piece in task.parts]
            touched += [(task.place, piece, _CREATE) for piece in task.results]
            return touched
        case Delta():
            place = task.place
            read = [(place, task.out, _READ), (place, task.dout, _READ)]
            return [*read, (place, task.result, _CREATE)]
        case Linear():
            touched = [(task.place, piece, _READ) for piece in task.reads]
            for piece in task.writes:
                touched.append(
                    (task.place, piece, _ACCUMULATE if piece.tensor.is_part else _CREATE)
                )
            return touched
        case Free():
            return [(task.place, piece, _DROP) for piece in task.pieces]


def arrivals(legs: Sequence[Leg]) -> dict[tuple[Place, Tensor, int], Piece]:
    """Join the arrivals of one tensor and version at one place into one piece.

    Legs of one such group bring the same heads of different chunks (joined in ascending chunk
    order) or different heads of the same chunks.

    Raises:
        ValueError: They bring neither, or something twice.
    """
    groups: dict[tuple[Place, Tensor, int], list[Piece]] = {}
    for leg in legs:
        for piece in leg.arriving:
            groups.setdefault((leg.dst, piece.tensor, piece.version), []).append(piece)
    return {key: pieces[0] if len(pieces) == 1 else _join(pieces) for key, pieces in groups.items()}


def _join(pieces: Sequence[Piece]) -> Piece:
    first = pieces[0]
    if all(piece.heads == first.heads for piece in pieces):
        chunks = sorted(chunk for piece in pieces for chunk in piece.chunks)
        if len(set(chunks)) < len(chunks):
            raise ValueError(f"legs bring {first} and a chunk of it once more to one place")
        return Piece(first.tensor, tuple(chunks), first.heads, first.version)
    heads = first.heads
    for piece in pieces[1:]:
        if piece.chunks != first.chunks:
            raise ValueError(
                f"legs bring {first} and {piece} to one place; "
                "they must share their heads or their chunks"
            )
        if piece.heads & heads:
            raise ValueError(f"legs bring {piece} and some of its heads once more to one place")
        heads |= piece.heads
    return Piece(first.tensor, first.chunks, heads, first.version)


def _leg_effects(legs: Sequence[Leg]) -> list[PieceEffect]:
    found = [
        (src, piece, _TAKE if piece.tensor in _PARTS else _READ)
        for src, _, pieces, _ in legs
        for piece in pieces
    ]
    if len(legs) == 1 and len({piece.tensor for piece in legs[0].pieces}) == len(found):
        dst = legs[0].dst
        found += [(dst, piece, _CREATE) for piece in legs[0].arriving]
    else:
        joined = arrivals(legs)
        found += [(place, piece, _CREATE) for (place, _, _), piece in joined.items()]
    return found


def ordered(task: Task, after: tuple[int, ...]) -> Task:
    """Return the task with these edges."""
    match task:
        case Tile():
            return Tile(task.place, task.direction, task.reads, task.writes, task.area, after)
        case Transfer():
            return Transfer(task.leg, after)
        case Collective():
            return Collective(task.kind, task.legs, after)
        case Merge():
            return Merge(task.place, task.sources, after)
        case Finish():
            return Finish(task.place, task.parts, after)
        case Delta():
            return Delta(task.place, task.out, task.dout, after)
        case Linear():
            return Linear(task.place, task.op, task.reads, task.writes, task.rotary, after)
        case Free():
            return Free(task.place, task.pieces, after)


def ranks_of(task: Task) -> tuple[int, ...]:
    """Ranks that take part in a task, ascending."""
    match task:
        case Transfer():
            src, dst = task.leg.src.rank, task.leg.dst.rank
            return (src, dst) if src < dst else (dst, src) if dst < src else (src,)
        case Collective():
            return tuple(sorted({place.rank for leg in task.legs for place in (leg.src, leg.dst)}))
        case _:
            return (task.place.rank,)


def legs_of(task: Task) -> tuple[Leg, ...]:
    """Legs of a task, in order; empty for compute."""
    match task:
        case Transfer():
            return (task.leg,)
        case Collective():
            return task.legs
        case _:
            return ()


class Resident(NamedTuple):
    """A piece and the place where it lives."""

    place: Place
    piece: Piece


class Scope(StrEnum):
    """Inputs of a plan: q, k and v, or x and the weights."""

    ATTENTION = "attention"
    LAYER = "layer"
