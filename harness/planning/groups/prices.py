"""What a document costs the ranks that share it, by formula: kernels of its parts, keys received.

It prices what a plan of the group would run, without the plan: in a ring each rank attends its own
head and tail, then the head or tail of every other rank. That takes microseconds; the clock of a
planner's context takes a plan.
"""

from dataclasses import dataclass

from harness.cluster.machine import Cluster
from harness.plan.problem import Direction, Problem
from harness.plan.sizes import problem_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrices:
    """Seconds of both directions together, on one cluster, for one problem's heads and widths.

    Attributes:
        machine: The cluster.
        problem: The problem.
        pair_s: Of an unmasked pair of one query and one key with all heads, at full speed.
        inside_s: Of receiving a key token of all heads inside a node, its gradients included.
        between_s: The same from another node.
    """

    machine: Cluster
    problem: Problem
    pair_s: float
    inside_s: float
    between_s: float

    def work_s(self, tokens: int, area: int, size: int) -> float:
        """Seconds of a document's kernels on one of the ranks that share it.

        Args:
            tokens: Of the document.
            area: Its unmasked pairs.
            size: Ranks of the group.
        """
        if not area:
            return 0.0
        causal = 2 * area == tokens * (tokens + 1)
        if size == 1 or not causal:
            return size * self._call_s(tokens // size, tokens // size, area / tokens**2)
        part = tokens // (2 * size)
        own = 2 * self._call_s(part, part, 0.5) + self._call_s(part, part, 1.0)
        half = self._call_s(2 * part, part, 1.0) + self._call_s(part, 2 * part, 1.0)
        return own + (size - 1) * half / 2

    def _call_s(self, rows: int, columns: int, density: float) -> float:
        """Seconds of a kernel call in both directions; a triangle has half of the pairs."""
        fitted, heads = self.machine.fitted, self.problem.heads_q * self.problem.batch
        if fitted is None or not fitted.on_gpus:
            return rows * columns * density * self.pair_s + 2 * self.machine.gpu.kernel_start_s
        return sum(
            fitted.kernels.seconds(
                way,
                rows,
                columns,
                heads,
                density=density,
                head_dim=self.problem.head_dim,
            )
            for way in Direction
        )


def group_prices(machine: Cluster, problem: Problem) -> GroupPrices:
    """Price a problem on a cluster: kernels by its calibration, else by its datasheet."""
    pairs = max(problem.pattern.total_area, 1)
    attention_s = sum(
        problem_flops(problem, way) / machine.gpu.attention_flops_per_s(problem.dtype, way)
        for way in Direction
    )
    sent = problem.dtype.bytes if problem.round_sent else problem.dtype.accumulator_bytes
    # Keys and values come once in each direction, their gradients go home once.
    width = problem.heads_kv * (problem.head_dim + problem.head_dim_v) * problem.batch
    token = width * (2 * problem.dtype.bytes + sent)
    return GroupPrices(
        machine=machine,
        problem=problem,
        pair_s=attention_s / pairs,
        inside_s=token / machine.nvlink.bandwidth_bytes_per_s,
        between_s=token / machine.nic.bandwidth_bytes_per_s,
    )
