"""Seconds of one attention kernel on one GPU, from the waves of its thread blocks.

A forward kernel has one thread block per 128 queries and head, and each visits all keys. A
streaming multiprocessor (SM) holds two blocks at a time; a block that has an SM to itself runs
faster than one of two, but less than twice as fast. If there are too few blocks to fill the GPU,
FlashAttention cuts the keys into splits and adds a small kernel that combines them. A backward
kernel has one block per 128 keys and head, each visits all queries, and an SM holds one.

    16K queries, 1 head: 128 blocks on 132 SMs          full: every block 16K keys, one wave
    ├─ block 0 ─┤├─ block 1 ─┤ ... ├─ block 127 ─┤      causal: the last block still 16K: no gain
    32K keys, 1 head, backward: 256 blocks, two waves   causal: long blocks first, so half the time

So one head at 16K tokens backward takes time linear in the tokens, 32 heads at 64K quadratic, and a
causal mask halves the time only where there are many blocks. Left out: caches, clocks that sink
under load, and head dims other than the fitted 128, which scale with the flops.

Source: FlashAttention-2 (arXiv:2307.08691, section 3.2, parallelism over rows and columns) and
Flash-Decoding for the splits; block sizes and the rule for splits as in flash-attn 2.5.7.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heapreplace
from itertools import islice

from harness.plan.problem import Direction

_SPLIT_ROWS = 64  # Source: flash-attn 2.5.7, queries of a block where keys are split
_STEP = 64  # Source: flash-attn 2.5.7, keys of an inner step; queries of one, backward
_SPLIT_STEP = 128  # Source: flash-attn 2.5.7, keys of an inner step where keys are split
_ENOUGH, _NEAR_BEST, _MOST_SPLITS = 0.8, 0.85, 128  # Source: flash-attn 2.5.7, rule for splits
_SPARE_SMS = 8  # a transfer beside a kernel needs about as many
_EXACT_BLOCKS = 2112  # above this many blocks of unequal work their mean is close enough: 16 an SM


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardKernel:
    """Fitted parameters of one GPU model.

    Attributes:
        launch_s: Fixed time of a call.
        flops_per_s: Rate of a large full call.
        alone: Rate of a block that has its SM to itself, relative to two that share one; <= 1.
        block_s: Fixed time of a block on a full SM.
        split_efficiency: Rate of the smaller blocks of split keys, relative to whole ones.
        combine_s: Fixed time of the kernel that combines splits.
        causal: Time of an unmasked pair in a causal call, relative to one in a full call.
        diagonal_keys: Extra keys that a block on the diagonal costs, for the mask.
        splits: Whether this build splits keys at all.
        longest_first: Whether a causal call launches its longest blocks first.
    """

    launch_s: float
    flops_per_s: float
    alone: float
    block_s: float
    split_efficiency: float
    combine_s: float
    causal: float
    diagonal_keys: float
    splits: bool
    longest_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardKernel:
    """Fitted parameters of one GPU model.

    Attributes:
        launch_s: Fixed time of a call, its helpers for delta and dq included.
        flops_per_s: Rate of a large full call.
        block_s: Fixed time of a block.
        passes: How often the helpers move a (rows, heads, head dim) float32 tensor.
        delta_passes: How many of these are left out if delta = rowsum(dout * out) is given.
        causal: Time of an unmasked pair in a causal call, relative to one in a full call.
        diagonal_rows: Extra queries that a block on the diagonal costs, for the mask.
    """

    launch_s: float
    flops_per_s: float
    block_s: float
    passes: float
    delta_passes: float
    causal: float
    diagonal_rows: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The attention kernels of one GPU model.

    Attributes:
        sms: Streaming multiprocessors; or 1 processor core.
        block_rows: Queries of a thread block, backward its keys.
        memory_bandwidth_bytes_per_s: Of the device's memory.
        uneven: Time of a call whose lengths are not multiples of a block's, relative to one whose
            are: kernels that check bounds are compiled apart.
        forward: Parameters of the forward kernel.
        backward: And of the backward one.
        whole_keys: A causal call works on whole parts of so many keys, also where the diagonal
            crosses one.
        name: Which library's kernels these are.
    """

    sms: int
    block_rows: int
    memory_bandwidth_bytes_per_s: float
    uneven: float
    forward: ForwardKernel
    backward: BackwardKernel
    whole_keys: int = 1
    name: str = "flash-attn-2"

    def seconds(
        self,
        direction: Direction,
        rows: int,
        columns: int,
        heads: int,
        *,
        causal: bool = False,
        density: float = 1.0,
        head_dim: int = 128,
        held_sms: int = 0,
        delta_given: bool = False,
        ends_last: bool = False,
    ) -> float:
        """Time one call.

        Args:
            direction: Which kernel.
            rows: Queries.
            columns: Keys.
            heads: Query heads times batch.
            causal: Whether the mask is a triangle; if keys are more, up to the last row and column.
            density: Share of unmasked pairs of any other mask, spread evenly over rows.
            head_dim: Width of q, k and v.
            held_sms: SMs that something else holds throughout.
            delta_given: Backward, whether delta is an input rather than out.
            ends_last: If rows are more, whether a triangle ends in the last row and column, as
                flash-attn has it, so that rows above it meet no key; else it begins in the first
                ones, as in plans here, and rows below it meet every key.
        """
        if not rows or not columns or not heads or not density:
            return 0.0
        sms = max(1, self.sms - held_sms)
        shape = _Shape(rows, columns, heads, causal, density, head_dim, sms, delta_given, ends_last)
        time = _forward_s if direction is Direction.FORWARD else _backward_s
        even = rows % self.block_rows == 0 and columns % _STEP == 0
        return time(self, shape) * (1 if even else self.uneven)

    def wave_s(
        self, direction: Direction, rows: int, columns: int, heads: int, head_dim: int = 128
    ) -> float:
        """How long a thread block holds its place, if a call's blocks fill the GPU; else 0.

        What else wants SMs while the kernel runs gets them when a wave of blocks ends.
        """
        forward = direction is Direction.FORWARD
        across, along = (rows, columns) if forward else (columns, rows)
        blocks = -(-across // self.block_rows) * heads
        if forward:
            flops = 4 * head_dim * self.block_rows * along
            work = self.sms / self.forward.flops_per_s * flops + self.forward.block_s
            return 2 * work if blocks > 2 * (self.sms - _SPARE_SMS) else 0.0
        flops = 10 * head_dim * self.block_rows * along
        work = self.sms / self.backward.flops_per_s * flops + self.backward.block_s
        return work if blocks > self.sms - _SPARE_SMS else 0.0


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    columns: int
    heads: int
    causal: bool
    density: float
    head_dim: int
    sms: int  # free ones
    delta_given: bool
    ends_last: bool


@lru_cache(maxsize=65536)
def _forward_s(kernels: Kernels, shape: _Shape) -> float:
    fitted = kernels.forward
    splits = 1
    if fitted.splits:
        blocks = -(-shape.rows // _SPLIT_ROWS) * shape.heads
        splits = _splits(blocks, 2 * kernels.sms, -(-shape.columns // _SPLIT_STEP))
    height, step = (kernels.block_rows, _STEP) if splits == 1 else (_SPLIT_ROWS, _SPLIT_STEP)
    # Seconds that a block's height of queries and one key cost an SM that is full.
    rate = kernels.sms / fitted.flops_per_s * 4 * shape.head_dim * height
    extra = 0.0
    if splits > 1:
        rate /= fitted.split_efficiency
        # The combining kernel writes and reads the float32 partial outputs of all splits.
        moved = splits * shape.rows * shape.heads * shape.head_dim * 4 * 2
        extra = fitted.combine_s + moved / kernels.memory_bandwidth_bytes_per_s
    across = -(-shape.rows // height)
    if shape.causal:
        fixed = rate * fitted.diagonal_keys + fitted.block_s
        visits = _triangle(across, height, splits, shape, step, kernels.whole_keys)
        works = [rate * fitted.causal * keys + fixed for keys in visits]
        if fitted.longest_first:
            works.sort(reverse=True)
            time = _longest_first(works, shape.heads, shape.sms)
            return fitted.launch_s + time + extra
        time = _dispatch(works, shape.heads, shape.sms, fitted.alone)
        return fitted.launch_s + time + extra
    along = -(-math.ceil(shape.columns * shape.density / splits) // step) * step
    work = rate * along + fitted.block_s
    full, rest = divmod(across * shape.heads * splits, 2 * shape.sms)
    tail = 0.0 if not rest else work / fitted.alone if rest <= shape.sms else 2 * work
    return fitted.launch_s + full * 2 * work + tail + extra


@lru_cache(maxsize=65536)
def _backward_s(kernels: Kernels, shape: _Shape) -> float:
    fitted = kernels.backward
    height = kernels.block_rows
    rate = kernels.sms / fitted.flops_per_s * 10 * shape.head_dim * height
    across = -(-shape.columns // height)
    blocks = across * shape.heads
    if shape.causal:
        # The longest blocks come first, so the GPU stays full until the end, if it ever is.
        fixed = rate * fitted.diagonal_rows + fitted.block_s
        whole = kernels.whole_keys
        end = max(0 if shape.ends_last else shape.rows, across * height)
        lengths = [min(shape.rows, _whole(end - j * height, whole)) for j in range(across)]
        mean = rate * fitted.causal * sum(lengths) * shape.heads + blocks * fixed
        time = max(rate * fitted.causal * lengths[0] + fixed, mean / shape.sms)
    else:
        rows = -(-math.ceil(shape.rows * shape.density) // _STEP) * _STEP
        time = -(-blocks // shape.sms) * (rate * rows + fitted.block_s)
    passes = fitted.passes - (fitted.delta_passes if shape.delta_given else 0)
    moved = passes * shape.rows * shape.heads * shape.head_dim * 4
    return fitted.launch_s + time + moved / kernels.memory_bandwidth_bytes_per_s


@lru_cache(maxsize=65536)
def _splits(blocks: int, slots: int, steps: int) -> int:
    """Choose into how many parts to cut the keys; the smallest that fills the GPU nearly best.

    Source: flash-attn 2.5.7, csrc/flash_attn/flash_api.cpp, num_splits_heuristic.
    """
    if blocks >= _ENOUGH * slots:
        return 1
    fill = {
        n: blocks * n / slots / math.ceil(blocks * n / slots)
        for n in range(1, min(_MOST_SPLITS, slots, steps) + 1)
        if n == 1 or -(-steps // n) != -(-steps // (n - 1))
    }
    best = max(fill.values())
    return next(n for n, share in fill.items() if share >= _NEAR_BEST * best)


def _triangle(
    across: int, height: int, splits: int, shape: _Shape, step: int, whole: int
) -> list[int]:
    """Keys of the blocks of one head, in the order of launch: rows first, then splits."""
    steps = -(-shape.columns // step)
    part = -(-steps // splits) * step
    shift = shape.columns - shape.rows  # the diagonal ends in the lower right corner
    if not shape.ends_last:
        shift = max(0, shift)
    works = []
    for split in range(splits):
        first = split * part
        for block in range(across):
            last = min(shape.columns, _whole(shift + (block + 1) * height, whole))
            works.append(max(0, min(last, first + part) - first))
    return works


def _whole(keys: int, part: int) -> int:
    return -(-keys // part) * part


def _dispatch(works: list[float], heads: int, sms: int, alone: float) -> float:
    """Time blocks of unequal work, launched in order onto SMs that hold two each."""
    if sms == 1 and alone == 1:
        return sum(works) * heads
    if len(works) * heads > _EXACT_BLOCKS:
        # The last blocks are the longest, and the SMs end them evenly spread.
        return sum(works) * heads / sms + max(works) / 2
    return max(_ends(iter(works * heads), sms, alone))


def _longest_first(works: list[float], heads: int, sms: int) -> float:
    """Time blocks, one on an SM at a time, the longest of all heads first: the last ones are short.

    Source: FlashAttention 3, hopper/tile_scheduler.hpp, which deals causal tiles so.
    """
    if len(works) * heads > _EXACT_BLOCKS:
        return max(works[0], sum(works) * heads / sms)
    free = [0.0] * min(sms, len(works) * heads)
    for work in works:
        for _ in range(heads):
            heapreplace(free, free[0] + work)
    return max(free)


def _ends(queue: Iterator[float], sms: int, alone: float) -> Iterator[float]:
    """Play the dispatch; two blocks on an SM share it, one on its own gets `alone` of it.

    Yields:
        When each SM has no more to do.
    """

    def next_s(held: list[float]) -> float:
        return 2 * min(held) if len(held) > 1 else held[0] / alone

    resident = [[work] for work in islice(queue, sms)]
    for held, work in zip(resident, queue, strict=False):
        held.append(work)
    heap = sorted((next_s(held), sm) for sm, held in enumerate(resident))
    while heap:
        now, sm = heap[0]
        held = resident[sm]
        done = min(held)
        held.remove(done)
        held[:] = [work - done for work in held] + list(islice(queue, 1))
        if held:
            heapreplace(heap, (now + next_s(held), sm))
        else:
            heappop(heap)
            yield now
