"""Fit a calibration of this machine to what `calibrate` has measured on it.

A rank is a process with one thread: one "SM" that runs the thread blocks of a kernel one after
another. There is no host beside it, so the eager runtime costs nothing more. Kernels and messages
of all ranks share the cores (see `dynamics.run`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from harness.cluster.calibration import LINEAR_EFFICIENCY, Calibration, Hardware, Range
from harness.cluster.effects import Eager, Effects
from harness.cluster.kernel_model import BackwardKernel, ForwardKernel, Kernels
from harness.cluster.link_model import Crowd, Links
from harness.fit.kernels import Error
from harness.fit.links import fit_curve
from harness.fit.minimise import Reals, least_squares
from harness.fit.tables import halves
from harness.plan.problem import Direction, Dtype

_RANKS = 8
"""Chosen: as many ranks as there are cores fit, and so many in any case, which then take turns."""
_ROWS = 32  # Source: torch 2.13 CPU flash attention, its smallest block of queries
_KEYS = 512  # Source: torch 2.13 CPU flash attention, its blocks of keys


class KernelShape(NamedTuple):
    """One kernel call."""

    rows: int
    columns: int
    heads: int
    head_dim: int
    causal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Measurements of this machine, in seconds.

    Attributes:
        cpu: Its processor.
        cores: How many can run at once.
        memory_bytes: Of all ranks.
        forward: Per kernel call.
        backward: The same, given out.
        backward_delta: The same, given delta.
        merge: Per bytes of partial results, a merge.
        copy: Per bytes.
        linear_flops_per_s: Of a large matrix product.
        precision: Per precision, one kernel call; float16 has no peak of its own.
        one_way: Per message size.
        both_ways: Per message size.
        exchange: Per bytes that a rank receives, an all-to-all of all ranks.
        empty: Per direction and ranks, a plan of almost no work.
    """

    cpu: str
    cores: int
    memory_bytes: int
    forward: Mapping[KernelShape, float]
    backward: Mapping[KernelShape, float]
    backward_delta: Mapping[KernelShape, float]
    merge: Mapping[int, float]
    copy: Mapping[int, float]
    linear_flops_per_s: float
    precision: Mapping[Dtype, float]
    one_way: Mapping[int, float]
    both_ways: Mapping[int, float]
    exchange: Mapping[int, float]
    empty: Mapping[tuple[str, int], float]


def fit_local(figures: Figures, date: str, log: Callable[[str], None]) -> Calibration:
    """Fit every parameter but the overheads of whole plans, which need a simulation."""
    size = max(figures.copy)
    bandwidth = 2 * size / figures.copy[size]
    kernels, errors = _kernels(figures, bandwidth)
    near, near_error = fit_curve(figures.both_ways)
    one_way, _ = fit_curve(figures.one_way)
    exchange, exchange_error = fit_curve(figures.exchange)
    kinds = {f"kernels {name}": error for name, error in errors.items()}
    for what, error in {**kinds, "messages": near_error, "all-to-alls": exchange_error}.items():
        log(f"fitted {what}: {error}")
    merges = [s * bandwidth / n for n, s in figures.merge.items()]
    tokens = [n for shape in figures.forward for n in shape[:2]]
    peak = max(
        figures.linear_flops_per_s / LINEAR_EFFICIENCY,
        kernels.forward.flops_per_s / min(1, kernels.forward.causal),
        kernels.backward.flops_per_s / min(1, kernels.backward.causal),
    )
    # Kernels were fitted in float32; in another precision they take so much longer.
    slower = {each: s / figures.precision[Dtype.FLOAT32] for each, s in figures.precision.items()}
    ranks = max(figures.cores, _RANKS)
    nothing = Crowd(handshake_s=0.0, share=1.0, share_beside=1.0, held_sms=0.0)
    return Calibration(
        id=f"local-cpu/{date}",
        hardware=Hardware(
            gpu=figures.cpu,
            device="cpu",
            nodes=1,
            gpus_per_node=ranks,
            cores=figures.cores,
            flops_per_s=peak / slower[Dtype.BFLOAT16],
            flops_per_s_float32=peak,
            flops_per_s_float64=peak / slower[Dtype.FLOAT64],
            memory_bytes=figures.memory_bytes // ranks,
            host_bytes_per_s=bandwidth / 2,
        ),
        kernels=kernels,
        # There is one node; links between nodes are as those in it, and are never used.
        links=Links(
            near=near,
            near_one_way=one_way,
            far=near,
            far_alone=near,
            near_collective=exchange,
        ),
        effects=Effects(
            near=nothing,
            far=nothing,
            large_bytes=float(max(figures.both_ways)),
            large_sms=0.0,
            start_s=0.0,
            passes=float(np.median(merges)),
            eager=Eager(
                kernel_s=0.0,
                backward_s=0.0,
                transfer_s=0.0,
                merge_s=0.0,
                passes=0.0,
                far_s=0.0,
                slice_s=0.0,
            ),
        ),
        range=Range(
            min_tokens=min(tokens),
            max_tokens=max(tokens),
            heads=tuple(sorted({shape[2] for shape in figures.forward})),
            head_dims=tuple(sorted({shape[3] for shape in figures.forward})),
            dtypes=("float32",),
            max_message_bytes=float(max(figures.both_ways)),
        ),
        errors={
            "kernel_forward": errors["forward"].mean,
            "kernel_backward": errors["backward"].mean,
            "near": near_error.mean,
        },
    )


def with_overheads(
    value: Calibration,
    predicted: Mapping[tuple[str, int], float],
    measured: Mapping[tuple[str, int], float],
) -> Calibration:
    """Set what plans take beyond their kernels and messages.

    Args:
        value: Without overheads.
        predicted: By direction and ranks, its time of a plan with almost no work.
        measured: The measured time.
    """
    forward = Direction.FORWARD.value
    start = max(0.0, measured[forward, 1] - predicted[forward, 1])
    wait = max(0.0, measured[forward, 2] - predicted[forward, 2] - start)
    near = replace(value.effects.near, handshake_s=wait)
    return replace(value, effects=replace(value.effects, start_s=start, near=near))


def _kernels(figures: Figures, bandwidth: float) -> tuple[Kernels, dict[str, Error]]:
    rate = figures.linear_flops_per_s / 2
    model = Kernels(
        sms=1,
        block_rows=_ROWS,
        memory_bandwidth_bytes_per_s=bandwidth,
        uneven=1.0,
        forward=_forward([1e-5, rate, 1e-6, 1.0, 50.0]),
        backward=_backward([1e-5, rate, 1e-6, 4.0, 1.0, 50.0]),
        whole_keys=_KEYS,
    )
    shapes = list(figures.forward)
    # Half of the shapes are fitted, and the error is that on the others.
    fit, report = halves(shapes, ("local",), map(str, shapes))

    def fitted(
        seconds: Mapping[KernelShape, float],
        start: list[float],
        made: Callable[[Reals], Kernels],
        direction: Direction,
    ) -> tuple[Kernels, Error]:
        def gaps(x: Reals) -> Reals:
            found: Reals = np.log(
                [_time(made(x), direction, shape) / seconds[shape] for shape in fit]
            )
            return found

        best = made(least_squares(gaps, start))
        predicted = np.array([_time(best, direction, shape) for shape in report])
        return best, Error.of(predicted, np.array([seconds[shape] for shape in report]))

    model, forward = fitted(
        figures.forward,
        [1e-5, rate, 1e-6, 1.0, 50.0],
        lambda x: replace(model, forward=_forward(x.tolist())),
        Direction.FORWARD,
    )
    base = model
    model, backward = fitted(
        figures.backward,
        [1e-5, rate, 1e-6, 4.0, 1.0, 50.0],
        lambda x: replace(base, backward=_backward(x.tolist())),
        Direction.BACKWARD,
    )
    # A kernel that gets delta works on wider tensors: what that adds is counted in passes too.
    more = [
        (figures.backward_delta[s] - figures.backward[s]) * bandwidth / (s[0] * s[2] * s[3] * 4)
        for s in shapes
    ]
    kernel = replace(model.backward, delta_passes=-float(np.median(more)))
    return replace(model, backward=kernel), {"forward": forward, "backward": backward}


def _time(model: Kernels, direction: Direction, shape: KernelShape) -> float:
    rows, columns, heads, head_dim, causal = shape
    return model.seconds(direction, rows, columns, heads, causal=causal, head_dim=head_dim)


def _forward(x: list[float]) -> ForwardKernel:
    return ForwardKernel(
        launch_s=x[0],
        flops_per_s=x[1],
        alone=1.0,
        block_s=x[2],
        split_efficiency=1.0,
        combine_s=0.0,
        causal=x[3],
        diagonal_keys=x[4],
        splits=False,
    )


def _backward(x: list[float]) -> BackwardKernel:
    return BackwardKernel(
        launch_s=x[0],
        flops_per_s=x[1],
        block_s=x[2],
        passes=x[3],
        delta_passes=0.0,
        causal=x[4],
        diagonal_rows=x[5],
    )


def machine_sources(date: str) -> dict[str, str]:
    """Source of each line of a local calibration, by section."""
    here = f"measured on this machine, {date}"
    same = f"as inside the node, for there is one, {date}"
    return {
        "": f"Source: {here}",
        "hardware": f"Source: this machine's system, {date}",
        **{
            f"hardware.{name}": f"Source: matrix products and kernels {here}"
            for name in ("flops_per_s_float32", "flops_per_s_float64")
        },
        "hardware.flops_per_s": f"Source: that of float32 and a bfloat16 kernel {here}; "
        "float16 was not measured",
        "hardware.gpus_per_node": f"Source: chosen, ranks are processes and take turns, {date}",
        "hardware.host_bytes_per_s": f"Source: copies {here}",
        "kernels": f"Source: copies {here}",
        "kernels.sms": f"Source: one thread a rank, {date}",
        "kernels.block_rows": f"Source: torch CPU flash attention, smallest block, {date}",
        "kernels.whole_keys": f"Source: torch CPU flash attention, block of keys, {date}",
        "kernels.forward": f"Source: torch CPU flash attention, one thread, {here}",
        "kernels.backward": f"Source: torch CPU flash attention, one thread, {here}",
        "links.near": f"Source: gloo isend and irecv of two ranks at once, {here}",
        "links.near_one_way": f"Source: gloo send and recv, {here}",
        "links.near_collective": f"Source: gloo all-to-all of two ranks, {here}",
        "links.far": f"Source: {same}",
        "links.far_alone": f"Source: {same}",
        "effects.eager": f"Source: a process has no host beside it, {date}",
        "errors": f"Source: shapes and sizes that were not fitted, {date}",
    }
