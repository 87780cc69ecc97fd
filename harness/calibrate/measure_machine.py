"""Measure this machine for a calibration: kernels by size, gloo messages by size, host overhead.

Two ranks of one thread each measure at once, as they will run, so that what they share (caches,
memory, clocks) is in the numbers. Each figure is the median of its repeats on the slower rank.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from harness.base.environment import cpu_model
from harness.base.workers import cores
from harness.execute import kernels
from harness.fit.this_machine import Figures, KernelShape
from harness.measure.cell import RankSample, rank_job
from harness.plan.masks import Mask, MaskKind
from harness.plan.problem import Direction, Dtype
from harness.ranks.team import Member, Team
from harness.records.config import Config, Where
from strategies import BASE

K = TypeVar("K")
MEASURED_HEAD_DIMS = (64, 128)
MEASURED_HEADS = (2, 8)
TOKENS = (64, 128, 256, 512, 1024, 2048)
_RATIOS = ((256, 1024), (1024, 256), (512, 2048), (2048, 512))
_MOST_FLOPS = 2.2e9
"""Forward flops of the largest call: tens of milliseconds on one core."""
_REPEATS = 7
_MESSAGES = tuple(2**power for power in range(12, 24))
_MESSAGE_REPEATS = 15
_COPIES = (2**18, 2**22, 2**26)
_EDGE = 768
_TINY = 128
_TIMEOUT_S = 80.0


def shapes() -> Iterator[KernelShape]:
    """The kernel calls that are measured."""
    for head_dim in MEASURED_HEAD_DIMS:
        for heads in MEASURED_HEADS:
            for rows, columns in (*((n, n) for n in TOKENS), *_RATIOS):
                if 4 * rows * columns * heads * head_dim <= _MOST_FLOPS:
                    yield KernelShape(rows, columns, heads, head_dim, causal=False)
                    if rows == columns:
                        yield KernelShape(rows, columns, heads, head_dim, causal=True)


def measure_machine(log: Callable[[str], None]) -> Figures:
    """Measure with two ranks of one thread each; takes about a minute."""
    with Team(2) as team:
        log("measuring kernels")
        forward, backward, by_delta = (
            _slower(team.run(_kernel_times, _TIMEOUT_S, kind))
            for kind in ("forward", "backward", "delta")
        )
        log("measuring memory")
        merge = _slower(team.run(_merge_times, _TIMEOUT_S))
        copy = _slower(team.run(_copy_times, _TIMEOUT_S))
        product = _slower(team.run(_product_times, _TIMEOUT_S))
        precision = _slower(team.run(_precision_times, _TIMEOUT_S))
        log("measuring messages")
        one_way, both_ways, exchange = (
            _slower(team.run(_message_times, _TIMEOUT_S, way))
            for way in ("one way", "both ways", "exchange")
        )
        log("measuring interpreter")
        empty = {(d.value, 2): _empty_s(team, d) for d in Direction}
    with Team(1) as team:
        empty |= {(d.value, 1): _empty_s(team, d) for d in Direction}
    return Figures(
        cpu=cpu_model(),
        cores=cores(),
        memory_bytes=psutil.virtual_memory().total,
        forward=forward,
        backward=backward,
        backward_delta=by_delta,
        merge=merge,
        copy=copy,
        linear_flops_per_s=max(2 * n**3 / seconds for n, seconds in product.items()),
        precision=precision,
        one_way=one_way,
        both_ways=both_ways,
        exchange=exchange,
        empty=empty,
    )


def _slower(ranks: Sequence[dict[K, float]]) -> dict[K, float]:
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def _median(samples: Mapping[K, list[float]]) -> dict[K, float]:
    return {key: statistics.median(values) for key, values in samples.items()}


def _timed(work: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, float]:
    """Median seconds of some works that all ranks begin together.

    Rounds over all of them, so that what else the machine does for a while hits few samples each.
    """
    samples: dict[K, list[float]] = {key: [] for key in work}
    for repeat in range(repeats + 1):
        for key, one in work.items():
            dist.barrier()
            begin = time.perf_counter()
            one()
            if repeat:  # the first warms up
                samples[key].append(time.perf_counter() - begin)
    return _median(samples)


def _kernel_times(member: Member, kind: str) -> dict[KernelShape, float]:
    """Time every kernel call (a job for a `Team`)."""
    del member
    return _timed({shape: _call(shape, kind) for shape in shapes()}, _REPEATS)


def _call(
    shape: KernelShape, kind: str, dtype: torch.dtype = torch.float32
) -> Callable[[], object]:
    queries = (1, shape.heads, shape.rows, shape.head_dim)
    keys = (1, shape.heads, shape.columns, shape.head_dim)
    q, dout, k, v = (torch.randn(size, dtype=dtype) for size in (queries, queries, keys, keys))
    mask = Mask(
        kind=MaskKind.CAUSAL if shape.causal else MaskKind.FULL,
        q=range(shape.rows),
        k=range(shape.columns),
    )
    scale = shape.head_dim**-0.5
    if kind == "forward":
        return partial(kernels.attend_call, q, k, v, mask, scale)
    out, lse = kernels.attend_call(q, k, v, mask, scale)
    if kind == "backward":
        return partial(kernels.attend_backward, dout, q, k, v, out, lse, mask, scale)
    delta = kernels.delta(out, dout)
    return partial(kernels.attend_backward_delta, dout, q, k, v, delta, lse, mask, scale)


def _merge_times(member: Member) -> dict[int, float]:
    """Time merges of partial outputs, by their bytes (a job for a `Team`)."""
    del member
    work: dict[int, Callable[[], object]] = {}
    for tokens in TOKENS:
        out_acc, out = (
            torch.randn(1, MEASURED_HEADS[1], tokens, MEASURED_HEAD_DIMS[0]) for _ in range(2)
        )
        lse_acc, lse = (torch.randn(1, MEASURED_HEADS[1], tokens) for _ in range(2))
        size = (out.numel() + lse.numel()) * out.element_size()
        work[size] = partial(kernels.merge_, out_acc, lse_acc, out, lse)
    return _timed(work, _MESSAGE_REPEATS)


def _copy_times(member: Member) -> dict[int, float]:
    """Time copies, by their bytes (a job for a `Team`)."""
    del member
    work = {size: partial(torch.zeros(size // 4).copy_, torch.ones(size // 4)) for size in _COPIES}
    return _timed(work, _MESSAGE_REPEATS)


def _product_times(member: Member) -> dict[int, float]:
    """Time a square matrix product, by its edge (a job for a `Team`)."""
    del member
    a, b = (torch.randn(_EDGE, _EDGE) for _ in range(2))
    return _timed({_EDGE: partial(torch.mm, a, b)}, _REPEATS)


def _precision_times(member: Member) -> dict[Dtype, float]:
    """Time one kernel call in every precision that has a peak (a job for a `Team`)."""
    del member
    shape = KernelShape(1024, 1024, heads=2, head_dim=64, causal=False)
    timed = (Dtype.FLOAT64, Dtype.FLOAT32, Dtype.BFLOAT16)
    return _timed(
        {each: _call(shape, "forward", getattr(torch, each.value)) for each in timed}, _REPEATS
    )


def _message_times(member: Member, way: str) -> dict[int, float]:
    """Time gloo messages between two ranks, by the bytes received (a job for a `Team`)."""
    other = 1 - member.rank
    send = {"one way": _one, "both ways": _both, "exchange": _exchange}[way]
    work = {}
    for size in _MESSAGES:
        # Half of what is exchanged stays at home.
        elements = (2 if way == "exchange" else 1) * size // 4
        work[size] = partial(send, torch.zeros(elements), torch.zeros(elements), other)
    return _timed(work, _MESSAGE_REPEATS)


def _both(there: torch.Tensor, here: torch.Tensor, other: int) -> None:
    for request in (dist.isend(there, other), dist.irecv(here, other)):
        assert request is not None  # this rank is a member of the group
        request.wait()


def _one(there: torch.Tensor, here: torch.Tensor, other: int) -> None:
    if other:
        dist.send(there, other)
    else:
        dist.recv(here, other)


def _exchange(there: torch.Tensor, here: torch.Tensor, other: int) -> None:
    del other
    dist.all_to_all_single(here, there)


def empty_cell(cp: int, direction: Direction) -> Config:
    """A cell with almost nothing to compute or send: what it takes is overhead."""
    return Config(
        strategy=BASE,
        pattern="full",
        cp=cp,
        seqlen_q=_TINY,
        seqlen_kv=_TINY,
        heads_q=MEASURED_HEADS[0],
        heads_kv=MEASURED_HEADS[0],
        head_dim=MEASURED_HEAD_DIMS[0],
        dtype=Dtype.FLOAT32,
        direction=direction,
        transport=Where.GLOO,
    )


def _empty_s(team: Team, direction: Direction) -> float:
    ranks = team.run(rank_job, _TIMEOUT_S, empty_cell(team.cp, direction), 10, 60)
    refused = [rank.reason for rank in ranks if not isinstance(rank, RankSample)]
    if refused:
        raise RuntimeError(f"calibrate: the smallest cell was refused: {refused[0]}")
    samples = [rank.samples_s for rank in ranks if isinstance(rank, RankSample)]
    return float(statistics.median([max(times) for times in zip(*samples, strict=True)]))
