"""Proof that a device program does its plan: its bytes, its messages, its sums in their order.

The program runs on labels instead of values (see `labels`), in one order of its moments: all others
give the same where nothing races. Every element of every arena has a label, so that bytes that were
overwritten, or never written, are told as such when they are read.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from harness.errors import DeviceProgramError
from harness.plan.kernel_calls import lower
from harness.plan.plan import Plan
from harness.plan.sizes import wire_bytes
from harness.plan.slices import head_runs
from harness.plan.tasks import Place, Tile, legs_of
from harness.program.check_progress import Messages, Moment, PostAt, posts_of
from harness.program.labels import (
    NOTHING,
    Labels,
    added,
    attended,
    differentiated,
    projected,
    returned,
    summed_rows,
    weight_labels,
)
from harness.program.operations import (
    ByteView,
    Group,
    Kernel,
    KernelLaunch,
    Lane,
    PostEnd,
    RankProgram,
)
from harness.program.plan_labels import PlanLabels, input_labels

_ATTENDING = frozenset({Kernel.ATTEND, Kernel.ATTEND_BACKWARD, Kernel.ATTEND_BACKWARD_DELTA})
_STEP = np.uint64(0x9E3779B97F4A7C15)
"""From the label of an element to that of the next; 2**64 over the golden ratio."""
_UNWRITTEN = np.uint64(0xDEADBEEF)


def check_job(
    plan: Plan,
    ranks: Sequence[RankProgram],
    messages: Messages,
    order: Iterable[tuple[int, int, Moment]],
) -> None:
    """Prove that programs do a plan.

    Args:
        plan: The plan.
        ranks: The programs, without races.
        messages: Their posts, matched.
        order: All moments, each after those that it waits for.

    Raises:
        DeviceProgramError: They do something else.
    """
    _check_messages(plan, ranks)
    for program in ranks:
        _check_calls(plan, program)
        _check_ends(plan, program)
    wanted = PlanLabels(plan)
    wanted.run()
    found = [_RankLabels(plan, program) for program in ranks]
    started: set[PostAt] = set()
    for rank, number, moment in order:
        operation = ranks[rank].operations[number]
        if moment is Moment.ENDED and isinstance(operation, KernelLaunch):
            found[rank].launch(number, operation)
        elif moment is Moment.STARTED and isinstance(operation, Group):
            for at in range(len(operation.posts)):
                here = PostAt(rank, number, at)
                started.add(here)
                if messages.mates[here] in started:
                    _deliver(ranks, found, here, messages.mates[here])
    for labels in found:
        labels.check(wanted)


def _check_messages(plan: Plan, ranks: Sequence[RankProgram]) -> None:
    """Each rank sends the plan's pieces, in its order on each communicator."""
    wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
    for task in plan.tasks:
        for leg in legs_of(task):
            if leg.src.rank != leg.dst.rank:
                sizes = (wire_bytes(plan, piece) for piece in leg.pieces)
                wanted[leg.src.rank, leg.dst.rank] += [size for size in sizes if size]
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    lanes: dict[tuple[int, int], set[Lane]] = defaultdict(set)
    for program in ranks:
        for _, lane, post in posts_of(program):
            if post.end is PostEnd.SEND:
                pair = (program.rank, post.peer)
                sent[pair].append(post.view.size_bytes)
                lanes[pair].add(lane)
    for pair in sorted({*wanted, *sent}):
        if sent[pair] != wanted[pair] or len(lanes[pair]) != 1:
            raise DeviceProgramError(
                "messages are the plan's, those of a pair on one communicator",
                rank=pair[0],
                detail=f"{sent[pair]} bytes go to rank {pair[1]} by "
                f"{', '.join(lane.value for lane in sorted(lanes[pair])) or 'none'}; "
                f"the plan sends {wanted[pair]}",
            )


def _check_calls(plan: Plan, program: RankProgram) -> None:
    """A rank's kernel calls are those of its tiles."""
    wanted: Counter[tuple[int | None, tuple[int, int] | None]] = Counter(
        (index, (number, at))
        for index, tile in enumerate(plan.tasks)
        if isinstance(tile, Tile) and tile.place.rank == program.rank
        for number in range(
            len(lower(plan.problem.pattern, *(plan.chunks(piece) for piece in tile.reads[:2])))
        )
        for at in range(len(head_runs(tile.heads, plan.problem.group)))
    )
    found = Counter(
        (operation.task, operation.call)
        for operation in program.operations
        if isinstance(operation, KernelLaunch) and operation.kernel in _ATTENDING
    )
    if found != wanted:
        task, call = next(iter((found - wanted) + (wanted - found)))
        raise DeviceProgramError(
            "each kernel call of a tile is launched once",
            rank=program.rank,
            detail=f"call {call} of task {task} is launched {found[task, call]} times",
        )


def _check_ends(plan: Plan, program: RankProgram) -> None:
    """Inputs and outputs are all there, on their memories."""
    for name, given, residents in (
        ("inputs", program.inputs, plan.initial),
        ("outputs", program.outputs, (*plan.outputs, *plan.saved)),
    ):
        wanted = [
            (at, place.memory)
            for at, (place, _) in enumerate(residents)
            if place.rank == program.rank
        ]
        if [(at, view.memory) for at, view in given] != wanted:
            raise DeviceProgramError(
                f"{name} are the plan's",
                rank=program.rank,
                detail=f"{[at for at, _ in given]} are there, the plan has "
                f"{[at for at, _ in wanted]}",
            )


class _RankLabels:
    """Labels of a rank's arenas: one for each element of the narrowest kind."""

    def __init__(self, plan: Plan, program: RankProgram) -> None:
        self.plan = plan
        self.program = program
        self.unit = plan.problem.dtype.bytes
        self.arenas = {
            memory: np.full(-(-size // self.unit), _UNWRITTEN)
            for memory, size in program.arena_bytes.items()
        }
        for at, view in program.inputs:
            self.write(view, input_labels(plan, plan.initial[at].piece))

    def _cells(self, view: ByteView) -> Labels:
        """Labels of each row's elements, the last axis."""
        parts = view.dtype.bytes // self.unit
        steps = [stride * view.dtype.bytes // self.unit * 8 for stride in view.strides]
        shape, wide = view.shape, len(view.shape) == 4
        last = view.shape[3] * parts if wide else parts
        return np.ndarray(
            (*shape[:3], last),
            np.uint64,
            self.arenas[view.memory],
            view.offset // self.unit * 8,
            (*steps[:3], 8),
        )

    def write(self, view: ByteView, labels: Labels) -> None:
        cells = self._cells(view)
        cells[...] = labels[..., None] + np.arange(cells.shape[3], dtype=np.uint64) * _STEP

    def read(self, view: ByteView, number: int | None) -> Labels:
        cells = self._cells(view)
        if not cells.size:
            return np.empty(cells.shape[:3], dtype=np.uint64)
        labels: Labels = cells[..., 0].copy()
        steps = np.arange(cells.shape[3], dtype=np.uint64) * _STEP
        if (cells != labels[..., None] + steps).any() or (labels == _UNWRITTEN).any():
            raise DeviceProgramError(
                "what is read was written, as one tensor",
                rank=self.program.rank,
                operation=number,
                detail=f"{view} holds other bytes",
            )
        return labels

    def raw(self, view: ByteView) -> Labels:
        """Labels of a dense view as one row."""
        cells = self._cells(view)
        return cells.reshape(-1)

    def launch(self, number: int, launch: KernelLaunch) -> None:
        reads = [self.read(view, number) for view in launch.reads]
        made = self._made(launch, reads)
        for view, labels in zip(launch.writes, made, strict=True):
            self.write(view, np.broadcast_to(labels, view.shape[:3]))

    def _made(self, launch: KernelLaunch, reads: list[Labels]) -> list[Labels]:
        task = -1 if launch.task is None else launch.task
        match launch.kernel:
            case Kernel.COPY:
                return reads
            case Kernel.ZERO | Kernel.NO_KEYS:
                return [np.full((1, 1, 1), NOTHING)]
            case Kernel.MERGE:
                total, lse_total, out, lse = reads
                return [added(total, out, lse_total, lse), added(lse_total, lse)]
            case Kernel.ADD:
                return [added(*reads)]
            case Kernel.DELTA:
                return [summed_rows(task, *reads)]
            case kernel if kernel in _ATTENDING and launch.call is not None:
                work = attended if kernel is Kernel.ATTEND else differentiated
                return work(task, launch.call, *reads)
            case _:
                return [_product(launch.kernel, task, reads)]

    def check(self, wanted: PlanLabels) -> None:
        """Hold the outputs against the plan's; inputs are as they were."""
        residents = (*self.plan.outputs, *self.plan.saved)
        for at, view in self.program.outputs:
            place, piece = residents[at]
            if (self.read(view, None) != wanted.at(Place(*place), piece)).any():
                raise DeviceProgramError(
                    "results are computed as the plan computes them",
                    rank=self.program.rank,
                    detail=f"{piece} has other contributions, or others' order",
                )
        for at, view in self.program.inputs:
            piece = self.plan.initial[at].piece
            if (self.read(view, None) != input_labels(self.plan, piece)).any():
                raise DeviceProgramError(
                    "inputs stay as they are",
                    rank=self.program.rank,
                    detail=f"{piece} is written",
                )


def _product(kernel: Kernel, task: int, reads: list[Labels]) -> Labels:
    first, second, *total = reads
    match kernel:
        case Kernel.PROJECT:
            return projected(task, first, second)
        case Kernel.TO_MODEL | Kernel.TO_MODEL_ADD:
            made = returned(task, first, second)
        case _:
            made = weight_labels(task, first, second)
    return added(total[0], made) if total else made


def _deliver(
    ranks: Sequence[RankProgram], found: Sequence[_RankLabels], here: PostAt, there: PostAt
) -> None:
    """Copy a message's labels."""
    ends = {}
    for at in (here, there):
        operation = ranks[at.rank].operations[at.operation]
        assert isinstance(operation, Group)
        post = operation.posts[at.post]
        ends[post.end] = (found[at.rank], post.view)
    (source, sent), (target, received) = ends[PostEnd.SEND], ends[PostEnd.RECEIVE]
    target.raw(received)[:] = source.raw(sent)
