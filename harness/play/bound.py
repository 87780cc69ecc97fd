"""Launches bound to memory: for each a function without arguments that does it, made once."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import torch

from harness.execute import kernels, projections
from harness.execute.rotary import Turns, TurnsOf
from harness.execute.task_arguments import score_change, turns_of_task
from harness.plan.kernel_calls import lower
from harness.plan.plan import Plan
from harness.plan.slices import head_runs
from harness.plan.tasks import Linear, Memory, Tile
from harness.program.operations import COPY_LANES, ByteView, Kernel, KernelLaunch

Arenas = Mapping[Memory, torch.Tensor]
"""The bytes of each memory, one-dimensional uint8."""

DoLaunch = Callable[[], None]


def tensor_at(arenas: Arenas, view: ByteView) -> torch.Tensor:
    """The tensor that a view is, in an arena."""
    dtype = getattr(torch, view.dtype.value)
    arena = arenas[view.memory]
    whole = arena[: arena.numel() // view.dtype.bytes * view.dtype.bytes].view(dtype)
    return whole.as_strided(view.shape, view.strides, view.offset // view.dtype.bytes)


def bind_launch(
    plan: Plan, launch: KernelLaunch, arenas: Arenas, turns_of: TurnsOf | None = None
) -> DoLaunch:
    """Make the function that does a launch.

    Args:
        plan: The plan of the program.
        launch: The launch.
        arenas: Memory of its rank.
        turns_of: As in `execute`.
    """
    reads = [tensor_at(arenas, view) for view in launch.reads]
    writes = [tensor_at(arenas, view) for view in launch.writes]
    match launch.kernel:
        case Kernel.COPY:
            apart = launch.lane in COPY_LANES
            pairs = dense_pairs(reads[0], writes[0]) if apart else [(reads[0], writes[0])]
            return partial(_copy, pairs)
        case Kernel.ZERO:
            return partial(_fill, writes[0], 0.0)
        case Kernel.NO_KEYS:
            return partial(_fill, writes[0], -torch.inf)
        case Kernel.MERGE:
            return partial(kernels.merge_, *reads)
        case Kernel.ADD:
            total, part = reads
            return partial(kernels.add, total, part, writes[0])
        case Kernel.DELTA:
            return partial(_into, writes, partial(_one, kernels.delta, *reads))
        case Kernel.ATTEND | Kernel.ATTEND_BACKWARD | Kernel.ATTEND_BACKWARD_DELTA:
            return partial(_into, writes, _attending(plan, launch, reads))
        case _:
            return _product(plan, launch, reads, writes, turns_of)


def _attending(
    plan: Plan, launch: KernelLaunch, reads: list[torch.Tensor]
) -> Callable[[], tuple[torch.Tensor, ...]]:
    assert launch.task is not None  # it is attention
    assert launch.call is not None
    tile = plan.tasks[launch.task]
    assert isinstance(tile, Tile)
    number, at = launch.call
    q, kv = (plan.chunks(piece) for piece in tile.reads[:2])
    call = lower(plan.problem.pattern, q, kv)[number]
    heads, _ = head_runs(tile.heads, plan.problem.group)[at]
    change = score_change(plan, tile, call, heads, reads[0].device)
    match launch.kernel:
        case Kernel.ATTEND:
            work: Callable[..., tuple[torch.Tensor, ...]] = kernels.attend_call
        case Kernel.ATTEND_BACKWARD:
            work = kernels.attend_backward
        case _:
            work = kernels.attend_backward_delta
    return partial(work, *reads, call.mask, plan.problem.softmax_scale, *change)


def _product(
    plan: Plan,
    launch: KernelLaunch,
    reads: list[torch.Tensor],
    writes: list[torch.Tensor],
    turns_of: TurnsOf | None,
) -> DoLaunch:
    assert launch.task is not None  # it is a product
    task = plan.tasks[launch.task]
    assert isinstance(task, Linear)
    turns: Turns | None = None
    if task.rotary:
        turns = turns_of_task(plan, task, reads[0].device, turns_of)
    match launch.kernel:
        case Kernel.PROJECT:
            work: Callable[..., torch.Tensor] = projections.project_tensors
        case Kernel.TO_MODEL | Kernel.TO_MODEL_ADD:
            work = projections.to_model
        case _:
            work = projections.weight_gradient
    if len(reads) > 2:
        return partial(_run, work, reads[0], reads[1], turns, writes[0])
    return partial(_into, writes, partial(_one, work, reads[0], reads[1], turns))


def dense_pairs(
    source: torch.Tensor, target: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut a copy between memories into copies of bytes side by side, which block no host.

    torch copies anything else through tensors that it makes, and waits for them.
    """
    if source.is_contiguous() and target.is_contiguous():
        return [(source, target)]
    return [(source[at], target[at]) for at in product(*map(range, source.shape[:2]))]


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)


def _fill(target: torch.Tensor, value: float) -> None:
    target.fill_(value)


def _run(work: Callable[..., object], *args: object) -> None:
    work(*args)


def _one(work: Callable[..., torch.Tensor], *args: object) -> tuple[torch.Tensor, ...]:
    return (work(*args),)


def _into(writes: list[torch.Tensor], work: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    """Put results where they belong: the kernels that there are make tensors of their own."""
    for target, made in zip(writes, work(), strict=True):
        target.copy_(made)
