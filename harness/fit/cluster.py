"""Fit a whole calibration from a folder of measured tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.calibration import Calibration, Range, calibration
from harness.effects import Crowd, Eager, Effects
from harness.fit.kernels import fit_kernels
from harness.fit.least import Reals, simplex
from harness.fit.links import collective_times, fit_curve, message_times
from harness.fit.tables import halves, read
from harness.link_model import Curve, Links
from harness.measured import Case, case_of, predict
from harness.problem import Direction, Dtype

_MIB = 2**20


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
    """

    name: str
    kernels: str
    links: str
    runs: str
    alone_gain: float = 1.14  # rings over 2 nodes of H800 and A800 against 16 pairs


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
    ),
    Machine(
        name="a100",
        kernels="A100",
        links="A100",
        runs="A100",
        alone_gain=2.1,  # two GPUs share a NIC: UltraAttn logs L16-L23, ring against 16 pairs
    ),
    Machine(
        name="h100-hamming",
        kernels="zhipu_planck",
        links="H100_hamming",
        runs="H100",
    ),
)


def fit_cluster(
    folder: Path, machine: Machine, date: str, log: Callable[[str], None]
) -> Calibration:
    """Fit kernels and links to their own tables, then effects to half of the whole runs."""
    shipped = calibration(machine.name)
    kernels, errors = fit_kernels(
        [r for r in read(folder, "kernel_times.csv") if r["gpu"] == machine.kernels],
        shipped.kernels,
    )
    for direction, error in errors.items():
        log(f"{machine.name}: kernels {direction.value}: {error}")
    links, near, far = _links(folder, machine, log)
    value = Calibration(
        id=f"{machine.name}/{date}",
        hardware=shipped.hardware,
        kernels=kernels,
        links=links,
        effects=_GUESS,
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
    return fit_effects(value, cases(folder, machine.runs), log)


def cases(folder: Path, gpu: str) -> list[Case]:
    """All rows of whole runs of one GPU that can be predicted and are more than noise."""
    rows = read(folder, "measured_dist_attn.csv") + read(folder, "measured_bsa_h100.csv")
    made = [case_of(row) for row in rows if row["gpu"] == gpu]
    return [case for case in made if isinstance(case, Case) and not case.noisy]


def _links(
    folder: Path, machine: Machine, log: Callable[[str], None]
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
    gathers = collective_times([r for r in read(folder, "coll_bw.csv") if r["gpu"] == "A100"], 8)
    gather, _ = fit_curve(gathers)
    # Only the A100 has collectives; elsewhere its curve is scaled by the pairs' bandwidths.
    pairs = near[0].bytes_per_s / 217e9  # Source: UltraAttn prof_data, A100 pairs inside a node
    collective = replace(
        gather,
        small_bytes_per_s=gather.small_bytes_per_s * pairs,
        bytes_per_s=gather.bytes_per_s * pairs,
    )
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
        near_collective=collective,
    )
    return links, near[1], far[1]


_GUESS = Effects(
    near=Crowd(handshake_s=5e-6, share=0.9, share_beside=0.5, held_sms=13.0),
    far=Crowd(handshake_s=5e-6, share=0.95, share_beside=0.8, held_sms=6.0),
    large_bytes=250e6,
    large_sms=4.0,
    start_s=15e-6,
    passes=3.0,
    eager=Eager(
        kernel_s=120e-6,
        backward_s=250e-6,
        transfer_s=70e-6,
        merge_s=100e-6,
        passes=8.0,
        far_s=150e-6,
    ),
)


def fit_effects(
    value: Calibration, runs: Sequence[Case], log: Callable[[str], None], most: int = 220
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
    far = [c for c in plans if c not in one_node]
    for group, start, made in (
        (one_node, _near_of(value), _with_near),
        (fused, _collective_of(value), _with_collective),
        (eager[:: max(1, len(eager) // 80)], _eager_of(value), _with_eager),
        (far, _far_of(value), _with_far),
    ):
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
            return float(np.mean([abs(np.log(predict(c, trial) / c.measured_s)) for c in some]))

        best = simplex(loss, start, 15 * len(start))
        value = made(value, best)
        log(f"{value.id}: {made.__name__}: {len(some)} runs, mean |log| {loss(best):.3f}")
    return value


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


def _collective_of(value: Calibration) -> list[float]:
    rate = value.links.near.bytes_per_s
    return [20e-6, 0.6 * rate]


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


def _eager_of(value: Calibration) -> list[float]:
    eager = value.effects.eager
    host = [eager.kernel_s, eager.backward_s, eager.transfer_s, eager.merge_s]
    return [*host, eager.passes, eager.far_s]


def _with_eager(value: Calibration, x: Reals) -> Calibration:
    eager = Eager(
        kernel_s=float(x[0]),
        backward_s=float(x[1]),
        transfer_s=float(x[2]),
        merge_s=float(x[3]),
        passes=float(x[4]),
        far_s=float(x[5]),
    )
    return replace(value, effects=replace(value.effects, eager=eager))


def sources_of(machine: Machine, date: str) -> dict[str, str]:
    """What each line of a calibration cites, by section."""
    logs = "UltraAttn (SC'25) repository"
    return {
        "": f"Source: fitted {date} to {logs}",
        "hardware": f"Source: NVIDIA datasheet of the GPU, dense, read {date}",
        "hardware.nodes": f"Source: {logs}, size of the runs, {date}",
        "hardware.gpus_per_node": f"Source: NVIDIA HGX boards of this model, read {date}",
        "hardware.host_bytes_per_s": f"Source: PCIe x16 of the GPU's generation, read {date}",
        "kernels": f"Source: NVIDIA datasheet of the GPU, read {date}",
        "kernels.block_rows": f"Source: flash-attn 2.5.7, head_dim 128, read {date}",
        "kernels.forward": f"Source: {logs}, kernel times of {machine.kernels}, fitted {date}",
        "kernels.backward": f"Source: {logs}, kernel times of {machine.kernels}, fitted {date}",
        **{
            f"links.{name}": f"Source: {logs}, P2P times of {machine.links}, fitted {date}"
            for name in ("near", "near_one_way", "far", "far_alone")
        },
        "links.near_collective": f"Source: comm_test, all-gather of 8 A100, fitted {date}",
        **{
            f"effects.{name}": f"Source: {logs}, half of the runs on {machine.runs}, fitted {date}"
            for name in ("near", "far", "eager")
        },
        "effects": f"Source: {logs}, half of the runs on {machine.runs}, fitted {date}",
        "range": f"Source: the tables fitted, {date}",
        "errors": f"Source: the half not fitted, {date}",
    }
