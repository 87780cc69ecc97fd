"""The jobs of a plan with their sizes left open: plan once, time at many sizes.

Two problems that differ only in the lengths of their chunks and in the number of heads have the
same tasks. A skeleton keeps, per job, what it needs in units of a small reference problem: kernel
calls (rows x columns), and bytes that scale with queries or with keys. `job_costs.Pricer` turns it
into jobs for `contention.run`.

It can also be folded: jobs that look alike and wait for jobs that look alike run at the same times,
so one of each kind is enough. The kinds are the coarsest partition in which every job of a kind
needs, queues behind, and is queued with the same kinds (colour refinement); a plan that every rank
runs in step becomes as small as one rank's part. `tests/harness/simulate/test_job_graph.py` shows
that times stay equal, to the bit, where both can be run.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, assert_never

from harness.cluster.calibration import Calibration
from harness.plan.kernel_calls import lower
from harness.plan.masks import MaskKind
from harness.plan.plan import Plan
from harness.plan.residency import Program
from harness.plan.sizes import linear_flops, width
from harness.plan.tasks import (
    Collective,
    CollectiveKind,
    Delta,
    Finish,
    Free,
    Leg,
    Linear,
    Memory,
    Merge,
    Mode,
    Piece,
    Tensor,
    Tile,
    Transfer,
)

RESULTS = frozenset({Tensor.OUT_PART, Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART})
_PER_ROW = frozenset({Tensor.LSE, Tensor.LSE_PART, Tensor.DELTA})
_DELTA = Tensor.DELTA  # enums are slow to ask, plans long
_STREAMS = 8  # queues per rank: one for kernels, then (out, in) per link class
_COLLECTIVES = 7  # a line that only folding knows


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


class NeedKind(StrEnum):
    """What a job does; whoever prices jobs must know a price for each.

    COPY moves inside the memory of a GPU, HOST between a GPU and its host, TRANSFER between two
    ranks. A DELAY takes no time.
    """

    __hash__ = str.__hash__  # an enum's own hash is a python function, and jobs are many

    TILE = "tile"
    MERGE = "merge"
    FINISH = "finish"
    DELTA = "delta"
    LINEAR = "linear"
    COPY = "copy"
    HOST = "host"
    TRANSFER = "transfer"
    COLLECTIVE = "collective"
    DELAY = "delay"


class Need(NamedTuple):
    """What one job takes.

    Attributes:
        kind: What it does.
        calls: Kernel calls of a tile.
        size: What a transfer moves; what a rank gets of a collective from its own node; what a tile
            folds into accumulators that exist already; what another kernel reads and writes.
        far: Of a transfer, whether it leaves the node. Of a collective, whether some leg does.
        far_size: What a rank gets of a collective from other nodes.
        far_peers: From how many ranks it gets that.
        sharing: By how many ranks of a node NCCL shares what enters the node.
        delta: Of a tile, whether it reads delta and not out.
        flops: Of a projection, floating-point operations; they scale with tokens.
        again: Of a tile of a backward plan, whether it attends forward, to make what was not saved.
        sliced: Of a tile, whether it has some of its rank's queries only.
        messages: Of a transfer, how many tensors it moves.
    """

    kind: NeedKind
    calls: tuple[Call, ...] = ()
    size: Size = Size()
    far: bool = False
    far_size: Size = Size()
    far_peers: int = 0
    sharing: int = 1
    delta: bool = False
    flops: int = 0
    again: bool = False
    sliced: bool = False
    messages: int = 1


class Launched(NamedTuple):
    """What the host of a rank has launched so far.

    Attributes:
        calls: Kernel calls of tiles.
        folds: Tiles that fold into accumulators.
        merges: Merges of what arrived.
        moves: Batches of a send and a receive, and collectives.
        again: Kernel calls of forward tiles in a backward plan; they are not among `calls`.
        far: Of `moves`, those that leave the node.
        slices: Tiles on some of the rank's queries.
        messages: Of `moves`, the tensors that move in them.
    """

    calls: int = 0
    folds: int = 0
    merges: int = 0
    moves: int = 0
    again: int = 0
    far: int = 0
    slices: int = 0
    messages: int = 0


Calls = Callable[[Plan, Tile], tuple[Call, ...]]
"""From a tile to its kernel calls."""


class Part(NamedTuple):
    """A job without times, see `contention.Job`.

    Attributes:
        queues: As there.
        ranks: As there.
        after: As there.
        need: What it takes.
        task: The task that it is of.
        peers: Of a collective, the ranks that exchange.
        launched: Per rank, what its host must have launched before this can run.
        latest: Of a transfer between nodes, per rank the last kernel launched before it.
        gates: As there.
    """

    queues: tuple[int, ...]
    ranks: tuple[int, ...]
    after: tuple[int, ...]
    need: Need
    task: int
    peers: tuple[int, ...] = ()
    launched: tuple[Launched, ...] = ()
    latest: tuple[int, ...] = ()
    gates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Parts in the order in which queues serve them, and the reference lengths.

    Attributes:
        parts: The jobs.
        seqlen_q: Query tokens of the reference problem.
        seqlen_kv: Its key tokens.
        folded: Jobs of the plan before folding.
        alike: Per rank that is left, how many ranks it stands for, itself included.
        lonely: Whether at most one rank of each node sends to other nodes.
    """

    parts: tuple[Part, ...]
    seqlen_q: int
    seqlen_kv: int
    folded: int
    alike: Mapping[int, int]
    lonely: bool


def skeleton(
    program: Program,
    gpus_per_node: int,
    *,
    eager: bool = False,
    fold: bool = True,
    calls: Calls | None = None,
    threaded: bool = False,
) -> Skeleton:
    """Take the sizes out of a verified plan of a small reference problem.

    Args:
        program: The plan.
        gpus_per_node: Which transfers leave a node.
        eager: Whether parts know what hosts have launched before, and fold only where that agrees.
        fold: Whether jobs that cannot differ in time are folded into one.
        calls: Kernel calls of a tile; None is as a GPU takes them.
        threaded: Whether one thread of a rank issues its transfers and computes, as on a CPU.
    """
    plan = program.plan
    parts: list[Part] = []
    queries, sizes, made = _queries(plan), _Sizes(plan), calls or calls_of
    for index, task in enumerate(plan.tasks):  # a part for each, so parts are numbered as tasks
        after = task.after if len(task.after) <= 1 else tuple(sorted(set(task.after)))
        match task:
            case Transfer():
                part = _transfer(sizes, task.leg, after, gpus_per_node, index)
                parts.append(_gated(part, parts) if len(part.ranks) > 1 else part)
            case Collective():
                need = _collective(plan, task, gpus_per_node)
                peers = tuple(sorted({p.rank for leg in task.legs for p in (leg.src, leg.dst)}))
                parts.append(Part((), (), after, need, index, peers))
            case Free():
                parts.append(Part((), (), after, Need(NeedKind.DELAY), index))
            case _:
                rank = task.place.rank
                need = _compute(program, index, made, sizes, queries.get(rank, 0))
                parts.append(Part((rank * _STREAMS,), (rank,), after, need, index))
    problem = plan.problem
    if threaded:
        parts = _in_turn(parts, program)
    whole = _launched(_batched(parts)) if eager else parts
    alike = dict.fromkeys(range(problem.cp), 1)
    kept: Sequence[Part] = whole
    if fold:
        kept, alike = _folded(whole)
    senders: dict[int, set[int]] = {}
    for part in whole:
        if part.need.kind is NeedKind.TRANSFER and part.need.far:
            senders.setdefault(part.ranks[0] // gpus_per_node, set()).add(part.ranks[0])
    lonely = all(len(ranks) == 1 for ranks in senders.values())
    lengths = problem.seqlen_q, problem.seqlen_kv
    return Skeleton(tuple(kept), *lengths, len(whole), alike, lonely)


def _in_turn(parts: Sequence[Part], program: Program) -> list[Part]:
    """Let each rank's thread go through the plan as the executor does (`execute`).

    In a kernel it issues nothing, so what moves waits for the kernels before it, at both ends. It
    waits for a send before it frees what is sent, and for sends of copies before it sends again.
    """
    latest: dict[int, int] = {}
    owed: defaultdict[int, set[int]] = defaultdict(set)  # by rank, what it must wait for by now
    whole: defaultdict[int, set[int]] = defaultdict(set)  # by slab, sends from it
    copied: defaultdict[int, set[int]] = defaultdict(set)  # by rank, sends from copies
    found = []
    for index, (part, step) in enumerate(zip(parts, program.steps, strict=True)):
        after, ranks = set(part.after), part.peers or part.ranks
        moves = part.need.kind in (NeedKind.TRANSFER, NeedKind.COLLECTIVE)
        sent = [access for access in step.accesses if moves and access.mode is not Mode.CREATE]
        for rank in {access.place.rank for access in sent}:
            owed[rank] |= copied.pop(rank, set())
        for rank in ranks:
            after |= owed[rank]
            if moves:
                after.update({latest[rank]} if rank in latest else ())
            else:
                latest[rank] = index
                owed[rank].clear()
        for access in sent:
            first, *others = access.segments
            slab = program.slabs[first.slab]
            if others or (first.chunks, first.heads) != (slab.piece.chunks, slab.piece.heads):
                copied[access.place.rank].add(index)
            else:
                whole[slab.id].add(index)
        for freed in step.frees:
            owed[program.slabs[freed].place.rank] |= whole.pop(freed, set())
        found.append(part._replace(after=tuple(sorted(after))))
    return found


def _batched(parts: Sequence[Part]) -> list[Part]:
    """Let what waits for a receive wait for the send that was launched with it too.

    torch issues the n-th send and the n-th receive of a rank as one batch, and waits for both.
    """
    sends: dict[int, list[int]] = {}
    received: dict[int, tuple[int, int]] = {}  # transfer -> rank, how many it had received before
    counts: dict[int, int] = {}
    for index, part in enumerate(parts):
        if part.need.kind is NeedKind.TRANSFER:
            src, dst = part.ranks
            sends.setdefault(src, []).append(index)
            received[index] = dst, counts.get(dst, 0)
            counts[dst] = counts.get(dst, 0) + 1
    found = []
    for index, part in enumerate(parts):
        more = set(part.after)
        if part.need.kind is not NeedKind.TRANSFER:
            for rank, at in (received[earlier] for earlier in part.after if earlier in received):
                more.update(sends.get(rank, [])[at : at + 1])
        found.append(part._replace(after=tuple(sorted(n for n in more if n < index))))
    return found


@dataclass(slots=True)
class _Host:
    """What the host of a rank has launched so far, before sends and receives are one batch.

    Attributes are those of `Launched`; of what moves, each side apart.
    """

    calls: int = 0
    folds: int = 0
    merges: int = 0
    again: int = 0
    slices: int = 0
    sends: int = 0
    receives: int = 0
    far_sends: int = 0
    far_receives: int = 0
    sent: int = 0
    received: int = 0

    def attend(self, need: Need) -> None:
        """Launch a tile."""
        if need.again:
            self.again += len(need.calls)
        else:
            self.calls += len(need.calls)
        self.folds += any(need.size)
        self.slices += need.sliced

    def send(self, need: Need) -> None:
        """Launch the sending side of what moves."""
        self.sends += 1
        self.far_sends += need.far
        self.sent += need.messages

    def receive(self, need: Need) -> None:
        """Launch the receiving side of what moves."""
        self.receives += 1
        self.far_receives += need.far
        self.received += need.messages

    @property
    def launched(self) -> Launched:
        """All of it: as many batches as there are of the more frequent of sends and receives."""
        return Launched(
            calls=self.calls,
            folds=self.folds,
            merges=self.merges,
            moves=max(self.sends, self.receives),
            again=self.again,
            far=max(self.far_sends, self.far_receives),
            slices=self.slices,
            messages=max(self.sent, self.received),
        )


def _launched(parts: Sequence[Part]) -> list[Part]:
    """Note what hosts have launched by each part, in the plan's order."""
    hosts: defaultdict[int, _Host] = defaultdict(_Host)
    latest: dict[int, int] = {}
    found = []
    for index, part in enumerate(parts):
        need = part.need
        ranks = _launch(part, hosts)
        launched = tuple([hosts[rank].launched for rank in ranks])
        moves = need.kind is NeedKind.TRANSFER
        before: tuple[int, ...] = ()
        # Gradients of keys wait for what made them, and are sent when a step has ended.
        if moves and need.far and not need.size.result_kv:
            before = tuple(latest[r] for r in part.ranks if r in latest)
        elif part.ranks and not moves:
            latest[part.ranks[0]] = index
        found.append(part._replace(launched=launched, latest=before))
    return found


def _launch(part: Part, hosts: Mapping[int, _Host]) -> tuple[int, ...]:
    """Let the hosts of a part's ranks launch it; return them, none if that costs no host time."""
    need = part.need
    match need.kind:
        case NeedKind.TILE:
            hosts[part.ranks[0]].attend(need)
        case NeedKind.MERGE:
            hosts[part.ranks[0]].merges += 1
        case NeedKind.TRANSFER:
            src, dst = part.ranks
            hosts[src].send(need)
            hosts[dst].receive(need)
        case NeedKind.COLLECTIVE:
            for rank in part.peers:
                hosts[rank].send(need)
                hosts[rank].receive(need)
        case (
            NeedKind.FINISH
            | NeedKind.DELTA
            | NeedKind.LINEAR
            | NeedKind.COPY
            | NeedKind.HOST
            | NeedKind.DELAY
        ):
            return ()
        case _:
            assert_never(need.kind)
    return part.peers or part.ranks


def calls_of(plan: Plan, tile: Tile) -> tuple[Call, ...]:
    """List a tile's kernel calls as a GPU takes them.

    A window or any other mask that is no triangle is one call with its mean density.
    """
    rows, columns = plan.tokens(tile.reads[0]), plan.tokens(tile.reads[1])
    heads = tile.heads.bit_count()
    if tile.area == rows * columns:
        return (Call(rows, columns, heads, False, 1.0),)
    q = tuple(plan.q_chunks[c] for c in tile.q)
    kv = tuple(plan.kv_chunks[c] for c in tile.kv)
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


def calls_on(fitted: Calibration | None) -> Calls:
    """How tiles become kernel calls on a cluster: as the harness's own kernels take them, or GPUs'.

    A cluster of processors runs the harness's interpreter, which cuts masks that no kernel has.
    """
    return calls_of if fitted is None or fitted.on_gpus else kernel_calls_of


def kernel_calls_of(plan: Plan, tile: Tile) -> tuple[Call, ...]:
    """List a tile's kernel calls as the harness's interpreter makes them on a CPU.

    A call with a mask tensor takes as long as one without.
    """
    q = tuple(plan.q_chunks[c] for c in tile.q)
    kv = tuple(plan.kv_chunks[c] for c in tile.kv)
    heads = tile.heads.bit_count()
    return tuple(
        Call(
            call.rows[1] - call.rows[0],
            call.cols[1] - call.cols[0],
            heads,
            call.mask.kind is MaskKind.CAUSAL,
            1.0,
        )
        for call in lower(plan.problem.pattern, q, kv)
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of pieces of a plan; a ring moves the same pieces many times."""

    plan: Plan
    known: dict[tuple[Piece, ...], Size] = field(default_factory=dict)
    moving: dict[tuple[tuple[Piece, ...], bool], Need] = field(default_factory=dict)

    def of(self, pieces: Iterable[Piece]) -> Size:
        key = tuple(pieces)
        size = self.known.get(key)
        if size is None:
            size = self.known[key] = _size(self.plan, key)
        return size

    def move(self, pieces: tuple[Piece, ...], *, far: bool) -> Need:
        """What a transfer of pieces takes."""
        need = self.moving.get((pieces, far))
        if need is None:
            messages = len({piece.tensor for piece in pieces})
            need = Need(NeedKind.TRANSFER, size=self.of(pieces), far=far, messages=messages)
            self.moving[pieces, far] = need
        return need


def _size(plan: Plan, pieces: Iterable[Piece]) -> Size:
    counts = [0] * len(Size._fields)
    for piece in pieces:
        elements = plan.tokens(piece) * width(plan, piece.tensor) * piece.heads.bit_count()
        if piece.tensor in _PER_ROW:
            counts[4] += elements
        else:
            counts[piece.tensor.on_kv + 2 * (piece.tensor in RESULTS)] += elements
    return Size(*counts)


def _transfer(
    sizes: _Sizes, leg: Leg, after: tuple[int, ...], gpus_per_node: int, index: int
) -> Part:
    src, dst = leg.src.rank, leg.dst.rank
    if src == dst:
        if leg.src.memory is leg.dst.memory:
            need = Need(NeedKind.COPY, size=sizes.of(leg.pieces))
            return Part((src * _STREAMS,), (src,), after, need, index)
        away = leg.dst.memory is Memory.HOST
        need = Need(NeedKind.HOST, size=sizes.of(leg.pieces))
        return Part((src * _STREAMS + (5 if away else 6),), (src,), after, need, index)
    far = src // gpus_per_node != dst // gpus_per_node
    base = 3 if far else 1
    queues = (src * _STREAMS + base, dst * _STREAMS + base + 1)
    return Part(queues, (src, dst), after, sizes.move(leg.pieces, far=far), index)


def _gated(part: Part, parts: Sequence[Part]) -> Part:
    """Let the destination of a transfer wait for what goes on there alone, not the source."""
    src, dst = part.ranks
    gates = tuple([n for n in part.after if dst in parts[n].ranks and src not in parts[n].ranks])
    if not gates:
        return part
    return part._replace(after=tuple(n for n in part.after if n not in gates), gates=gates)


def _collective(plan: Plan, task: Collective, gpus_per_node: int) -> Need:
    """What the busiest rank receives from others, from its own node and from afar."""
    near: dict[int, list[Piece]] = {}
    far: dict[int, list[Piece]] = {}
    peers: dict[int, set[int]] = {}
    nodes: dict[int, set[int]] = {}
    for leg in task.legs:
        src, dst = leg.src.rank, leg.dst.rank
        nodes.setdefault(dst // gpus_per_node, set()).add(dst)
        if leg.src == leg.dst:
            continue
        if src // gpus_per_node == dst // gpus_per_node:
            near.setdefault(dst, []).extend(leg.pieces)
        else:
            far.setdefault(dst, []).extend(leg.pieces)
            peers.setdefault(dst, set()).add(src)
    size = max((_size(plan, pieces) for pieces in near.values()), key=sum, default=Size())
    far_size = max((_size(plan, pieces) for pieces in far.values()), key=sum, default=Size())
    # Rings of all-gathers and reduce-scatters enter a node once and share its NICs; what an
    # all-to-all brings is for one rank.
    shared = far and task.kind is not CollectiveKind.ALL_TO_ALL
    return Need(
        NeedKind.COLLECTIVE,
        size=size,
        far=bool(far),
        far_size=far_size,
        far_peers=max(map(len, peers.values()), default=0),
        sharing=min(map(len, nodes.values())) if shared else 1,
    )


def _queries(plan: Plan) -> dict[int, int]:
    """Per rank, how many query tokens it has at first."""
    chunks: dict[int, set[int]] = {}
    for resident in plan.initial:
        if resident.piece.tensor is Tensor.Q:
            chunks.setdefault(resident.place.rank, set()).update(resident.piece.chunks)
    return {r: sum(len(plan.q_chunks[c]) for c in held) for r, held in chunks.items()}


def _compute(program: Program, index: int, calls: Calls, sizes: _Sizes, queries: int) -> Need:
    plan = program.plan
    match task := plan.tasks[index]:
        case Tile():
            slabs, creates = program.slabs, program.steps[index].creates
            old = task.writes
            if creates:
                fresh = {slabs[slab].piece.tensor for slab in creates}
                old = tuple([piece for piece in old if piece.tensor not in fresh])
            delta = task.reads[-1].tensor is _DELTA
            made = calls(plan, task)
            return Need(
                NeedKind.TILE,
                calls=made,
                size=sizes.of(old),
                delta=delta,
                again=task.direction is not plan.direction,
                sliced=sum([call.rows for call in made]) < queries,
            )
        case Merge():
            return Need(NeedKind.MERGE, size=sizes.of(task.sources))
        case Finish():
            return Need(NeedKind.FINISH, size=sizes.of((*task.parts, *task.results)))
        case Delta():
            return Need(NeedKind.DELTA, size=sizes.of((task.out, task.dout, task.result)))
        case Linear():
            size = sizes.of((*task.reads, *task.writes))
            return Need(
                NeedKind.LINEAR, size=size, flops=linear_flops(plan, task) // plan.problem.batch
            )
        case Transfer() | Collective() | Free():
            raise AssertionError(f"task {index} computes nothing")


def _folded(parts: Sequence[Part]) -> tuple[tuple[Part, ...], dict[int, int]]:
    """Keep one part of each kind: the coarsest partition that times cannot tell apart."""
    kinds = _kinds(parts)
    if len(set(kinds)) == len(parts):
        ranks_met = {queue // _STREAMS for part in parts for queue in _lines(part)}
        return tuple(parts), dict.fromkeys(sorted(ranks_met), 1)
    first: dict[int, int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    kept = sorted(first.values())
    number = {kinds[index]: at for at, index in enumerate(kept)}
    alike = _ranks_alike(parts, kinds)

    def stands(earlier: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({number[kinds[index]] for index in earlier}))

    folded = []
    for index in kept:
        part = parts[index]
        ranks = tuple(alike[rank] for rank in part.ranks)
        queues = tuple(alike[q // _STREAMS] * _STREAMS + q % _STREAMS for q in part.queues)
        folded.append(
            part._replace(
                queues=queues,
                ranks=ranks,
                after=stands(part.after),
                gates=stands(part.gates),
                latest=stands(part.latest),
                peers=tuple(sorted({alike[rank] for rank in part.peers})),
                launched=part.launched if part.ranks else tuple(dict.fromkeys(part.launched)),
            )
        )
    counts: dict[int, int] = {}
    for rank in alike.values():
        counts[rank] = counts.get(rank, 0) + 1
    return tuple(folded), counts


def _lines(part: Part) -> tuple[int, ...]:
    """The queues of a part; collectives of a rank have one too here, for they come in an order."""
    return part.queues or tuple(rank * _STREAMS + _COLLECTIVES for rank in part.peers)


def _ranks_alike(parts: Sequence[Part], kinds: Sequence[int]) -> dict[int, int]:
    """Per rank, the first rank whose queues all hold the same kinds in the same order."""
    lines: dict[int, dict[int, list[int]]] = {}
    for part, kind in zip(parts, kinds, strict=True):
        for queue in _lines(part):
            rank, stream = divmod(queue, _STREAMS)
            lines.setdefault(rank, {}).setdefault(stream, []).append(kind)
    seen: dict[Hashable, int] = {}
    return {
        rank: seen.setdefault(tuple(sorted((s, tuple(line)) for s, line in queues.items())), rank)
        for rank, queues in sorted(lines.items())
    }


def _kinds(parts: Sequence[Part]) -> list[int]:
    """Refine: same need, then same kinds waited for, same place in line, same kind of rank."""
    places: list[list[tuple[int, int]]] = [[] for _ in parts]
    lengths: dict[int, int] = {}
    for index, part in enumerate(parts):
        for queue in _lines(part):
            places[index].append((queue % _STREAMS, lengths.get(queue, 0)))
            lengths[queue] = lengths.get(queue, 0) + 1
    kinds = _numbered(
        [
            (part.need, part.launched, tuple(place))
            for part, place in zip(parts, places, strict=True)
        ]
    )
    queued = all(places)
    while True:
        count = len(set(kinds))
        alike = _ranks_alike(parts, kinds)
        if queued and len(set(alike.values())) == len(alike):
            # No two ranks are alike, and no two parts have one place in a line: nothing folds.
            return list(range(len(parts)))
        kinds = _numbered(
            [
                (
                    kinds[index],
                    tuple(sorted({kinds[earlier] for earlier in part.after})),
                    tuple(sorted({kinds[earlier] for earlier in part.gates})),
                    tuple([kinds[earlier] for earlier in part.latest]),
                    tuple([alike[rank] for rank in part.peers or part.ranks]),
                )
                for index, part in enumerate(parts)
            ]
        )
        if len(set(kinds)) == count:
            return kinds


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
