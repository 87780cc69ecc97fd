"""Emit device programs from a proved plan, by the walk of the executor.

The tasks of a rank are taken in the plan's order, as `harness.execute` takes them, and so are the
kernel calls of a tile and the parts of accumulators that each adds to: equal operations in an equal
order give equal bits. What is dynamic there is decided here: where each buffer lies, which tensor a
kernel writes, what is copied, which transfers form a round, and who waits for whom.
"""

from collections.abc import Sequence

from harness.plan.residency import Access, Program, Step, without_collection
from harness.plan.tasks import (
    AccessMode,
    Leg,
    Resident,
    Task,
    legs_of,
    ranks_of,
)
from harness.program.emit_tasks import TaskEmitter
from harness.program.operations import DeviceProgram, RankProgram
from harness.program.sides import Lanes, communicators_of
from harness.program.slabs import RankSlabs
from harness.program.writer import BufferView, RankWriter


def emit(program: Program, gpus_per_node: int = 8, *, ahead: int = 1) -> DeviceProgram:
    """Emit the programs of all ranks.

    Args:
        program: A proved plan.
        gpus_per_node: Ranks that share NVLink; neighbouring ranks share a node.
        ahead: Steps (moving, then computing) by which a lane may run ahead of others before it
            waits for memory that they used: with more, arenas are larger and lanes wait less.
    """
    with without_collection():
        lanes = communicators_of(program.plan, gpus_per_node)
        ranks = tuple(
            _Walk(program, RankWriter(rank, ahead), lanes, gpus_per_node).run()
            for rank in range(program.plan.problem.cp)
        )
    return DeviceProgram(program.plan.hash, gpus_per_node, ranks)


def emit_rank(
    program: Program, rank: int, gpus_per_node: int = 8, *, ahead: int = 1
) -> RankProgram:
    """Emit one rank's program; arguments as `emit`."""
    lanes = communicators_of(program.plan, gpus_per_node)
    return _Walk(program, RankWriter(rank, ahead), lanes, gpus_per_node).run()


class _Walk:
    def __init__(
        self, program: Program, writer: RankWriter, lanes: Lanes, gpus_per_node: int
    ) -> None:
        self.program = program
        self.plan = program.plan
        self.rank = writer.rank
        self.writer = writer
        self.slabs = RankSlabs(program, writer, lanes, gpus_per_node)
        self.tasks = TaskEmitter(program, writer, self.slabs)
        self.task = 0
        self.computed = False

    def run(self) -> RankProgram:
        inputs = []
        for slab in self.program.slabs[: self.program.initial]:
            if slab.place.rank == self.rank:
                view = self.slabs.begin(slab.id)
                view.buffer.users += 1  # the caller holds it throughout
                self.writer.place(view.buffer)
                inputs.append((slab.id, view))
        for index, (task, step) in enumerate(zip(self.plan.tasks, self.program.steps, strict=True)):
            if self.rank in ranks_of(task):
                self.task = index
                self._one(task, step)
            for freed in step.frees:
                self.slabs.free(freed)
        outputs = [
            (at, self._result(resident))
            for at, resident in enumerate((*self.plan.outputs, *self.plan.saved))
            if resident.place.rank == self.rank
        ]
        self.slabs.flush()
        return self.writer.finish(inputs, outputs)

    def _one(self, task: Task, step: Step) -> None:
        legs = legs_of(task)
        if legs:
            self.writer.step += self.computed
            self.computed = False
            self._legs(legs, step)
            return
        self.computed = True
        self.slabs.flush()
        self.tasks.emit(self.task, task, step)

    def _result(self, resident: Resident) -> BufferView:
        segments = self.program.final[resident]
        access = Access(resident.place, resident.piece, AccessMode.READ, segments)
        view, _ = self.slabs.read(access, None)
        return view

    # Moving ---------------------------------------------------------------------------------

    def _legs(self, legs: Sequence[Leg], step: Step) -> None:
        accesses = iter(step.accesses)
        reads = [[next(accesses) for _ in leg.pieces] for leg in legs]
        creates = {(a.place, a.piece.tensor, a.piece.version): a for a in accesses}
        for leg, pieces in zip(legs, reads, strict=True):
            for access in pieces:
                create = creates[leg.dst, access.piece.tensor, leg.version]
                if leg.src.rank == leg.dst.rank == self.rank:
                    self.slabs.move(access, create, self.task)
                elif leg.src.rank == self.rank:
                    self.slabs.send(leg, access, self.task)
                elif leg.dst.rank == self.rank:
                    self.slabs.receive(leg, access, create, self.task)
