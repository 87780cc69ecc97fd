"""The jobs of a plan with their sizes left open: plan once, time at many sizes.

Two problems that differ only in the lengths of their chunks and in the number of heads have the
same tasks. A skeleton keeps, per job, what it needs in units of a small reference problem: kernel
calls (rows x columns), and bytes that scale with queries or with keys. `priced` turns it into jobs
for `dynamics.run`.

It can also be folded: jobs that look alike and wait for jobs that look alike run at the same times,
so one of each kind is enough. The kinds are the coarsest partition in which every job of a kind
needs, queues behind, and is queued with the same kinds (colour refinement); a plan that every rank
runs in step becomes as small as one rank's part. `tests/harness/test_skeleton.py` shows that times
stay equal, to the bit, where both can be run.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.dynamics import Job
from harness.lower import lower
from harness.maskkind import MaskKind
from harness.plan import (
    Collective,
    Delta,
    Finish,
    Free,
    Leg,
    Linear,
    Memory,
    Merge,
    Piece,
    Plan,
    Tensor,
    Tile,
    Transfer,
)
from harness.residency import Program
from harness.sizes import width

RESULTS = frozenset({Tensor.OUT_PART, Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART})
_PER_ROW = frozenset({Tensor.LSE, Tensor.LSE_PART, Tensor.DELTA})
_STREAMS = 8  # queues per rank: one for kernels, then (out, in) per link class


class Call(NamedTuple):
    """One kernel call: rows x columns tokens, with a triangular or an evenly spread mask."""

    rows: int
    columns: int
    heads: int
    causal: bool
    density: float


class Size(NamedTuple):
    """Elements that scale with query or with key tokens, by what they are.

    Attributes:
        plain_q: Of inputs and finished results that scale with queries.
        plain_kv: With keys.
        result_q: Of partial results that scale with queries.
        result_kv: With keys.
        row_q: Of values that a query has one of: lse, delta.
    """

    plain_q: int = 0
    plain_kv: int = 0
    result_q: int = 0
    result_kv: int = 0
    row_q: int = 0


class Need(NamedTuple):
    """What one job takes.

    Attributes:
        kind: `tile`, `merge`, `finish`, `delta`, `transfer`, `collective`, or `` for a delay.
        calls: Kernel calls of a tile.
        size: What a transfer moves; what a tile folds into accumulators that exist already; what
            another kernel reads and writes.
        far: Of a transfer, whether it leaves the node. Of a collective, whether some leg does.
        group: Of a collective, how many ranks exchange.
        detail: Of a collective, its kind.
    """

    kind: str
    calls: tuple[Call, ...] = ()
    size: Size = Size()
    far: bool = False
    group: int = 0
    detail: str = ""


class Part(NamedTuple):
    """A job without times, see `dynamics.Job`."""

    queues: tuple[int, ...]
    ranks: tuple[int, ...]
    after: tuple[int, ...]
    need: Need
    task: int


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Parts in the order in which queues serve them, and the reference lengths.

    Attributes:
        parts: The jobs.
        seqlen_q: Query tokens of the reference problem.
        seqlen_kv: Its key tokens.
        folded: Jobs of the plan before folding.
    """

    parts: tuple[Part, ...]
    seqlen_q: int
    seqlen_kv: int
    folded: int

    def priced(self, price: Callable[[Need], tuple[tuple[float, ...], float]]) -> list[Job]:
        """Fill in times: `price` returns seconds per transfers beside, and a wave's."""
        known: dict[Need, tuple[tuple[float, ...], float]] = {}
        jobs = []
        for part in self.parts:
            if part.need not in known:
                known[part.need] = price(part.need)
            seconds, wave_s = known[part.need]
            moves = part.need.kind == "transfer"
            jobs.append(
                Job(part.queues, part.ranks, seconds, part.after, wave_s=wave_s, moves=moves)
            )
        return jobs


def skeleton(program: Program, gpus_per_node: int, *, fold: bool = True) -> Skeleton:
    """Take the sizes out of a verified plan of a small reference problem."""
    plan = program.plan
    parts: list[Part] = []
    ends: list[int] = []
    for index, task in enumerate(plan.tasks):
        after = tuple(sorted({ends[earlier] for earlier in task.after}))
        match task:
            case Transfer():
                parts.append(_transfer(plan, task.leg, after, gpus_per_node, index))
            case Collective():
                parts.append(Part((), (), after, _collective(plan, task, gpus_per_node), index))
            case Free():
                parts.append(Part((), (), after, Need(""), index))
            case _:
                rank = task.place.rank
                need = _compute(program, index)
                parts.append(Part((rank * _STREAMS,), (rank,), after, need, index))
        ends.append(len(parts) - 1)
    problem = plan.problem
    whole = len(parts)
    kept = _folded(parts) if fold else tuple(parts)
    return Skeleton(kept, problem.seqlen_q, problem.seqlen_kv, whole)


def calls_of(plan: Plan, tile: Tile) -> tuple[Call, ...]:
    """List a tile's kernel calls as a GPU kernel would take them.

    A window or any other mask that is no triangle is one call with its mean density.
    """
    q = tuple(plan.q_chunks[c] for c in tile.q)
    kv = tuple(plan.kv_chunks[c] for c in tile.kv)
    rows, columns, heads = sum(map(len, q)), sum(map(len, kv)), tile.heads.bit_count()
    if tile.area == rows * columns:
        return (Call(rows, columns, heads, False, 1.0),)
    pattern = plan.problem.pattern
    if any(band.hi is not None for a in q for b in kv for band in pattern.regions(a, b)):
        return (Call(rows, columns, heads, False, tile.area / (rows * columns)),)
    calls = []
    for call in lower(pattern, q, kv):
        if call.mask.kind is MaskKind.BAND:
            return (Call(rows, columns, heads, False, tile.area / (rows * columns)),)
        shape = call.rows[1] - call.rows[0], call.cols[1] - call.cols[0]
        calls.append(Call(*shape, heads, call.mask.kind is MaskKind.CAUSAL, 1.0))
    return tuple(calls)


def _size(plan: Plan, pieces: Sequence[Piece]) -> Size:
    counts = [0] * len(Size._fields)
    for piece in pieces:
        elements = plan.tokens(piece) * width(plan, piece.tensor) * piece.heads.bit_count()
        if piece.tensor in _PER_ROW:
            counts[4] += elements
        else:
            counts[piece.tensor.on_kv + 2 * (piece.tensor in RESULTS)] += elements
    return Size(*counts)


def _transfer(plan: Plan, leg: Leg, after: tuple[int, ...], gpus_per_node: int, index: int) -> Part:
    src, dst = leg.src.rank, leg.dst.rank
    if src == dst:
        if leg.src.memory is leg.dst.memory:
            need = Need("copy", size=_size(plan, leg.pieces))
            return Part((src * _STREAMS,), (src,), after, need, index)
        away = leg.dst.memory is Memory.HOST
        need = Need("host", size=_size(plan, leg.pieces))
        return Part((src * _STREAMS + (5 if away else 6),), (src,), after, need, index)
    far = src // gpus_per_node != dst // gpus_per_node
    base = 3 if far else 1
    queues = (src * _STREAMS + base, dst * _STREAMS + base + 1)
    need = Need("transfer", size=_size(plan, leg.pieces), far=far)
    return Part(queues, (src, dst), after, need, index)


def _collective(plan: Plan, task: Collective, gpus_per_node: int) -> Need:
    """What the busiest rank receives from others."""
    received: dict[int, list[Piece]] = {}
    ranks = set()
    for leg in task.legs:
        ranks |= {leg.src.rank, leg.dst.rank}
        if leg.src != leg.dst:
            received.setdefault(leg.dst.rank, []).extend(leg.pieces)
    size = max((_size(plan, pieces) for pieces in received.values()), default=Size())
    far = len({rank // gpus_per_node for rank in ranks}) > 1
    return Need("collective", size=size, far=far, group=len(ranks), detail=task.kind.value)


def _compute(program: Program, index: int) -> Need:
    plan = program.plan
    match task := plan.tasks[index]:
        case Tile():
            slabs = program.slabs
            fresh = {slabs[slab].piece.tensor for slab in program.steps[index].creates}
            old = [piece for piece in task.writes if piece.tensor not in fresh]
            return Need("tile", calls=calls_of(plan, task), size=_size(plan, old))
        case Merge():
            return Need("merge", size=_size(plan, task.sources))
        case Finish():
            return Need("finish", size=_size(plan, (*task.parts, *task.results)))
        case Delta():
            return Need("delta", size=_size(plan, (task.out, task.dout, task.result)))
        case Linear():
            return Need("linear", size=_size(plan, (*task.reads, *task.writes)))
        case _:
            return Need("")


def _folded(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Keep one part of each kind: the coarsest partition that times cannot tell apart."""
    kinds = _kinds(parts)
    first: dict[int, int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    kept = sorted(first.values())
    number = {kinds[index]: at for at, index in enumerate(kept)}
    queue_kinds = _queue_kinds(parts, kinds)
    folded = []
    for index in kept:
        part = parts[index]
        after = tuple(sorted({number[kinds[earlier]] for earlier in part.after}))
        queues = tuple(queue_kinds[queue] for queue in part.queues)
        ranks = tuple(queue // _STREAMS for queue in queues)
        folded.append(part._replace(queues=queues, ranks=ranks, after=after))
    return tuple(folded)


def _ranks_alike(parts: Sequence[Part], kinds: Sequence[Hashable]) -> dict[int, int]:
    """Per rank, the first rank whose queues all hold the same kinds in the same order."""
    lines: dict[int, dict[int, list[Hashable]]] = {}
    for part, kind in zip(parts, kinds, strict=True):
        for queue in part.queues:
            rank, stream = divmod(queue, _STREAMS)
            lines.setdefault(rank, {}).setdefault(stream, []).append(kind)
    seen: dict[Hashable, int] = {}
    return {
        rank: seen.setdefault(tuple(sorted((s, tuple(line)) for s, line in queues.items())), rank)
        for rank, queues in sorted(lines.items())
    }


def _queue_kinds(parts: Sequence[Part], kinds: Sequence[Hashable]) -> dict[int, int]:
    alike = _ranks_alike(parts, kinds)
    queues = {queue for part in parts for queue in part.queues}
    return {queue: alike[queue // _STREAMS] * _STREAMS + queue % _STREAMS for queue in queues}


def _kinds(parts: Sequence[Part]) -> list[int]:
    """Refine: same need, then same kinds waited for, same place in line, same kind of rank."""
    places: list[list[tuple[int, int]]] = [[] for _ in parts]
    lengths: dict[int, int] = {}
    for index, part in enumerate(parts):
        for queue in part.queues:
            places[index].append((queue % _STREAMS, lengths.get(queue, 0)))
            lengths[queue] = lengths.get(queue, 0) + 1
    kinds = _numbered(
        [(part.need, tuple(place)) for part, place in zip(parts, places, strict=True)]
    )
    while True:
        count = len(set(kinds))
        alike = _ranks_alike(parts, kinds)
        kinds = _numbered(
            [
                (
                    kinds[index],
                    tuple(sorted({kinds[earlier] for earlier in part.after})),
                    tuple(alike[rank] for rank in part.ranks),
                )
                for index, part in enumerate(parts)
            ]
        )
        if len(set(kinds)) == count:
            return kinds


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
