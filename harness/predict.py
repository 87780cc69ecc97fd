"""Seconds of every job of a skeleton on a calibrated cluster, and so of a whole plan.

The same prices serve the simulator and the validator. Conventions say what a runtime moves and
merges, so that published measurements are predicted as they were made: the UltraAttn harness sends
partial results in the inputs' precision, no lse and no delta, and merges nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from harness.calibration import Calibration
from harness.dynamics import HELD, Job, run
from harness.effects import ALL, Crowd, Effect, crowded_s
from harness.kernel_model import Kernels
from harness.link_model import Curve
from harness.problem import Direction
from harness.skeleton import Call, Need, Part, Skeleton


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """What a runtime moves, merges and launches.

    Attributes:
        plain_bytes: Per element of inputs and finished results.
        result_bytes: Per element of partial results, on the way and in memory.
        row_bytes: Per element of lse and delta on the way; 0 if they do not travel.
        merges: Whether partial results are merged at all.
        eager: Whether the host launches one operation after another.
        delta_given: Whether backward kernels get delta rather than out.
        kernels_first: Whether a kernel is launched before a transfer that could start as well.
    """

    plain_bytes: int = 2
    result_bytes: int = 4
    row_bytes: int = 4
    merges: bool = True
    eager: bool = False
    delta_given: bool = False
    kernels_first: bool = False


HARNESS = Convention()
"""This harness in a captured graph."""

TORCH = Convention(eager=True, row_bytes=0, kernels_first=True)
"""ring-flash-attention in eager torch: dk and dv travel in float32, merging is not fused."""

ULTRA = Convention(result_bytes=2, row_bytes=0, merges=False, delta_given=True)
"""The UltraAttn harness: a queue launched ahead, nothing merged (its `reduce` is empty)."""


@dataclass(slots=True)
class Pricer:
    """Prices needs at one size.

    Attributes:
        calibration: The cluster.
        convention: What the runtime does.
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
        alone: Whether transfers between nodes are single pairs, as in a ring.
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
    tile_s: Callable[[Call], float] | None = None
    far_ranks: int = 1
    alone: bool = False
    _largest: float = field(default=0.0, init=False)

    def seconds_of(self, skeleton: Skeleton) -> float:
        """Time a whole plan."""
        jobs = self.jobs(skeleton)
        ends = run(
            jobs,
            blocking=Effect.BLOCKING in self.effects,
            kernels_first=self.convention.kernels_first,
        )[1]
        start = self.calibration.effects.start_s if Effect.START in self.effects else 0.0
        return max(ends, default=0.0) + start

    def jobs(self, skeleton: Skeleton) -> list[Job]:
        """Price all parts of a skeleton."""
        needs = dict.fromkeys(part.need for part in skeleton.parts)
        sizes = [self.wire_bytes(need) for need in needs if need.kind == "transfer"]
        self._largest = max(sizes, default=0.0)
        far = any(need.far for need in needs)
        prices = {need: self.price(need, far=far) for need in needs}
        even = self._even(skeleton, prices) if Effect.IMBALANCE not in self.effects else {}
        clocks: dict[int, float] = {}
        latest: dict[int, int] = {}  # per rank, its last kernel so far
        jobs: list[Job] = []
        for part in skeleton.parts:
            seconds, wave_s = prices[part.need]
            if part.need.kind == "tile" and part.ranks and part.ranks[0] in even:
                seconds = tuple(s * even[part.ranks[0]] for s in seconds)
            release = self._released(part, clocks) if self._hosted else 0.0
            moves = part.need.kind == "transfer"
            # Gradients of keys are sent when a step has ended, and hide behind the next one.
            inputs = not part.need.size.result_kv
            whole = moves and part.need.far and inputs and self.convention.eager
            after = part.after
            if moves and whole:
                # torch's transfer stream first waits for what the host has launched before.
                after = (*after, *(latest[r] for r in part.ranks if r in latest))
            elif part.ranks and not moves:
                latest[part.ranks[0]] = len(jobs)
            jobs.append(Job(part.queues, part.ranks, seconds, after, release, wave_s, moves, whole))
        return jobs

    @property
    def _hosted(self) -> bool:
        return self.convention.eager and Effect.HOST in self.effects

    def _released(self, part: Part, clocks: dict[int, float]) -> float:
        """Let the hosts of a part's ranks launch it; return when that is done."""
        eager = self.calibration.effects.eager
        match part.need.kind:
            case "transfer":
                rank = part.ranks[1]
                clocks[rank] = clocks.get(rank, 0.0) + eager.transfer_s
                return max(clocks.get(r, 0.0) for r in part.ranks)
            case "tile":
                forward = self.direction is Direction.FORWARD
                each = eager.kernel_s if forward else eager.backward_s
                cost = len(part.need.calls) * each
                if any(part.need.size) and self.convention.merges:
                    cost += eager.merge_s
            case "merge":
                cost = eager.merge_s
            case _:
                return 0.0
        rank = part.ranks[0]
        clocks[rank] = clocks.get(rank, 0.0) + cost
        return clocks[rank]

    def _even(
        self, skeleton: Skeleton, prices: dict[Need, tuple[tuple[float, ...], float]]
    ) -> dict[int, float]:
        """Per rank, what makes its tiles take the mean of all ranks."""
        work: dict[int, float] = {}
        for part in skeleton.parts:
            if part.need.kind == "tile":
                rank = part.ranks[0]
                work[rank] = work.get(rank, 0.0) + prices[part.need][0][0]
        mean = sum(work.values()) / len(work) if work else 0.0
        return {rank: mean / seconds for rank, seconds in work.items() if seconds}

    def price(self, need: Need, *, far: bool = False) -> tuple[tuple[float, ...], float]:
        """Seconds of a need (see `Job.seconds`), and a wave's if it is a kernel."""
        match need.kind:
            case "tile":
                return self.tile(need, far=far)
            case "transfer":
                return self.transfer(need), 0.0
            case "collective":
                return (self.collective(need),), 0.0
            case "merge":
                return (self.fold_s(need),), 0.0
            case "delta" if self.convention.merges:
                return (self.memory_s(need, 1.0),), 0.0
            case _:
                return (0.0,), 0.0

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
        times = [fold] * HELD
        for call in need.calls:
            for beside in range(HELD):
                times[beside] += self.call_s(kernels, call, int(held * beside))
        wave = max(self.wave_s(kernels, call) for call in need.calls)
        return tuple(times), wave

    def call_s(self, kernels: Kernels, call: Call, held_sms: int) -> float:
        """Time one kernel call."""
        return kernels.seconds(
            self.direction,
            round(call.rows * self.scale_q),
            round(call.columns * self.scale_kv),
            call.heads * self.heads,
            causal=call.causal,
            density=call.density,
            head_dim=self.head_dim,
            held_sms=held_sms,
            delta_given=self.convention.delta_given,
        )

    def wave_s(self, kernels: Kernels, call: Call) -> float:
        """Time of a wave of one call, see `Kernels.wave_s`."""
        rows, columns = round(call.rows * self.scale_q), round(call.columns * self.scale_kv)
        return kernels.wave_s(self.direction, rows, columns, call.heads * self.heads, self.head_dim)

    def fold_s(self, need: Need) -> float:
        """Time to fold partial results into what is there."""
        if not self.convention.merges or Effect.MERGE not in self.effects:
            return 0.0
        effects = self.calibration.effects
        return self.memory_s(
            need, effects.eager.passes if self.convention.eager else effects.passes
        )

    def memory_s(self, need: Need, passes: float) -> float:
        """Time to move all bytes of a need through memory, some times."""
        if not self.compute:
            return 0.0
        size = need.size
        elements = (size.result_q + size.row_q) * self.scale_q + size.result_kv * self.scale_kv
        plain = size.plain_q * self.scale_q + size.plain_kv * self.scale_kv
        moved = self.heads * (4 * elements + self.convention.plain_bytes * plain)
        return passes * moved / self.calibration.kernels.memory_bandwidth_bytes_per_s

    def wire_bytes(self, need: Need) -> float:
        """Bytes that a transfer or collective moves."""
        c, size = self.convention, need.size
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
        size = self.wire_bytes(need)
        if need.far:
            curve, crowd = (links.far_alone if self.alone else links.far), effects.far
        else:
            curve, crowd = links.near, effects.near
        if need.far and self.alone:
            return (curve.seconds(size) + (effects.eager.far_s if self._hosted else 0.0),)
        return self.crowded(curve, crowd, size)

    def crowded(self, curve: Curve, crowd: Crowd, size: float) -> tuple[float, ...]:
        """Time a message that is not alone."""
        contention = Effect.CONTENTION in self.effects
        time = crowded_s(curve, crowd, size) if contention else curve.seconds(size)
        if Effect.INTERFERENCE not in self.effects:
            return (time,)
        return time, time + size / curve.bytes_per_s * (1 / crowd.share_beside - 1)

    def collective(self, need: Need) -> float:
        """Time a collective by what its busiest rank receives."""
        if not self.transfers:
            return 0.0
        links, size = self.calibration.links, self.wire_bytes(need)
        if need.far:
            steps = max(1, need.group - 1)
            return steps * links.far.seconds(size / steps)
        return links.near_collective.seconds(size)
