"""Seconds of every task of a plan on a cluster: the one cost function.

A compute task takes the larger of its flops at the stated efficiency and its bytes at the memory's
bandwidth, plus a fixed start per kernel call. A leg takes a latency and its bytes at the link's
bandwidth. Left out: the waves of thread blocks (small kernels are too fast here), protocol
switches by message size, contention beyond one leg at a time per port and direction, slow-down of
kernels while transfers run, and copies that only rearrange what arrived.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from harness.cluster.effects import crowded_s
from harness.cluster.kernel_model import Kernels
from harness.cluster.machine import Cluster, LinkClass
from harness.plan.problem import Direction
from harness.plan.residency import Program
from harness.plan.sizes import leg_bytes, piece_bytes, tile_flops, width
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
from harness.simulate.tile_calls import calls_on

_FITTED_BYTES = 2  # of an element: kernels were measured in bfloat16

Runs = tuple[tuple[int, ...], ...]
"""Chunks of a piece, grouped into runs whose positions continue one another."""


class Costs:
    """What the tasks of one plan cost on one cluster.

    Args:
        program: A verified, resolved plan.
        cluster: Where it runs.
    """

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self.program = program
        self.plan = program.plan
        self.cluster = cluster
        self._bytes: dict[Piece, int] = {}
        self._fitted: dict[tuple[tuple[int, ...], tuple[int, ...], int, bool], float] = {}
        self._calls: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self._calls_of = calls_on(cluster.fitted)
        self._links = {kind: cluster.link(kind) for kind in LinkClass}

    def compute_s(self, index: int) -> float:
        """Seconds of a task that computes; 0 for one that only moves or frees."""
        task, gpu = self.plan.tasks[index], self.cluster.gpu
        match task:
            case Tile():
                return self._tile_s(index, task)
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
                return gpu.kernel_start_s + self.linear_flops(task) / speed
            case Transfer() | Collective() | Free():
                return 0.0

    def leg_s(self, leg: Leg) -> float:
        """Seconds of a leg while the others of its plan move too."""
        kind = self.cluster.link_class(leg.src, leg.dst)
        if self.cluster.fitted is not None and kind in (LinkClass.NVLINK, LinkClass.NIC):
            links, effects = self.cluster.fitted.links, self.cluster.fitted.effects
            if kind is LinkClass.NVLINK:
                return crowded_s(links.near, effects.near, self.leg_bytes(leg))
            return crowded_s(links.far, effects.far, self.leg_bytes(leg))
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

    def linear_flops(self, task: Linear) -> int:
        """Floating-point operations of a projection: 2 per token, head, width and hidden unit."""
        problem = self.plan.problem
        # Every product has one factor with both positions and heads.
        whole = next(
            piece
            for piece in (*task.writes, *task.reads)
            if not piece.tensor.is_headless and not piece.tensor.is_weight
        )
        rows = problem.batch * self.plan.tokens(whole) * whole.heads.bit_count()
        return 2 * rows * width(self.plan, whole.tensor) * problem.width

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
        """Kernel calls of a tile.

        As `lower` does, runs of tokens that continue one another are one operand, full rectangles
        that touch are one call, and so are triangles with the rectangle between them. Unlike the
        CPU's, a GPU kernel takes any mask between two runs (a window, packed documents, a block
        table) in one call, and a triangle that does not start at a corner too.
        """
        key = (tile.q, tile.kv)
        if key not in self._calls:
            self._calls[key] = self._count_calls(tile)
        return self._calls[key]

    def _count_calls(self, tile: Tile) -> int:
        rows = sum(len(self.plan.q_chunks[c]) for c in tile.q)
        cols = sum(len(self.plan.kv_chunks[c]) for c in tile.kv)
        if tile.area == rows * cols:
            return 1
        columns = _runs(self.plan.kv_chunks, tile.kv)
        calls, above = 0, set[tuple[int, int]]()
        stair: tuple[int, int] | None = None  # columns of a masked call that ends in the row above
        for q in _runs(self.plan.q_chunks, tile.q):
            masked, full = self._row(q, columns)
            last: tuple[int, int] | None = None
            for column in masked:
                step = stair and _between(full, stair, column)
                if stair and step:
                    full.remove(step)
                    full += [(step[0], stair[0])] if step[0] < stair[0] else []
                    last = (stair[0], column)
                else:
                    calls += 1
                    last = (column, column)
            calls += sum(span not in above for span in full)
            above, stair = set(full), last
        return calls

    def _row(self, q: tuple[int, ...], columns: Runs) -> tuple[list[int], list[tuple[int, int]]]:
        """Columns that a run of queries sees in part, and spans of those that it sees whole."""
        masked: list[int] = []
        full: list[tuple[int, int]] = []
        for column, kv in enumerate(columns):
            area = sum(self._areas[i][j] for i in q for j in kv)
            size = sum(len(self.plan.q_chunks[i]) for i in q)
            size *= sum(len(self.plan.kv_chunks[j]) for j in kv)
            if area and area < size:
                masked.append(column)
            elif area and full and full[-1][1] == column:
                full[-1] = (full[-1][0], column + 1)
            elif area:
                full.append((column, column + 1))
        return masked, full

    @cached_property
    def _areas(self) -> list[list[int]]:
        plan = self.plan
        areas: list[list[int]] = plan.problem.pattern.areas(plan.q_chunks, plan.kv_chunks).tolist()
        return areas

    def _tile_s(self, index: int, tile: Tile) -> float:
        written = sum(map(self.bytes, tile.writes))
        fitted = self.cluster.fitted
        if fitted is not None and self.plan.problem.dtype.bytes == _FITTED_BYTES:
            folded = fitted.effects.passes * (written - self._fresh_bytes(index))
            return self._fitted_s(tile, fitted.kernels) + self._memory_s(folded)
        moved = written + sum(map(self.bytes, tile.reads))
        seconds = self.attention_s(tile_flops(self.plan, tile), tile.direction)
        kernels = max(seconds, self._memory_s(moved))
        # What is not new is folded in: read the part, read and write the accumulator.
        share = 1 - self._fresh_bytes(index) / written if written else 0.0
        folded = share * self._folded_bytes(tile.writes)
        starts = self.kernel_calls(tile) * self.cluster.gpu.kernel_start_s
        return starts + kernels + self._memory_s(folded)

    def _fitted_s(self, tile: Tile, kernels: Kernels) -> float:
        """Seconds of a tile's kernel calls by the kernel model."""
        problem = self.plan.problem
        delta = any(piece.tensor is Tensor.DELTA for piece in tile.reads)
        key = (tile.q, tile.kv, tile.heads, delta)
        if key not in self._fitted:
            self._fitted[key] = sum(
                kernels.seconds(
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
        return self._fitted[key]

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


def _runs(table: tuple[range, ...], chunks: tuple[int, ...]) -> Runs:
    solid = [chunk for chunk in chunks if table[chunk]]
    cuts = [
        at
        for at, (a, b) in enumerate(pairwise(solid), start=1)
        if table[a].step != table[b].step or table[a][-1] + table[a].step != table[b].start
    ]
    edges = [0, *cuts, len(solid)]
    return tuple(tuple(solid[a:b]) for a, b in pairwise(edges))


def _between(
    full: list[tuple[int, int]], stair: tuple[int, int], column: int
) -> tuple[int, int] | None:
    """The rectangle below a stair that ends where the stair's next step, a column, begins."""
    if column != stair[1] + 1:
        return None
    return next((span for span in full if span[0] <= stair[0] and span[1] == column), None)
