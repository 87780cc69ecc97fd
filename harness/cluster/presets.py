"""A cluster: nodes of GPUs, their speeds, and the links between them, in SI units.

Numbers come from datasheets, with a few measured constants where no datasheet has one; each names
its source on its line. Clusters that were measured carry a calibration (`fitted`), which both
clocks then prefer (docs/adr/0007-two-clocks.md); `Cluster.calibration` says in every result which
it was.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.cluster.calibration import LINEAR_EFFICIENCY, Calibration, calibration, load
from harness.cluster.kernel_choice import with_kernel
from harness.cluster.machine import Cluster, Gpu, Link
from harness.errors import UnsupportedError
from patterns.outside import did_you_mean

# Sources of the numbers below, by short name.
#   h100    NVIDIA H100 Tensor Core GPU datasheet, SXM5: dense figures, half of those with sparsity
#   ndr     NVIDIA ConnectX-7 datasheet: one port of NDR InfiniBand, 400 Gb/s
#   profile kernel and transfer tables of an 8-node H100 cluster, published with UltraAttn (SC'25):
#           FlashAttention 2.5.7, NCCL 2.21, head_dim 128, bfloat16
H100_SXM = Gpu(
    name="H100 SXM5 80GB",
    flops_per_s=989.4e12,  # Source: h100, BF16 tensor core
    flops_per_s_float32=66.9e12,  # Source: h100, FP32
    flops_per_s_float64=66.9e12,  # Source: h100, FP64 tensor core
    efficiency_forward=0.42,  # Source: profile, 419 TFLOP/s at 128K tokens, 32 heads, full
    efficiency_backward=0.35,  # Source: profile, 342 TFLOP/s at 128K tokens, 32 heads, full
    efficiency_linear=LINEAR_EFFICIENCY,
    memory_bytes=80_000_000_000,  # Source: h100, GPU memory
    memory_bandwidth_bytes_per_s=3.35e12,  # Source: h100, GPU memory bandwidth
    kernel_start_s=5e-6,  # Assumed; profile's smallest kernel takes 12 us with its host launch
)
_NVLINK_4 = Link(
    bandwidth_bytes_per_s=450e9,  # Source: h100, NVLink 900 GB/s, half of it per direction
    latency_s=10e-6,  # Source: profile, 10.3 us for 8 KB in one direction
)
_NDR = Link(
    bandwidth_bytes_per_s=50e9,  # Source: ndr, 400 Gb/s per direction
    latency_s=18e-6,  # Source: profile, 18.0 and 18.7 us for 8 KB
)
_PCIE_5 = Link(
    bandwidth_bytes_per_s=64e9,  # Source: h100, PCIe Gen5 128 GB/s, half of it per direction
    latency_s=10e-6,  # Assumed: as NVLink
)


def h100(nodes: int) -> Cluster:
    """A cluster of 8-GPU H100 nodes with one 400 Gb/s NIC per GPU."""
    return Cluster(
        name=f"h100-{nodes}x8",
        nodes=nodes,
        gpus_per_node=8,  # Source: h100, HGX H100 8-GPU
        gpu=H100_SXM,
        nvlink=_NVLINK_4,
        nic=_NDR,
        host_link=_PCIE_5,
        host_launch_s=70e-6,  # Source: profile, a ring step of 3 launches takes 0.20 to 0.25 ms
        calibration="datasheet, not calibrated",
    )


def measured(fitted: Calibration) -> Cluster:
    """The cluster of a calibration."""
    forward, backward, links = fitted.kernels.forward, fitted.kernels.backward, fitted.links
    near, far, sheet = fitted.effects.near, fitted.effects.far, fitted.hardware
    peak = fitted.peak_flops_per_s
    return Cluster(
        name=fitted.name,
        nodes=sheet.nodes,
        gpus_per_node=sheet.gpus_per_node,
        gpu=Gpu(
            name=sheet.gpu,
            flops_per_s=sheet.flops_per_s,
            flops_per_s_float32=sheet.flops_per_s_float32,
            flops_per_s_float64=sheet.flops_per_s_float64,
            # The fastest pair of a call, so that bounds stay below every kernel's time.
            efficiency_forward=forward.flops_per_s / min(1, forward.causal) / peak,
            efficiency_backward=backward.flops_per_s / min(1, backward.causal) / peak,
            efficiency_linear=LINEAR_EFFICIENCY,
            memory_bytes=sheet.memory_bytes,
            memory_bandwidth_bytes_per_s=fitted.kernels.memory_bandwidth_bytes_per_s,
            kernel_start_s=forward.launch_s,
        ),
        nvlink=Link(
            bandwidth_bytes_per_s=links.near.bytes_per_s * near.share,
            latency_s=links.near.latency_s + near.handshake_s,
        ),
        nic=Link(
            bandwidth_bytes_per_s=links.far.bytes_per_s * far.share,
            latency_s=links.far.latency_s + far.handshake_s,
        ),
        host_link=replace(_PCIE_5, bandwidth_bytes_per_s=sheet.host_bytes_per_s),
        host_launch_s=fitted.effects.eager.kernel_s,
        calibration=f"calibration {fitted.id}",
        fitted=fitted,
    )


def h100_today() -> Cluster:
    """The links and hosts of h100-hamming with the attention kernel that frameworks run today."""
    fitted = with_kernel(calibration("h100-hamming"), "flash-attn-3")
    return replace(measured(fitted), name="h100")


def cluster_with(machine: Cluster, text: str) -> Cluster:
    """A cluster with options as they are typed behind its name: `kernel=cudnn`.

    Raises:
        ValueError: An option or its value is unknown, or the cluster was never measured.
    """
    for option in text.split(","):
        key, _, value = option.partition("=")
        if key != "kernel" or not value:
            raise ValueError(f"cluster option ({option}) is unknown; choose from kernel=NAME")
        if machine.fitted is None:
            raise ValueError(
                f"cluster ({machine.name}) has datasheet numbers and no kernel model; "
                "kernel= needs a calibrated cluster"
            )
        machine = replace(measured(with_kernel(machine.fitted, value)), name=machine.name)
    return machine


_FITTED = ("h100-hamming", "dgx-h100", "h800", "a800", "a100", "h200", "local-cpu")

CLUSTERS: Mapping[str, Cluster] = {
    c.name: c
    for c in (
        *(measured(calibration(name)) for name in _FITTED),
        h100_today(),
        h100(8),
        h100(1),
        h100(2),
    )
}
"""The presets, the default first: measured, so that its times have an expected error."""

DEFAULT_CLUSTER = _FITTED[0]


def cluster(name: str = DEFAULT_CLUSTER) -> Cluster:
    """Return a preset, or the cluster of a calibration file.

    Args:
        name: Of a preset; or a path that ends in `.toml`, of a file that `calibrate` wrote or that
            has the same form. Options may follow a colon: `h100:kernel=cudnn`.

    Raises:
        ValueError: Unknown name, with the choices; an unknown option; or a file that is not a
            calibration.
    """
    plain, colon, options = name.partition(":")
    if colon:
        return replace(cluster_with(cluster(plain), options), name=name)
    if name.endswith(".toml"):
        return measured(load(Path(name)))
    if name not in CLUSTERS:
        raise ValueError(
            f"cluster ({name}) is unknown{did_you_mean(name, CLUSTERS)}; choose from "
            f"{', '.join(CLUSTERS)}, or give the path of "
            "a .toml file that `calibrate` wrote"
        )
    return CLUSTERS[name]


def require(machine: Cluster, cp: int) -> None:
    """Refuse more ranks than there are GPUs.

    Raises:
        UnsupportedError: Names the presets that are large enough.
    """
    if cp > machine.gpus:
        larger = tuple(name for name, c in CLUSTERS.items() if c.gpus >= cp)
        raise UnsupportedError(
            f"cluster {machine.name}: cp ({cp}) must not exceed its {machine.gpus} GPUs",
            (*(f"--cluster {name}" for name in larger), f"cp {machine.gpus}"),
        )
