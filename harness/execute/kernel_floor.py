"""The kernel calls of one rank and nothing else: what no executor of a plan can go below."""

from collections.abc import Callable, Iterator

import torch

from harness.execute import kernels
from harness.plan.kernel_calls import Call, lower
from harness.plan.problem import Direction
from harness.plan.residency import Program
from harness.plan.slices import Cut, head_runs
from harness.plan.tasks import Tile


def kernel_calls(program: Program, rank: int) -> Callable[[], None]:
    """Make a function that does a rank's kernel calls, each on contiguous heads-first tensors.

    Args:
        program: A proved plan.
        rank: Whose tiles.

    Returns:
        A function without results; the tensors that it reads are made here.
    """
    given: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
    calls = [
        _call(program, tile.direction, call, heads, given)
        for tile in program.plan.tasks
        if isinstance(tile, Tile) and tile.place.rank == rank
        for call, heads in _calls(program, tile)
    ]

    def run() -> None:
        for call in calls:
            call()

    return run


def _calls(program: Program, tile: Tile) -> Iterator[tuple[Call, Cut]]:
    plan = program.plan
    q, kv = (plan.chunks(piece) for piece in tile.reads[:2])
    for call in lower(plan.problem.pattern, q, kv):
        for heads in head_runs(tile.heads, plan.problem.group):
            yield call, heads


def _call(
    program: Program,
    direction: Direction,
    call: Call,
    heads: Cut,
    given: dict[tuple[int, ...], tuple[torch.Tensor, ...]],
) -> Callable[[], object]:
    problem, mask = program.plan.problem, call.mask
    scale = problem.softmax_scale
    shape = tuple(end - first for first, end in (*heads, call.rows, call.cols))
    if shape not in given:
        q_heads, kv_heads, rows, cols = shape
        sizes = (
            (q_heads, rows, problem.head_dim),
            (kv_heads, cols, problem.head_dim),
            (kv_heads, cols, problem.head_dim_v),
            (q_heads, rows, problem.head_dim_v),
        )
        draw = torch.Generator().manual_seed(0)
        given[shape] = tuple(
            torch.randn(problem.batch, *size, generator=draw).to(
                getattr(torch, problem.dtype.value)
            )
            for size in sizes
        )
    q, k, v, dout = given[shape]
    if direction is Direction.FORWARD:
        return lambda: kernels.attend_call(q, k, v, mask, scale)
    out, lse = kernels.attend_call(q, k, v, mask, scale)
    out = out.contiguous()
    return lambda: kernels.attend_backward(dout, q, k, v, out, lse, mask, scale)
