"""Fit a whole calibration from a folder of measured tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.cluster.calibration import Calibration, Range, calibration
from harness.cluster.effects import FEW_NODES, Effects
from harness.cluster.link_model import Crowd, Curve, Links
from harness.fit.hosts import fit_hosts
from harness.fit.kernels import fit_kernels
from harness.fit.links import fit_curve, message_times
from harness.fit.minimise import Reals, simplex
from harness.fit.tables import halves, read
from harness.plan.problem import Direction, Dtype
from harness.reproduce.case import Case
from harness.reproduce.measured_runs import cases_of
from harness.reproduce.published_runs import predict_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How tables name a cluster, and what they do not say of it.

    What datasheets say is kept in the cluster's shipped file, and stays as it is there.

    Attributes:
        name: Of the cluster.
        kernels: Label in the table of kernels.
        links: Label in the tables of transfers.
        runs: Label in the tables of whole runs.
        alone_gain: How much faster one pair between nodes is than all pairs at once.
        like: Without plans inside a node among the runs, the cluster whose GPUs are alike: effects
            are taken from its shipped file.
        gathers_like: Without collectives among the runs, whose are scaled by a pair's bandwidth.
        uneven_like: Without stripes among the runs, whose kernels of uneven lengths are alike.
        splits: Whether the table of kernels shows how fast kernels on split keys are; else runs do.
    """

    name: str
    kernels: str
    links: str
    runs: str
    alone_gain: float = 1.05  # one pair of H100 against 16 at once: UltraAttn comm_bw logs
    like: str | None = None
    gathers_like: str | None = None
    uneven_like: str | None = None
    splits: bool = True


MACHINES = (
    Machine(
        name="h800",
        kernels="H800",
        links="H800",
        runs="H800",
    ),
    Machine(
        name="a800",
        kernels="A800",
        links="A800",
        runs="A800",
        like="a100",
        gathers_like="h800",
    ),
    Machine(
        name="a100",
        kernels="A100",
        links="A100",
        runs="A100",
        alone_gain=2.1,  # as the others', and two GPUs share a NIC: UltraAttn logs L16-L23, rings
        splits=False,
    ),
    Machine(
        name="h100-hamming",
        kernels="zhipu_planck",
        links="H100_hamming",
        runs="H100",
        gathers_like="h800",
        uneven_like="h800",
    ),
)


def fit_cluster(
    folder: Path, machine: Machine, date: str, log: Callable[[str], None]
) -> Calibration:
    """Fit kernels and links to their own tables, then effects to half of the whole runs.

    Raises:
        ValueError: The folder has no times of this machine's kernels.
    """
    shipped = calibration(machine.name)
    rows = [r for r in read(folder, "kernel_times.csv") if r.get("gpu") == machine.kernels]
    if not rows:
        raise ValueError(
            f"logs ({folder}) must have kernel_times.csv with rows of gpu {machine.kernels}"
        )
    # Tables of kernels have no uneven lengths.
    even = replace(shipped.kernels, uneven=1.0)
    kernels, errors = fit_kernels(rows, even)
    for direction, error in errors.items():
        log(f"{machine.name}: kernels {direction.value}: {error}")
    if not machine.splits:
        share = shipped.kernels.forward.split_efficiency
        kernels = replace(kernels, forward=replace(kernels.forward, split_efficiency=share))
    links, near, far = _links(folder, machine, shipped, log)
    value = Calibration(
        id=f"{machine.name}/{date}",
        hardware=shipped.hardware,
        kernels=kernels,
        links=links,
        effects=_first(shipped),
        range=Range(
            min_tokens=256,
            max_tokens=131072,
            heads=(1, 32),
            head_dims=(128,),
            dtypes=(Dtype.BFLOAT16.value, Dtype.FLOAT16.value),
            max_message_bytes=2.0**30,
        ),
        errors={
            "kernel_forward": errors[Direction.FORWARD].mean,
            "kernel_backward": errors[Direction.BACKWARD].mean,
            "near": near,
            "far": far,
        },
    )
    return fit_effects(_transferred(value, machine), cases(folder, machine.runs), machine, log)


def _first(shipped: Calibration) -> Effects:
    """Where searches start: at what ships, so that fitting the same runs again changes nothing."""
    eager = replace(shipped.effects.eager, passes=_MERGE_PASSES)
    return replace(shipped.effects, large_bytes=_LARGE_BYTES, passes=_PASSES, eager=eager)


def _transferred(value: Calibration, machine: Machine) -> Calibration:
    """Take from shipped files what no run of this machine shows."""
    links, rate = value.links, value.links.near.bytes_per_s
    if machine.gathers_like is not None:
        other = calibration(machine.gathers_like).links
        scale = rate / other.near.bytes_per_s
        gather = other.near_collective
        curve = replace(
            gather,
            small_bytes_per_s=gather.small_bytes_per_s * scale,
            bytes_per_s=gather.bytes_per_s * scale,
        )
        value = replace(value, links=replace(links, near_collective=curve))
    if machine.uneven_like is not None:
        uneven = calibration(machine.uneven_like).kernels.uneven
        value = replace(value, kernels=replace(value.kernels, uneven=uneven))
    if machine.like is not None:
        alike = calibration(machine.like)
        # What a crowd leaves of a link is its switch's, whatever a pair alone reaches.
        share = alike.effects.near.share * alike.links.near.bytes_per_s / rate
        near = replace(alike.effects.near, share=min(1.0, share))
        own = value.effects
        effects = replace(alike.effects, near=near, far=own.far, eager=own.eager)
        value = replace(value, effects=effects)
    return value


def cases(folder: Path, gpu: str) -> list[Case]:
    """All rows of whole runs of one GPU that can be predicted and are more than noise."""
    rows = read(folder, "measured_dist_attn.csv") + read(folder, "measured_bsa_h100.csv")
    made = [case for row in rows if row["gpu"] == gpu for case in cases_of(row)]
    return [case for case in made if isinstance(case, Case) and not case.noisy]


def _links(
    folder: Path, machine: Machine, shipped: Calibration, log: Callable[[str], None]
) -> tuple[Links, float, float]:
    rows = read(folder, "comm_bw.csv") + read(folder, "comm_bw_extra.csv")
    mine = [r for r in rows if r["gpu"] == machine.links and r["max_fan"] == "1"]
    mine = [r for r in mine if not r["backend"].startswith("torch")]

    def curve(link: str, pattern: str) -> tuple[Curve, float] | None:
        used = [r for r in mine if r["link"] == link and r["pattern"] == pattern]
        if not used:
            return None
        found, error = fit_curve(message_times(used))
        log(f"{machine.name}: {link} {pattern}: {error}")
        return found, error.mean

    near, far = curve("intra", "bidir"), curve("inter", "bidir")
    if near is None or far is None:
        raise ValueError(
            f"{folder} must have transfers of {machine.links} inside and between nodes"
        )
    one_way = curve("intra", "unidir") or near
    gain = machine.alone_gain
    alone = replace(
        far[0],
        small_bytes_per_s=far[0].small_bytes_per_s * gain,
        bytes_per_s=far[0].bytes_per_s * gain,
    )
    links = Links(
        near=near[0],
        near_one_way=one_way[0],
        far=far[0],
        far_alone=alone,
        near_collective=shipped.links.near_collective,
    )
    return links, near[1], far[1]


_LONG = 65536  # tokens: from here on kernels take most of a stripe's time
_UNEVEN = tuple(1 + step / 100 for step in range(0, 31, 3))

_LARGE_BYTES = 250e6
_PASSES = 3.0
_MERGE_PASSES = 8.1  # counted in the UltraAttn harness's merge, 6.5, at 0.8 of the bandwidth
_GAIN = 0.99
_JOIN_S = 1e-3  # where the search begins


def fit_effects(
    value: Calibration,
    runs: Sequence[Case],
    machine: Machine,
    log: Callable[[str], None],
    most: int = 220,
) -> Calibration:
    """Fit the sizes of effects, group by group, each on half of the shapes that show it."""
    fit, _ = run_halves(runs)
    plans = [c for c in fit if c.strategy in ("grid", "owner")]
    # A strided pattern keeps up to 4 nodes apart: whatever is sent stays inside a node.
    one_node = [c for c in plans if c.nodes == 1 or (c.pattern == "strided" and c.nodes <= 4)]
    square = [c for c in fit if c.is_eager and c.seqlen_q == c.seqlen_kv]
    few = sorted({c.nodes for c in square})[:2]
    eager = [c for c in square if c.nodes in few]  # more nodes add no parameter, only time
    fused = [c for c in fit if c.nodes == 1 and c.strategy == "grid-fused"]
    far = [c for c in plans if c not in one_node and c.nodes <= FEW_NODES]
    many = [c for c in plans if c not in one_node and c.nodes > FEW_NODES]
    many += [c for c in fit if c.strategy == "grid-fused" and c.nodes > FEW_NODES]
    groups: list[tuple[list[Case], list[float], Apply]] = [
        (one_node, _near_of(value), _with_near if machine.splits else _with_near_and_splits),
        (fused, _collective_of(value), _with_collective),
        (far, _far_of(value), _with_far),
        (many, [value.effects.join_s or _JOIN_S], _with_join),
    ]
    if not machine.splits:
        groups[0][1].append(value.kernels.forward.split_efficiency)
    for group, start, made in groups:
        some = _thin(group, most)
        if not some:
            continue

        def loss(
            x: Reals,
            some: Sequence[Case] = some,
            made: Apply = made,
            base: Calibration = value,
        ) -> float:
            trial = made(base, x)
            return float(np.mean([abs(np.log(predict_run(c, trial) / c.measured_s)) for c in some]))

        best = simplex(loss, start, 15 * len(start))
        before, after = loss(np.array(start)), loss(best)
        log(
            f"{value.id}: {made.__name__}: {len(some)} runs, mean |log| {before:.4f} to {after:.4f}"
        )
        if after < _GAIN * before:  # else the fit has converged
            value = made(value, best)
    value = fit_hosts(value, eager, log)
    return _uneven(value, [c for c in eager if c.strategy == "stripe"], log)


def _uneven(value: Calibration, stripes: Sequence[Case], log: Callable[[str], None]) -> Calibration:
    """Fit what kernels of uneven lengths take: half of a stripe's steps lack one query and key."""
    some = [c for c in stripes if c.pattern == "causal" and c.seqlen_q >= _LONG]

    def trial(factor: float) -> Calibration:
        return replace(value, kernels=replace(value.kernels, uneven=factor))

    def loss(factor: float) -> float:
        return float(sum(abs(np.log(predict_run(c, trial(factor)) / c.measured_s)) for c in some))

    if not some:
        return value
    best = min(_UNEVEN, key=loss)
    log(f"{value.id}: uneven: {len(some)} runs, mean |log| {loss(best) / len(some):.3f}")
    return trial(best)


def run_halves(runs: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Split whole runs by their shapes: those that are fitted, and those that are not."""
    names = [
        f"{c.gpu}/{c.nodes}/{c.pattern}/{c.direction}/{c.heads}/{c.seqlen_q}/{c.seqlen_kv}"
        for c in runs
    ]
    return halves(runs, ("runs",), names)


Apply = Callable[[Calibration, Reals], Calibration]


def _thin(cases: Sequence[Case], most: int) -> list[Case]:
    ordered = sorted(
        cases, key=lambda c: (c.strategy, c.direction, c.heads, c.seqlen_q, c.seqlen_kv, c.rows)
    )
    step = max(1, -(-len(ordered) // most))
    return ordered[::step]


def _near_of(value: Calibration) -> list[float]:
    near, effects = value.effects.near, value.effects
    crowd = [near.handshake_s, near.share, near.share_beside, near.held_sms]
    return [*crowd, effects.large_sms, effects.start_s]


def _with_near(value: Calibration, x: Reals) -> Calibration:
    near = Crowd(
        handshake_s=float(x[0]),
        share=min(1.0, float(x[1])),
        share_beside=min(1.0, float(x[2])),
        held_sms=float(x[3]),
    )
    effects = replace(value.effects, near=near, large_sms=float(x[4]), start_s=float(x[5]))
    return replace(value, effects=effects)


def _with_near_and_splits(value: Calibration, x: Reals) -> Calibration:
    value = _with_near(value, x)
    forward = replace(value.kernels.forward, split_efficiency=float(x[6]))
    return replace(value, kernels=replace(value.kernels, forward=forward))


def _collective_of(value: Calibration) -> list[float]:
    curve = value.links.near_collective
    return [curve.latency_s, curve.bytes_per_s]


def _with_collective(value: Calibration, x: Reals) -> Calibration:
    curve = Curve(
        latency_s=float(x[0]),
        small_bytes_per_s=float(x[1]),
        switch_bytes=0.0,
        large_latency_s=float(x[0]),
        bytes_per_s=float(x[1]),
    )
    return replace(value, links=replace(value.links, near_collective=curve))


def _far_of(value: Calibration) -> list[float]:
    far = value.effects.far
    return [far.handshake_s, far.share, far.share_beside, far.held_sms]


def _with_far(value: Calibration, x: Reals) -> Calibration:
    far = Crowd(
        handshake_s=float(x[0]),
        share=min(1.0, float(x[1])),
        share_beside=min(1.0, float(x[2])),
        held_sms=float(x[3]),
    )
    return replace(value, effects=replace(value.effects, far=far))


def _with_join(value: Calibration, x: Reals) -> Calibration:
    return replace(value, effects=replace(value.effects, join_s=float(x[0])))


def cluster_sources(machine: Machine, date: str) -> dict[str, str]:
    """Source of each line of a calibration, by section."""
    logs = "UltraAttn (SC'25) repository"
    runs = f"{logs}, half of the runs on {machine.runs}, fitted {date}"
    gathers = f"{logs}, half of the fused grids on {machine.runs}, fitted"
    if machine.gathers_like is not None:
        gathers = f"transferred from {machine.gathers_like}, scaled by the bandwidth of a pair"
    uneven = f"{logs}, half of the stripes on {machine.runs}, fitted"
    if machine.uneven_like is not None:
        uneven = f"transferred from {machine.uneven_like}"
    near = runs
    if machine.like is not None:
        near = f"transferred from {machine.like}, whose GPUs are alike, {date}"
    return {
        "": f"Source: fitted {date} to {logs}",
        "hardware": f"Source: NVIDIA datasheet of the GPU, dense, read {date}",
        "hardware.nodes": f"Source: {logs}, size of the runs, {date}",
        "hardware.gpus_per_node": f"Source: NVIDIA HGX boards of this model, read {date}",
        "hardware.host_bytes_per_s": f"Source: PCIe x16 of the GPU's generation, read {date}",
        "kernels": f"Source: NVIDIA datasheet of the GPU, read {date}",
        "kernels.uneven": f"Source: {uneven}, {date}",
        "kernels.block_rows": f"Source: flash-attn 2.5.7, head_dim 128, read {date}",
        "kernels.forward": f"Source: {logs}, kernel times of {machine.kernels}, fitted {date}",
        "kernels.backward": f"Source: {logs}, kernel times of {machine.kernels}, fitted {date}",
        **{
            f"links.{name}": f"Source: {logs}, P2P times of {machine.links}, fitted {date}"
            for name in ("near", "near_one_way", "far")
        },
        "links.near_collective": f"Source: {gathers}, {date}",
        **({} if machine.splits else {"kernels.forward.split_efficiency": f"Source: {runs}"}),
        "links.far_alone": f"Source: set: {machine.alone_gain} times as fast as far: {logs}, "
        f"one pair of H100 against 16 at once, {date}",
        "effects": f"Source: {near}",
        "effects.near": f"Source: {near}",
        "effects.far": f"Source: {runs}",
        "effects.large_bytes": f"Source: set, from where plans on A100 slow down, {date}",
        "effects.passes": f"Source: set: read a part, read and write an accumulator, {date}",
        "effects.eager": f"Source: {runs}",
        "effects.eager.transfer_s": "Source: set: 30 to 90 us a pair of small messages, "
        f"{logs}, {date}",
        "effects.eager.passes": "Source: set: counted in the UltraAttn harness's merge, at 0.8 of "
        f"the memory's bandwidth, {date}",
        "range": f"Source: the tables fitted, {date}",
        "errors": f"Source: the half not fitted, {date}",
    }
