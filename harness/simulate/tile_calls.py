"""Kernel calls of a tile, by the kind of kernels that a cluster has.

All kinds follow the one lowering (`plan.kernel_calls.lower`), which the interpreter runs.
"""

from collections.abc import Callable
from typing import NamedTuple

from harness.cluster.calibration import Calibration
from harness.plan.kernel_calls import Call as LoweredCall
from harness.plan.kernel_calls import joined, lower, runs_of
from harness.plan.masks import Mask, MaskKind
from harness.plan.plan import Plan
from harness.plan.row_blocks import masked_cells
from harness.plan.tasks import Tile


class TimedCall(NamedTuple):
    """One kernel call: rows x columns tokens, with a triangular or an evenly spread mask."""

    rows: int
    columns: int
    heads: int
    causal: bool
    density: float


Calls = Callable[[Plan, Tile], tuple[TimedCall, ...]]
"""From a tile to its kernel calls."""


def gpu_calls(plan: Plan, tile: Tile) -> tuple[TimedCall, ...]:
    """List a tile's kernel calls as a GPU takes them.

    A window or any other mask that is no triangle is one call with its mean density.
    """
    rows, columns = plan.tokens(tile.reads[0]), plan.tokens(tile.reads[1])
    heads = tile.heads.bit_count()
    if tile.area == rows * columns:
        return (TimedCall(rows, columns, heads, False, 1.0),)
    q = tuple(plan.q_chunks[c] for c in tile.q)
    kv = tuple(plan.kv_chunks[c] for c in tile.kv)
    pattern = plan.problem.pattern
    calls = []
    for call in lower(pattern, q, kv):
        if call.mask.kind in (MaskKind.BAND, MaskKind.PACKED):
            return (TimedCall(rows, columns, heads, False, tile.area / (rows * columns)),)
        shape = call.rows[1] - call.rows[0], call.cols[1] - call.cols[0]
        calls.append(TimedCall(*shape, heads, call.mask.kind is MaskKind.CAUSAL, 1.0))
    return tuple(calls)


def calls_on(fitted: Calibration | None) -> Calls:
    """How tiles become kernel calls on a cluster: as the harness's own kernels take them, or GPUs'.

    A cluster of processors runs the harness's interpreter, which cuts masks that no kernel has.
    """
    return gpu_calls if fitted is None or fitted.on_gpus else interpreter_calls


def interpreter_calls(plan: Plan, tile: Tile) -> tuple[TimedCall, ...]:
    """List a tile's kernel calls as the harness's interpreter makes them on a CPU.

    A pair in a call with a mask tensor takes as long as in one without, also if it is hidden.
    """
    q = tuple(plan.q_chunks[c] for c in tile.q)
    kv = tuple(plan.kv_chunks[c] for c in tile.kv)
    heads = tile.heads.bit_count()
    return tuple(
        TimedCall(
            call.rows[1] - call.rows[0],
            call.cols[1] - call.cols[0],
            heads,
            call.mask.kind is MaskKind.CAUSAL,
            min(1.0, masked_cells(call.mask) / (len(call.mask.q) * len(call.mask.k))),
        )
        for call in lower(plan.problem.pattern, q, kv)
    )


def count_with_any_mask(plan: Plan, tile: Tile) -> int:
    """Count a tile's calls of a kernel that takes any mask between two runs of tokens.

    Full rectangles join as in the lowering, and so do a run's masks with what lies between them.
    """
    if tile.area == plan.tokens(tile.reads[0]) * plan.tokens(tile.reads[1]):
        return 1
    q, kv = ([run for _, run in runs_of(plan.chunks(piece))] for piece in tile.reads[:2])
    if len(q) == len(kv) == 1:
        return 1
    areas = plan.problem.pattern.areas(q, kv).tolist()
    return len(
        joined(
            [
                _cell(i, j, full=area == len(q[i]) * len(kv[j]))
                for i, row in enumerate(areas)
                for j, area in enumerate(row)
                if area
            ]
        )
    )


def _cell(row: int, column: int, *, full: bool) -> LoweredCall:
    """The call of one run of queries and one run of keys, on a grid of runs."""
    one = range(1)
    kind = MaskKind.FULL if full else MaskKind.CAUSAL
    return LoweredCall((row, row + 1), (column, column + 1), Mask(kind=kind, q=one, k=one))
