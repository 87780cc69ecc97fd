"""From a proved plan to its jobs: one for each task, with what it needs and waits for."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from harness.cluster.machine import LinkClass, link_between, node_of
from harness.cluster.transfer_kinds import transfer_kinds
from harness.plan.plan import Plan
from harness.plan.residency import Program
from harness.plan.sizes import is_per_row, linear_flops, width
from harness.plan.tasks import (
    AccessMode,
    Collective,
    CollectiveKind,
    Delta,
    Finish,
    Free,
    Leg,
    Linear,
    Merge,
    Piece,
    Tensor,
    Tile,
    Transfer,
)
from harness.simulate.folding import folded
from harness.simulate.jobs import Need, NeedKind, Size, Skeleton, UntimedJob
from harness.simulate.launches import launched_eagerly
from harness.simulate.queues import Stream, number_of, queues_between
from harness.simulate.tile_calls import Calls, gpu_calls

_RESULTS = frozenset({Tensor.OUT_PART, Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART})
_DELTA = Tensor.DELTA  # enums are slow to ask, plans long


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
    parts: list[UntimedJob] = []
    queries, sizes, made = _queries(plan), _Sizes(plan), calls or gpu_calls
    for index, task in enumerate(plan.tasks):  # a part for each, so parts are numbered as tasks
        after = task.after if len(task.after) <= 1 else tuple(sorted(set(task.after)))
        match task:
            case Transfer():
                part = _transfer(sizes, task.leg, after, gpus_per_node, index)
                parts.append(_gated(part, parts) if len(part.ranks) > 1 else part)
            case Collective():
                need = _collective(plan, task, gpus_per_node)
                peers = tuple(sorted({p.rank for leg in task.legs for p in (leg.src, leg.dst)}))
                ports = _ports(task, gpus_per_node)
                parts.append(UntimedJob(ports, (), after, need, index, peers))
            case Free():
                parts.append(UntimedJob((), (), after, Need(NeedKind.DELAY), index))
            case _:
                rank = task.place.rank
                need = _compute(program, index, made, sizes, queries.get(rank, 0))
                parts.append(
                    UntimedJob((number_of(rank, Stream.COMPUTE),), (rank,), after, need, index)
                )
    problem = plan.problem
    if threaded:
        parts = _in_turn(parts, program)
    whole = launched_eagerly(parts) if eager else parts
    alike = dict.fromkeys(range(problem.cp), 1)
    kept: Sequence[UntimedJob] = whole
    if fold:
        kept, alike = folded(whole)
    senders: dict[int, set[int]] = {}
    for part in whole:
        if part.need.kind is NeedKind.TRANSFER and part.need.far:
            node = node_of(part.ranks[0], gpus_per_node)
            senders.setdefault(node, set()).add(part.ranks[0])
    lonely = all(len(ranks) == 1 for ranks in senders.values())
    lengths = problem.seqlen_q, problem.seqlen_kv
    kinds = ",".join(transfer_kinds(plan, gpus_per_node))
    return Skeleton(tuple(kept), *lengths, len(whole), alike, lonely, kinds)


def _in_turn(parts: Sequence[UntimedJob], program: Program) -> list[UntimedJob]:
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
        sent = [
            access for access in step.accesses if moves and access.mode is not AccessMode.CREATE
        ]
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
        """Need of a transfer of pieces."""
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
        if is_per_row(piece.tensor):
            counts[4] += elements
        else:
            counts[piece.tensor.on_kv + 2 * (piece.tensor in _RESULTS)] += elements
    return Size(*counts)


def _transfer(
    sizes: _Sizes, leg: Leg, after: tuple[int, ...], gpus_per_node: int, index: int
) -> UntimedJob:
    link = link_between(leg.src, leg.dst, gpus_per_node)
    queues = queues_between(leg.src, leg.dst, link)
    match link:
        case LinkClass.LOCAL:
            need = Need(NeedKind.COPY, size=sizes.of(leg.pieces))
        case LinkClass.HOST:
            need = Need(NeedKind.HOST, size=sizes.of(leg.pieces))
        case LinkClass.NVLINK | LinkClass.NIC:
            need = sizes.move(leg.pieces, far=link is LinkClass.NIC)
            return UntimedJob(queues, (leg.src.rank, leg.dst.rank), after, need, index)
    return UntimedJob(queues, (leg.src.rank,), after, need, index)


def _gated(part: UntimedJob, parts: Sequence[UntimedJob]) -> UntimedJob:
    """Let the destination of a transfer wait for what goes on there alone, not the source."""
    src, dst = part.ranks
    gates = tuple([n for n in part.after if dst in parts[n].ranks and src not in parts[n].ranks])
    if not gates:
        return part
    return part._replace(after=tuple(n for n in part.after if n not in gates), gates=gates)


def _ports(task: Collective, gpus_per_node: int) -> tuple[int, ...]:
    """Every port that a leg of a collective crosses: it holds them all until it ends."""
    found: set[int] = set()
    for leg in task.legs:
        link = link_between(leg.src, leg.dst, gpus_per_node)
        if link is not LinkClass.LOCAL:
            found.update(queues_between(leg.src, leg.dst, link))
    return tuple(sorted(found))


def _collective(plan: Plan, task: Collective, gpus_per_node: int) -> Need:
    """Need of a collective: receipts of its busiest rank, from its own node and from others."""
    near: dict[int, list[Piece]] = {}
    far: dict[int, list[Piece]] = {}
    peers: dict[int, set[int]] = {}
    nodes: dict[int, set[int]] = {}
    for leg in task.legs:
        src, dst = leg.src.rank, leg.dst.rank
        nodes.setdefault(node_of(dst, gpus_per_node), set()).add(dst)
        match link_between(leg.src, leg.dst, gpus_per_node):
            case LinkClass.LOCAL:
                pass
            case LinkClass.NIC:
                far.setdefault(dst, []).extend(leg.pieces)
                peers.setdefault(dst, set()).add(src)
            case LinkClass.NVLINK | LinkClass.HOST:
                near.setdefault(dst, []).extend(leg.pieces)
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
