"""Seconds of each task of a plan on a cluster, if nothing else runs beside it: the quick clock.

`costs_on` is the one place that chooses whose numbers count: a datasheet's, or a calibration's.
Whoever schedules, bounds or times a plan task by task (`streams`, `timeline`, `bounds`, the passes)
asks here. What tasks do to one another is the full clock's: `job_costs` and `contention`; it takes
a kernel's and a message's time from the same fitted models. docs/adr/0007-two-clocks.md says why
there are two.

By a datasheet a compute task takes the larger of its flops at the stated efficiency and its bytes
at the memory's bandwidth, plus a fixed start per kernel call. A leg takes a latency and its bytes
at the link's bandwidth. Left out there: the waves of thread blocks (small kernels are too fast) and
protocol switches by message size. Left out in both: contention beyond one leg at a time per port
and direction, slow-down of kernels while transfers run, and copies that only rearrange what came.
"""

from collections.abc import Sequence

from harness.cluster.calibration import Calibration
from harness.cluster.link_model import crowded_s
from harness.cluster.machine import Cluster, LinkClass
from harness.plan.problem import Direction
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes, linear_flops, piece_bytes, tile_flops
from harness.plan.tasks import (
    Collective,
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
from harness.simulate.tile_calls import calls_on, count_with_any_mask

_FITTED_BYTES = 2  # of an element: kernels were measured in bfloat16


class TaskCosts:
    """Costs of a plan's tasks on one cluster, by its datasheet.

    Args:
        program: A verified, resolved plan.
        cluster: Where it runs.
    """

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self.program = program
        self.plan = program.plan
        self.cluster = cluster
        self._bytes: dict[Piece, int] = {}
        self._calls: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._links = {kind: cluster.link(kind) for kind in LinkClass}

    def compute_s(self, index: int) -> float:
        """Seconds of a task that computes; 0 for one that only moves or frees."""
        task, gpu = self.plan.tasks[index], self.cluster.gpu
        match task:
            case Tile():
                return self.kernels_s(task) + self._folded_s(index, task)
            case Merge():
                # Read the source, write the accumulator, and read it too unless it is new.
                moved = self._folded_bytes(task.sources) - self._fresh_bytes(index)
                return gpu.kernel_start_s + self._memory_s(moved)
            case Finish():
                size = sum(map(self.bytes, (*task.parts, *task.results)))
                return gpu.kernel_start_s + self._memory_s(size)
            case Delta():
                size = sum(map(self.bytes, (task.out, task.dout, task.result)))
                return gpu.kernel_start_s + self._memory_s(size)
            case Linear():
                speed = gpu.peak_flops_per_s(self.plan.problem.dtype) * gpu.efficiency_linear
                return gpu.kernel_start_s + linear_flops(self.plan, task) / speed
            case Transfer() | Collective() | Free():
                return 0.0

    def leg_s(self, leg: Leg) -> float:
        """Seconds of a leg while the others of its plan move too."""
        return self._links[self.cluster.link_class(leg.src, leg.dst)].seconds(self.leg_bytes(leg))

    def collective_leg_s(self, leg: Leg) -> float:
        """Seconds of a leg of a collective, whose latency is paid once by `collective_start_s`."""
        link = self._links[self.cluster.link_class(leg.src, leg.dst)]
        return self.leg_bytes(leg) / link.bandwidth_bytes_per_s

    def collective_start_s(self, task: Collective) -> float:
        """The latency of the slowest link that a collective crosses."""
        kinds = {self.cluster.link_class(leg.src, leg.dst) for leg in task.legs}
        return max((self._links[kind].latency_s for kind in kinds), default=0.0)

    def leg_bytes(self, leg: Leg) -> int:
        """Bytes that a leg moves; unlike `sizes.leg_bytes`, a local copy counts too."""
        if leg.src.rank != leg.dst.rank:
            return leg_bytes(self.plan, leg) if self.plan.problem.round_sent else self._whole(leg)
        return self._whole(leg)

    def _whole(self, leg: Leg) -> int:
        return sum(map(self.bytes, leg.pieces))

    def bytes(self, piece: Piece) -> int:
        """Bytes of a piece."""
        if piece not in self._bytes:
            self._bytes[piece] = piece_bytes(self.plan, piece)
        return self._bytes[piece]

    def attention_s(self, flops: int, direction: Direction | None = None) -> float:
        """Seconds of attention flops alone, at the stated efficiency; None is the plan's way."""
        problem, way = self.plan.problem, direction or self.plan.direction
        return flops / self.cluster.gpu.attention_flops_per_s(problem.dtype, way)

    def launches(self, index: int) -> int:
        """Launches that each rank of a task issues for it."""
        match task := self.plan.tasks[index]:
            case Tile():
                return self.kernel_calls(task)
            case Free():
                return 0
            case _:
                return 1

    def kernel_calls(self, tile: Tile) -> int:
        """Kernel calls of a tile; a GPU's kernel takes any mask between two runs in one."""
        key = (tile.q, tile.kv)
        if key not in self._calls:
            self._calls[key] = count_with_any_mask(self.plan, tile)
        return self._calls[key]

    def kernels_s(self, tile: Tile) -> float:
        """Seconds of a tile's kernel calls, without folding their results in."""
        moved = sum(map(self.bytes, (*tile.writes, *tile.reads)))
        seconds = self.attention_s(tile_flops(self.plan, tile), tile.direction)
        starts = self.kernel_calls(tile) * self.cluster.gpu.kernel_start_s
        return starts + max(seconds, self._memory_s(moved))

    def _folded_s(self, index: int, tile: Tile) -> float:
        """Seconds to fold a tile's results into what is there: all but those that begin there."""
        written = sum(map(self.bytes, tile.writes))
        # What is not new is folded in: read the part, read and write the accumulator.
        share = 1 - self._fresh_bytes(index) / written if written else 0.0
        return self._memory_s(share * self._folded_bytes(tile.writes))

    def _folded_bytes(self, parts: Sequence[Piece]) -> float:
        """Bytes that move when partial results are folded in: merged (out), or added."""
        merged = self.cluster.gpu.merge_passes
        return sum(
            self.bytes(part) * (merged if part.tensor is Tensor.OUT_PART else 3.0) for part in parts
        )

    def _fresh_bytes(self, index: int) -> int:
        """Bytes of accumulators that a task begins."""
        slabs = self.program.slabs
        return sum(self.bytes(slabs[slab].piece) for slab in self.program.steps[index].creates)

    def _memory_s(self, size_bytes: float) -> float:
        return size_bytes / self.cluster.gpu.memory_bandwidth_bytes_per_s


class MeasuredTaskCosts(TaskCosts):
    """The same on a cluster that was measured: kernels and messages by its fitted models.

    Args:
        program: As there.
        cluster: As there.
        fitted: The calibration; 16-bit kernels only, others follow the datasheet.
    """

    def __init__(self, program: Program, cluster: Cluster, fitted: Calibration) -> None:
        super().__init__(program, cluster)
        self._fitted = fitted
        self._calls_of = calls_on(fitted)
        self._kernels: dict[tuple[tuple[int, ...], tuple[int, ...], int, bool], float] = {}

    def leg_s(self, leg: Leg) -> float:
        """Seconds of a leg while the others of its plan move too."""
        links, effects = self._fitted.links, self._fitted.effects
        match self.cluster.link_class(leg.src, leg.dst):
            case LinkClass.NVLINK:
                return crowded_s(links.near, effects.near, self.leg_bytes(leg))
            case LinkClass.NIC:
                return crowded_s(links.far, effects.far, self.leg_bytes(leg))
            case LinkClass.LOCAL | LinkClass.HOST:
                return super().leg_s(leg)

    def kernels_s(self, tile: Tile) -> float:
        """Seconds of a tile's kernel calls by the kernel model; of other precisions as there."""
        problem = self.plan.problem
        if problem.dtype.bytes != _FITTED_BYTES:
            return super().kernels_s(tile)
        delta = any(piece.tensor is Tensor.DELTA for piece in tile.reads)
        key = (tile.q, tile.kv, tile.heads, delta)
        if key not in self._kernels:
            self._kernels[key] = sum(
                self._fitted.kernels.seconds(
                    tile.direction,
                    call.rows,
                    call.columns,
                    call.heads * problem.batch,
                    causal=call.causal,
                    density=call.density,
                    head_dim=problem.head_dim,
                    delta_given=delta,
                )
                for call in self._calls_of(self.plan, tile)
            )
        return self._kernels[key]

    def _folded_s(self, index: int, tile: Tile) -> float:
        if self.plan.problem.dtype.bytes != _FITTED_BYTES:
            return super()._folded_s(index, tile)
        written = sum(map(self.bytes, tile.writes))
        folded = self._fitted.effects.passes * (written - self._fresh_bytes(index))
        return self._memory_s(folded)


def costs_on(program: Program, cluster: Cluster) -> TaskCosts:
    """Return the costs of a plan's tasks on a cluster: by its calibration, or by its datasheet."""
    if cluster.fitted is None:
        return TaskCosts(program, cluster)
    return MeasuredTaskCosts(program, cluster, cluster.fitted)
