"""The plan: who computes what and who sends what, as a frozen, hashable, printable value.

A plan names *pieces* (which tensor, which chunks, which heads) that live in *places* (a rank's
device or host memory) and *tasks* that read and write them. It holds no tensors and no times.
Tasks are stored in a topological order; a task's id is its position.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, get_args

from harness.base.json_fields import (
    each,
    of_fields,
    one_of,
    parsed,
    refused,
    row,
    typed,
    whole,
    wholes,
)
from harness.base.numbers import MOST
from harness.plan import heads as head_sets
from harness.plan.problem import MOST_RANKS, Direction, Dtype, Problem, spelled
from patterns import make_pattern


class Tensor(StrEnum):
    """What a piece is a part of.

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
"""What each partial result becomes when it is complete."""


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
"""What each product reads, in this order, and the tensor that it writes."""


@dataclass(frozen=True, slots=True)
class Free:
    """Release pieces before their last reader would (for instance after an offload)."""

    place: Place
    pieces: tuple[Piece, ...]
    after: tuple[int, ...] = ()


Task = Tile | Transfer | Collective | Merge | Finish | Delta | Linear | Free


class Mode(StrEnum):
    """What a task does to a piece."""

    READ = "read"
    TAKE = "take"
    CREATE = "create"
    ACCUMULATE = "accumulate"
    DROP = "drop"


_READ, _TAKE, _CREATE = Mode.READ, Mode.TAKE, Mode.CREATE  # enums are slow to ask, plans long
_ACCUMULATE, _DROP = Mode.ACCUMULATE, Mode.DROP

Effect = tuple[Place, Piece, Mode]
"""One piece of one place that a task touches, and what the task does to it."""


def effects(task: Task) -> list[Effect]:
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
    """Join what arrives at one place of one tensor and version into one piece.

    Legs of one such group bring the same heads of different chunks (joined in ascending chunk
    order) or different heads of the same chunks.

    Raises:
        ValueError: They bring neither.
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
        return Piece(first.tensor, tuple(chunks), first.heads, first.version)
    heads = first.heads
    for piece in pieces[1:]:
        if piece.chunks != first.chunks:
            raise ValueError(
                f"legs bring {first} and {piece} to one place; "
                "they must share their heads or their chunks"
            )
        heads |= piece.heads
    return Piece(first.tensor, first.chunks, heads, first.version)


def _leg_effects(legs: Sequence[Leg]) -> list[Effect]:
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
    """What a plan starts from: q, k and v, or x and the weights."""

    ATTENTION = "attention"
    LAYER = "layer"


@dataclass(frozen=True)
class Plan:
    """A whole plan for one direction of one problem.

    Attributes:
        problem: What is computed.
        strategy: Name of the strategy, with its options, as a user would type it.
        direction: Forward or backward.
        q_chunks: Positions of each query chunk; together they cover the queries once.
        kv_chunks: As `q_chunks`, for keys.
        initial: What lives where before the first task.
        tasks: In a topological order.
        outputs: Where the results must end, every (chunk, head) once.
        saved: What a forward plan leaves for its backward plan.
    """

    problem: Problem
    strategy: str
    direction: Direction
    q_chunks: tuple[range, ...]
    kv_chunks: tuple[range, ...]
    initial: tuple[Resident, ...]
    tasks: tuple[Task, ...]
    outputs: tuple[Resident, ...]
    saved: tuple[Resident, ...] = ()

    def chunks(self, piece: Piece) -> tuple[range, ...]:
        """Positions of each chunk of a piece; of a weight, one token that stands for none."""
        if piece.tensor.is_weight:
            return (range(1),) * len(piece.chunks)
        table = self.kv_chunks if piece.tensor.on_kv else self.q_chunks
        return tuple(table[chunk] for chunk in piece.chunks)

    def tokens(self, piece: Piece) -> int:
        """Tokens in a piece."""
        key = (piece.tensor, piece.chunks)
        found = self._tokens.get(key)
        if found is None:
            found = self._tokens[key] = sum(map(len, self.chunks(piece)))
        return found

    @cached_property
    def _tokens(self) -> dict[tuple[Tensor, tuple[int, ...]], int]:
        """What `tokens` has counted: every consumer asks for the same few pieces again."""
        return {}

    def rows(self, piece: Piece, chunks: Sequence[int]) -> tuple[int, int]:
        """Half-open rows that chunks side by side in a piece take in a tensor shaped as it.

        Raises:
            ValueError: Others of the piece lie between them, or they are not of it.
        """
        key = (piece.tensor, piece.chunks, tuple(chunks))
        found = self._rows.get(key)
        if found is None:
            at = piece.chunks.index(chunks[0])
            if piece.chunks[at : at + len(chunks)] != key[2]:
                raise ValueError(f"chunks {key[2]} are not side by side in {piece}")
            first = self.tokens(piece._replace(chunks=piece.chunks[:at]))
            found = (first, first + self.tokens(piece._replace(chunks=key[2])))
            self._rows[key] = found
        return found

    @cached_property
    def _rows(self) -> dict[tuple[Tensor, tuple[int, ...], tuple[int, ...]], tuple[int, int]]:
        """What `rows` has found: each run of a plan asks for the same."""
        return {}

    @cached_property
    def scope(self) -> Scope:
        """Layer if x is there at the start, else attention."""
        layer = any(piece.tensor is Tensor.X for _, piece in self.initial)
        return Scope.LAYER if layer else Scope.ATTENTION

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the JSON form, 16 hex digits; equal plans have equal hashes."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:16]

    @property
    def work_hash(self) -> str:
        """The hash without the strategy's name: plans of several that do the same have the same."""
        return replace(self, strategy="").hash

    def __hash__(self) -> int:
        """Hash by content."""
        return int(self.hash, 16)

    def __str__(self) -> str:
        """Draw the rank x step grid."""
        return grid(self)


def _task_json(task: Task) -> list[object]:
    after = list(task.after)
    match task:
        case Tile():
            return ["tile", task.place, task.direction, task.reads, task.writes, task.area, after]
        case Transfer():
            return ["transfer", task.leg, after]
        case Collective():
            return ["collective", task.kind, task.legs, after]
        case Merge():
            return ["merge", task.place, task.sources, after]
        case Finish():
            return ["finish", task.place, task.parts, after]
        case Delta():
            return ["delta", task.place, task.out, task.dout, after]
        case Linear():
            return ["linear", task.place, task.op, task.reads, task.writes, task.rotary, after]
        case Free():
            return ["free", task.place, task.pieces, after]


def to_json(plan: Plan) -> str:
    """Write a plan as canonical JSON (stable order, no spaces)."""
    problem = plan.problem
    body = {
        "schema": 1,
        "problem": {
            **spelled(problem),
            **({"round_sent": True} if problem.round_sent else {}),
        },
        "strategy": plan.strategy,
        "direction": plan.direction,
        "q_chunks": [[c.start, c.stop, c.step] for c in plan.q_chunks],
        "kv_chunks": [[c.start, c.stop, c.step] for c in plan.kv_chunks],
        "initial": plan.initial,
        "tasks": [_task_json(task) for task in plan.tasks],
        "outputs": plan.outputs,
        "saved": plan.saved,
    }
    return json.dumps(body, separators=(",", ":"), sort_keys=True)


def from_json(text: str, problem: Problem | None = None) -> Plan:
    """Read what `to_json` wrote.

    Args:
        text: The plan.
        problem: Its problem, if it is at hand: no pattern is made anew then.

    Raises:
        ValueError: The text is no plan of schema 1; names the field, the value and the rule.
    """
    body = parsed(text)
    if type(body) is dict and (type(body.get("schema")), body.get("schema")) != (int, 1):
        raise ValueError(f"plan schema ({body.get('schema')}) must be 1; write the plan again")
    body = of_fields("plan", body, _PLAN, set())
    return Plan(
        problem=problem or _read_problem(body["problem"]),
        strategy=body["strategy"],
        direction=one_of("direction", body["direction"], Direction),
        q_chunks=each("q_chunks", body["q_chunks"], _chunk),
        kv_chunks=each("kv_chunks", body["kv_chunks"], _chunk),
        initial=each("initial", body["initial"], _resident),
        tasks=each("tasks", body["tasks"], _read_task),
        outputs=each("outputs", body["outputs"], _resident),
        saved=each("saved", body["saved"], _resident),
    )


_PLAN: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "problem": (dict,),
    "strategy": (str,),
    "direction": (str,),
    **dict.fromkeys(("q_chunks", "kv_chunks", "initial", "tasks", "outputs", "saved"), (list,)),
}
_PROBLEM: Mapping[str, tuple[type, ...]] = {
    "seqlen_q": (int,),
    "seqlen_kv": (int,),
    **{field.name: get_args(field.type) or (field.type,) for field in fields(Problem)},
    "pattern": (str,),
    "dtype": (str,),
}
"""The types of a plan's and a problem's fields in JSON."""
_COUNTS = ("heads_q", "heads_kv", "head_dim", "head_dim_v", "batch", "hidden")
_MOST = {**dict.fromkeys(_COUNTS, MOST), "cp": MOST_RANKS}
"""As for flags."""
_USUAL = {field.name for field in fields(Problem) if field.default is not MISSING}
_TASKS: Mapping[str, tuple[str, ...]] = {
    "tile": ("place", "direction", "reads", "writes", "area", "after"),
    "transfer": ("leg", "after"),
    "collective": ("kind", "legs", "after"),
    "merge": ("place", "sources", "after"),
    "finish": ("place", "parts", "after"),
    "delta": ("place", "out", "dout", "after"),
    "linear": ("place", "op", "reads", "writes", "rotary", "after"),
    "free": ("place", "pieces", "after"),
}
"""What follows the kind of a task."""


def _read_problem(raw: object) -> Problem:
    rest = of_fields("problem", raw, _PROBLEM, _USUAL)
    for name, most in _MOST.items():
        if (rest.get(name) or 0) > most:
            raise refused(f"problem.{name}", rest[name], f"at most {most}")
    seqlen_q, seqlen_kv = rest.pop("seqlen_q"), rest.pop("seqlen_kv")
    pattern = make_pattern(rest.pop("pattern"), seqlen_q, seqlen_kv, cross=True)
    rest["dtype"] = one_of("problem.dtype", rest["dtype"], Dtype)
    return Problem(pattern=pattern, **rest)


def _chunk(raw: object) -> range:
    start, stop, step = row("chunk", raw, ("start", "stop", "step"))
    return range(whole("start", start, 0), whole("stop", stop, 0), whole("step", step, 1))


def _place(raw: object) -> Place:
    rank, memory = row("place", raw, Place._fields)
    return Place(whole("rank", rank, 0), one_of("memory", memory, Memory))


def _piece(raw: object) -> Piece:
    tensor, chunks, heads, version = row("piece", raw, Piece._fields)
    return Piece(
        one_of("tensor", tensor, Tensor),
        wholes("chunks", chunks),
        whole("heads", heads, 1),
        typed("version", version, int),
    )


def _leg(raw: object) -> Leg:
    src, dst, pieces, version = row("leg", raw, Leg._fields)
    return Leg(
        _place(src), _place(dst), each("pieces", pieces, _piece), typed("version", version, int)
    )


def _resident(raw: object) -> Resident:
    place, piece = row("resident", raw, Resident._fields)
    return Resident(_place(place), _piece(piece))


def _read_task(raw: object) -> Task:
    kind = raw[0] if type(raw) is list and raw else raw
    if type(kind) is not str or kind not in _TASKS:
        raise refused("kind", kind, f"one of {', '.join(_TASKS)}")
    _, *rest, after = row(kind, raw, ("kind", *_TASKS[kind]))
    edges = wholes("after", after)
    match kind:
        case "transfer":
            return Transfer(_leg(rest[0]), edges)
        case "collective":
            collective, legs = rest
            return Collective(
                one_of("kind", collective, CollectiveKind), each("legs", legs, _leg), edges
            )
        case _:
            return _at_a_place(kind, rest, edges)


def _at_a_place(kind: str, rest: list[Any], edges: tuple[int, ...]) -> Task:
    place = _place(rest[0])
    match kind:
        case "tile":
            _, direction, reads, writes, area = rest
            return Tile(
                place,
                one_of("direction", direction, Direction),
                each("reads", reads, _piece),
                each("writes", writes, _piece),
                whole("area", area, 0),
                edges,
            )
        case "merge":
            return Merge(place, each("sources", rest[1], _piece), edges)
        case "finish":
            return Finish(place, each("parts", rest[1], _piece), edges)
        case "delta":
            return Delta(place, _piece(rest[1]), _piece(rest[2]), edges)
        case "linear":
            _, op, reads, writes, rotary = rest
            return Linear(
                place,
                one_of("op", op, LinearOp),
                each("reads", reads, _piece),
                each("writes", writes, _piece),
                typed("rotary", rotary, bool),
                edges,
            )
        case _:
            return Free(place, each("pieces", rest[1], _piece), edges)


def label(task: Task) -> str:
    """One short cell of the grid for a task."""
    match task:
        case Tile():
            q, kv = map(_spans, (task.q, task.kv))
            return f"q{q}·k{kv}"
        case Transfer():
            src, dst = task.leg.src, task.leg.dst
            return f"{_names(task.leg.pieces)}→{dst.memory if dst.rank == src.rank else dst.rank}"
        case Collective():
            moved = [piece for leg in task.legs for piece in leg.pieces]
            return f"{task.kind.value.replace('_', '-')} {_tensors(moved)}"
        case Merge():
            return f"+{_names(task.sources)}"
        case Finish():
            return "=" + ",".join(piece.tensor.value for piece in task.results)
        case Delta():
            return "delta"
        case Linear():
            read = "·".join(piece.tensor.value for piece in task.reads)
            headed = next(p for p in (*task.writes, *task.reads) if not p.tensor.is_headless)
            return f"{task.writes[0].tensor.value}={read} h{head_sets.text(headed.heads)}"
        case Free():
            return f"free {_names(task.pieces)}"


def _names(pieces: Sequence[Piece]) -> str:
    return _tensors(pieces) + _spans(pieces[0].chunks)


def _spans(chunks: Sequence[int]) -> str:
    """Print chunks in their order, three and more in a row as `8-15`."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    long = 3
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) >= long else ",".join(map(str, run)) for run in runs
    )


def _tensors(pieces: Sequence[Piece]) -> str:
    """`kv`, but `dk+dv`."""
    names = dict.fromkeys(piece.tensor.value.removesuffix("_part") for piece in pieces)
    return ("" if all(len(name) == 1 for name in names) else "+").join(names)


def steps_of(plan: Plan) -> list[int]:
    """Step of every task: how many tiles its rank (a transfer's source) began before it."""
    seen: dict[int, int] = {}
    steps = []
    for task in plan.tasks:
        match task:
            case Tile():
                step = seen.get(task.place.rank, 0)
                seen[task.place.rank] = step + 1
            case Transfer():
                step = seen.get(task.leg.src.rank, 0)
            case Collective():
                step = max(seen.get(rank, 0) for rank in ranks_of(task))
            case _:
                step = max(seen.get(task.place.rank, 0) - 1, 0)
        steps.append(step)
    return steps


def grid(plan: Plan, mark: int | None = None, width: int = 22) -> str:
    """Draw a plan as rank x step; `mark` is the id of a task to point at.

    Each cell lists the tasks that a rank begins in a step: `k0→1` sends, `q0·k0` attends,
    `+dk` merges, `=out` finishes.

    Args:
        plan: What to draw.
        mark: The task to point at.
        width: Least columns of a step; what a step's longest cell takes, if that is more.
    """
    steps = steps_of(plan)
    cells: dict[tuple[int, int], list[str]] = {}
    for index, (task, step) in enumerate(zip(plan.tasks, steps, strict=True)):
        row = task.leg.src.rank if isinstance(task, Transfer) else ranks_of(task)[0]
        note = ">>" + label(task) + "<< ERROR" if index == mark else label(task)
        rows = ranks_of(task) if isinstance(task, Collective) else (row,)
        for rank in rows:
            cells.setdefault((rank, step), []).append(note)
    last = max(steps, default=0)
    lines = [f"{plan.strategy} {plan.direction.value} cp={plan.problem.cp}"]
    widths = [width] * (last + 1)
    for (_, step), notes in cells.items():
        widths[step] = max(widths[step], *map(len, notes))
    heading = "rank " + " ".join(f"step {step}".ljust(w) for step, w in enumerate(widths))
    lines.append(heading.rstrip())
    for rank in range(plan.problem.cp):
        columns = [cells.get((rank, step), []) for step in range(last + 1)]
        for line in range(max(map(len, columns), default=0) or 1):
            head = f"{rank:>4} " if line == 0 else "     "
            texts = [(col[line] if line < len(col) else "") for col in columns]
            shown = " ".join(t.ljust(w) for t, w in zip(texts, widths, strict=True))
            lines.append((head + shown).rstrip())
    return "\n".join(lines)
