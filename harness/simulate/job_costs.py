"""The full clock's prices: seconds of every job of a plan on a calibrated cluster.

docs/adr/0007-two-clocks.md says why there is a quick clock too, whose prices are in `task_costs`.
`scripts/validate_predictor.py` compares these prices with measured runs. Conventions say what a
runtime moves and merges, so that published measurements are predicted as they were made: the
UltraAttn harness sends partial results in the inputs' precision, no lse and no delta, and merges
nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from harness.cluster.calibration import LINEAR_EFFICIENCY, Calibration
from harness.cluster.effects import ALL, FEW_NODES, Effect
from harness.cluster.kernel_model import Kernels
from harness.cluster.link_model import Crowd, Curve, crowded_s
from harness.cluster.machine import Runtime
from harness.plan.problem import Direction, Dtype
from harness.simulate.contention import HELD, Job, run_jobs
from harness.simulate.jobs import LaunchCounts, Need, NeedKind, Size, Skeleton
from harness.simulate.tile_calls import TimedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Conventions of a runtime: what it moves, merges and launches.

    Attributes:
        plain_bytes: Per element of inputs and finished results.
        result_bytes: Per element of partial results, on the way and in memory.
        row_bytes: Per element of lse and delta on the way; 0 if they do not travel.
        merges: Whether partial results are merged at all.
        eager: Whether the host launches one operation after another.
        delta_given: Whether backward kernels get delta rather than out.
        kernels_first: Whether a kernel is launched before a transfer that could start as well.
        apart: Whether each tensor is a message of its own, one after another.
        own_stream: Whether transfers of an eager runtime have a stream of their own, so that they
            wait for no kernel but for SMs.
        ends_last: Whether a causal call's diagonal ends in its last row and column, as flash-attn's
            does, and not where the plan has it; they differ where queries are more than keys.
    """

    plain_bytes: int = 2
    result_bytes: int = 4
    row_bytes: int = 4
    merges: bool = True
    eager: bool = False
    delta_given: bool = False
    kernels_first: bool = False
    apart: bool = False
    own_stream: bool = False
    ends_last: bool = False

    @property
    def runtime(self) -> Runtime:
        """The runtime that has these conventions."""
        if not self.eager:
            return Runtime.GRAPH
        return Runtime.TE if self.own_stream else Runtime.EAGER

    @property
    def waits(self) -> bool:
        """Whether a transfer between nodes waits for the kernel that was launched before it."""
        return self.eager and not self.own_stream


HARNESS = Convention()
"""This harness in a captured graph."""

TORCH = Convention(eager=True, row_bytes=0, kernels_first=True, apart=True)
"""ring-flash-attention in eager torch: dk and dv travel in float32, merging is not fused."""

# How often the operations of a merge move a float32 accumulator, counted in ring-flash-attention as
# the UltraAttn harness runs it: two products of a factor and an output, one of the two in bfloat16,
# and their sum; to slices also a copy back; gradients are added, one of the two in bfloat16.
# Source: UltraAttn repository, ring_flash_attn/utils.py and *_flash_attn.py
_MERGED, _SLICED, _ADDED = 6.5, 8.5, 2.5

ULTRA = Convention(result_bytes=2, row_bytes=0, merges=False, delta_given=True)
"""The UltraAttn harness: a queue launched ahead, nothing merged (its `reduce` is empty)."""


TE = replace(TORCH, kernels_first=False, apart=False, own_stream=True)
"""Transformer Engine: as eager torch, but keys and values are one message, on their own stream.
Source: TransformerEngine, pytorch/attention/dot_product_attention/context_parallel.py."""


def convention(
    dtype: Dtype, *, eager: bool, rounded: bool = False, own_stream: bool = False
) -> Convention:
    """Convention of this harness for a precision, in a captured graph or as eager torch would run.

    Partial results travel as they are kept, or rounded to the precision itself.
    """
    base = HARNESS if not eager else TE if own_stream else TORCH
    results = dtype.bytes if rounded else dtype.accumulator_bytes
    return replace(base, plain_bytes=dtype.bytes, result_bytes=results)


def launched_by(launched: LaunchCounts, how: Convention) -> LaunchCounts:
    """Launches that remain under a runtime's convention: messages in batches, or no merges."""
    return launched._replace(
        merges=launched.merges + (launched.folds if how.merges else 0),
        slices=launched.slices if how.merges else 0,
        messages=launched.messages if how.apart else launched.moves,
    )


@dataclass(slots=True)
class Pricer:
    """Prices needs at one size.

    Attributes:
        calibration: The cluster.
        convention: Conventions of the runtime.
        direction: Forward or backward.
        scale_q: Query tokens over those of the skeleton's reference.
        scale_kv: Likewise for keys.
        heads: Heads times batch over those of the skeleton's reference.
        head_dim: Width, as in the skeleton.
        effects: Those that are on.
        compute: Whether kernels take time; off for runs measured without them.
        transfers: Whether transfers take time.
        tile_s: Overrides the time of a tile, for plans over whole nodes.
        far_ranks: Of a rank of a plan over nodes, how many GPUs share its transfers.
        dtype: Precision.
        nodes: Over how many the plan runs.
    """

    calibration: Calibration
    convention: Convention
    direction: Direction
    scale_q: float
    scale_kv: float
    heads: int
    head_dim: int = 128
    effects: frozenset[Effect] = ALL
    compute: bool = True
    transfers: bool = True
    tile_s: Callable[[TimedCall], float] | None = None
    far_ranks: int = 1
    dtype: Dtype = Dtype.BFLOAT16
    nodes: int = 1
    _largest: float = field(default=0.0, init=False)
    _alone: bool = field(default=False, init=False)

    def seconds_of(self, skeleton: Skeleton) -> float:
        """Time a whole plan."""
        return max(self.times(skeleton)[1], default=0.0) + self.start_s

    @property
    def start_s(self) -> float:
        """Time at which the first kernel of a plan runs."""
        effects = self.calibration.effects
        start_s = effects.start_s if Effect.START in self.effects else 0.0
        many = self.nodes > FEW_NODES and not self.convention.eager
        return start_s + (effects.join_s if many and Effect.JOIN in self.effects else 0.0)

    def times(self, skeleton: Skeleton) -> tuple[list[float], list[float]]:
        """Start and end of each part of a plan, if the plan starts at once."""
        return self.run(self.jobs(skeleton))

    def run(self, jobs: Sequence[Job]) -> tuple[list[float], list[float]]:
        """Starts and ends of priced jobs."""
        blocking = Effect.BLOCKING in self.effects
        return run_jobs(
            jobs,
            blocking=blocking,
            kernels_first=self.convention.kernels_first,
            cores=self.calibration.hardware.cores,
        )

    def jobs(self, skeleton: Skeleton) -> list[Job]:
        """Price all parts of a skeleton."""
        needs = dict.fromkeys(part.need for part in skeleton.parts)
        sizes = [self.wire_bytes(need.size) for need in needs if need.kind is NeedKind.TRANSFER]
        self._largest = max(sizes, default=0.0)
        # Where all GPUs of a node send to other nodes a pair gets less than it would get alone.
        self._alone = skeleton.lonely and self.far_ranks == 1
        far = any(need.far for need in needs)
        prices = {need: self.price(need, far=far) for need in needs}
        even = self._even(skeleton, prices) if Effect.IMBALANCE not in self.effects else {}
        jobs: list[Job] = []
        for part in skeleton.parts:
            seconds, wave_s = prices[part.need]
            if part.need.kind is NeedKind.TILE and part.ranks and part.ranks[0] in even:
                seconds = tuple(s * even[part.ranks[0]] for s in seconds)
            release = max(map(self.launch_s, part.launched), default=0.0) if self.hosted else 0.0
            moves = part.need.kind is NeedKind.TRANSFER
            # torch's transfer stream waits for what the host has launched before, and then for SMs
            # until all thread blocks of the kernel that runs by then have had theirs. Inside a node
            # a transfer is under way before that kernel is.
            patient = moves and self.convention.waits and part.need.far
            after = (*part.after, *part.latest) if patient else part.after
            messages = self._messages(part.need) if moves else 1
            # A backward kernel begins with helpers of short thread blocks; a transfer that could
            # start as well gets its SMs beside them.
            early = patient and self.direction is Direction.BACKWARD
            tail_s = self.fold_s(part.need) if part.need.kind is NeedKind.TILE else 0.0
            jobs.append(
                Job(
                    queues=part.queues,
                    ranks=part.ranks,
                    seconds=seconds,
                    after=after,
                    release_s=release,
                    wave_s=wave_s,
                    moves=moves,
                    patient=patient,
                    messages=messages,
                    gates=part.gates,
                    tail_s=tail_s,
                    early=early,
                    cores=len(part.peers) or min(1, len(part.ranks)),
                )
            )
        return jobs

    @property
    def hosted(self) -> bool:
        """Whether launches cost host time."""
        return self.convention.eager and Effect.HOST in self.effects

    def launch_s(self, launched: LaunchCounts) -> float:
        """Host time of launches, one after another."""
        eager = self.calibration.effects.eager
        call_s = eager.kernel_s if self.direction is Direction.FORWARD else eager.backward_s
        seen = launched_by(launched, self.convention)
        calls_s = seen.calls * call_s + seen.again * eager.kernel_s
        moves_s = seen.messages * eager.transfer_s + seen.far * eager.far_s
        return calls_s + seen.merges * eager.merge_s + moves_s + seen.slices * eager.slice_s

    def _even(
        self, skeleton: Skeleton, prices: dict[Need, tuple[tuple[float, ...], float]]
    ) -> dict[int, float]:
        """Per rank, what makes its tiles take the mean of all ranks."""
        work: dict[int, float] = {}
        for part in skeleton.parts:
            if part.need.kind is NeedKind.TILE:
                rank = part.ranks[0]
                work[rank] = work.get(rank, 0.0) + prices[part.need][0][0]
        ranks = sum(skeleton.alike[rank] for rank in work)
        mean = sum(s * skeleton.alike[rank] for rank, s in work.items()) / ranks if ranks else 0.0
        return {rank: mean / seconds for rank, seconds in work.items() if seconds}

    def price(self, need: Need, *, far: bool = False) -> tuple[tuple[float, ...], float]:
        """Seconds of a need (see `Job.seconds`), and a wave's if it is a kernel."""
        match need.kind:
            case NeedKind.TILE:
                return self.tile(need, far=far)
            case NeedKind.TRANSFER:
                return self.transfer(need), 0.0
            case NeedKind.COLLECTIVE:
                return (self.collective(need),), 0.0
            case NeedKind.MERGE:
                return (self.fold_s(need),), 0.0
            case NeedKind.DELTA | NeedKind.FINISH | NeedKind.COPY:
                return (self.memory_s(need, 1.0) if self.convention.merges else 0.0,), 0.0
            case NeedKind.LINEAR:
                rate = LINEAR_EFFICIENCY * self.calibration.hardware.peak_flops_per_s(self.dtype)
                flops = need.flops * self.heads * self.scale_q if self.compute else 0.0
                return (flops / rate,), 0.0
            case NeedKind.HOST:
                return (self.host_s(need),), 0.0
            case NeedKind.DELAY:
                return (0.0,), 0.0
            case _:
                assert_never(need.kind)

    def tile(self, need: Need, *, far: bool) -> tuple[tuple[float, ...], float]:
        """Time a tile with nothing beside it and with transfers beside it."""
        if not self.compute:
            return (0.0,), 0.0
        if self.tile_s is not None:
            return (sum(map(self.tile_s, need.calls)),), 0.0
        kernels, effects = self.calibration.kernels, self.calibration.effects
        crowd = effects.far if far else effects.near
        held = crowd.held_sms
        if self._largest >= effects.large_bytes:
            held += effects.large_sms
        fold = self.fold_s(need) if any(need.size) else 0.0
        if Effect.INTERFERENCE not in self.effects or not self.transfers:
            held = 0.0
        way = Direction.FORWARD if need.again else self.direction
        times = [fold] * HELD
        for call in need.calls:
            for beside in range(HELD):
                sms = int(held * beside)
                times[beside] += self.call_s(kernels, call, sms, way=way, delta=need.delta)
        wave = max(self.wave_s(kernels, call, way) for call in need.calls)
        return tuple(times), wave

    def call_s(
        self,
        kernels: Kernels,
        call: TimedCall,
        held_sms: int,
        *,
        way: Direction | None = None,
        delta: bool = False,
    ) -> float:
        """Time one kernel call; a precision that was not measured by its peak rate."""
        sheet = self.calibration.hardware
        slower = self.calibration.peak_flops_per_s / sheet.peak_flops_per_s(self.dtype)
        return slower * kernels.seconds(
            way or self.direction,
            # Down, so that a stripe's shifted tokens stay one less than a chunk.
            int(call.rows * self.scale_q),
            int(call.columns * self.scale_kv),
            call.heads * self.heads,
            causal=call.causal,
            density=call.density,
            head_dim=self.head_dim,
            held_sms=held_sms,
            # Eager torch gives out, whatever a plan would have it read.
            delta_given=self.convention.delta_given or (delta and not self.convention.eager),
            ends_last=self.convention.ends_last,
        )

    def wave_s(self, kernels: Kernels, call: TimedCall, way: Direction) -> float:
        """Time of a wave of one call, see `Kernels.wave_s`."""
        rows, columns = int(call.rows * self.scale_q), int(call.columns * self.scale_kv)
        return kernels.wave_s(way, rows, columns, call.heads * self.heads, self.head_dim)

    def fold_s(self, need: Need) -> float:
        """Time to fold partial results into accumulators."""
        if not self.convention.merges or Effect.MERGE not in self.effects:
            return 0.0
        effects = self.calibration.effects
        if not self.convention.eager:
            return self.memory_s(need, effects.passes)
        outputs = self.direction is Direction.FORWARD or need.again
        counted = (_SLICED if need.sliced else _MERGED) if outputs else _ADDED
        return self.memory_s(need, effects.eager.passes * counted / _MERGED)

    def memory_s(self, need: Need, passes: float) -> float:
        """Time to move all bytes of a need through memory, some times."""
        if not self.compute:
            return 0.0
        size = need.size
        elements = (size.result_q + size.row_q) * self.scale_q + size.result_kv * self.scale_kv
        plain = size.plain_q * self.scale_q + size.plain_kv * self.scale_kv
        wide = max(self.dtype.accumulator_bytes, self.convention.result_bytes)
        moved = self.heads * (wide * elements + self.convention.plain_bytes * plain)
        return passes * moved / self.calibration.kernels.memory_bandwidth_bytes_per_s

    def wire_bytes(self, size: Size) -> float:
        """Bytes on the way."""
        c = self.convention
        per_q = c.plain_bytes * size.plain_q + c.result_bytes * size.result_q
        per_kv = c.plain_bytes * size.plain_kv + c.result_bytes * size.result_kv
        per_q += c.row_bytes * size.row_q
        whole = self.heads * (per_q * self.scale_q + per_kv * self.scale_kv)
        return whole / self.far_ranks

    def transfer(self, need: Need) -> tuple[float, ...]:
        """Time a transfer without and with kernels beside it."""
        if not self.transfers:
            return (0.0,)
        links, effects = self.calibration.links, self.calibration.effects
        size = self.wire_bytes(need.size) / self._messages(need)
        if not need.far:
            alone = self.crowded(links.near_one_way, replace(effects.near, share=1.0), size)
            both = self.crowded(links.near, effects.near, size)
            contended = Effect.CONTENTION in self.effects and Effect.INTERFERENCE in self.effects
            return (*alone, *both) if contended else both
        if self._alone:
            return (links.far_alone.seconds(size),)
        return self.crowded(links.far, effects.far, size)

    def _messages(self, need: Need) -> int:
        """How many messages a transfer is."""
        return need.messages if self.convention.apart else 1

    def host_s(self, need: Need) -> float:
        """Time to move pieces between a GPU and its host."""
        if not self.transfers:
            return 0.0
        return self.wire_bytes(need.size) / self.calibration.hardware.host_bytes_per_s

    def crowded(self, curve: Curve, crowd: Crowd, size: float) -> tuple[float, ...]:
        """Time a message that is not alone."""
        contention = Effect.CONTENTION in self.effects
        time = crowded_s(curve, crowd, size) if contention else curve.seconds(size)
        if Effect.INTERFERENCE not in self.effects:
            return (time,)
        return time, time + size / curve.bytes_per_s * (1 / crowd.share_beside - 1)

    def collective(self, need: Need) -> float:
        """Time a collective by what its busiest rank receives, near and far at once."""
        if not self.transfers:
            return 0.0
        links = self.calibration.links
        near_s = far_s = 0.0
        if any(need.far_size):
            size = self.wire_bytes(need.far_size) / need.sharing
            steps = max(1, need.far_peers // need.sharing)
            far_s = steps * links.far.seconds(size / steps)
        if any(need.size):
            near_s = links.near_collective.seconds(self.wire_bytes(need.size))
        return max(near_s, far_s)
