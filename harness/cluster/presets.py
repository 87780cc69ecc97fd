"""A cluster: nodes of GPUs, their speeds, and the links between them, in SI units.

Numbers come from datasheets, with a few measured constants where no datasheet has one; each names
its source on its line. Clusters that were measured carry a calibration (`fitted`), which
the cost function then prefers; `Cluster.calibration` says in every result which it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from harness.cluster.calibration import LINEAR_EFFICIENCY, Calibration, calibration, load
from harness.errors import UnsupportedError
from harness.plan.plan import Memory, Place
from harness.plan.problem import Direction, Dtype


class LinkClass(StrEnum):
    """What bytes cross on their way from one place to another."""

    __hash__ = str.__hash__  # an enum's own hash is a python function, and these are hashed a lot

    LOCAL = "local"
    NVLINK = "nvlink"
    NIC = "nic"
    HOST = "host"


class Runtime(StrEnum):
    """How work reaches the GPU: a captured graph, or one launch after another by eager torch."""

    GRAPH = "graph"
    EAGER = "eager-torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        name: Its model.
        flops_per_s: Dense peak of bfloat16 and float16 matrix products.
        flops_per_s_float32: Dense peak of float32 products.
        flops_per_s_float64: Dense peak of float64 products.
        efficiency_forward: Share of the peak that a large forward attention kernel reaches.
        efficiency_backward: The same, backward.
        efficiency_linear: The same, for large plain matrix products.
        memory_bytes: Capacity.
        memory_bandwidth_bytes_per_s: Read and write together.
        kernel_start_s: Fixed time of a kernel call on the device, whoever launches it.
        merge_passes: How often merging a partial out moves it: 3 in one kernel (read the part,
            read and write the sum).
    """

    name: str
    flops_per_s: float
    flops_per_s_float32: float
    flops_per_s_float64: float
    efficiency_forward: float
    efficiency_backward: float
    efficiency_linear: float
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    kernel_start_s: float
    merge_passes: float = 3.0

    def __post_init__(self) -> None:
        """Check ranges; raises ValueError with the value received and the rule."""
        for name in ("efficiency_forward", "efficiency_backward", "efficiency_linear"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be in (0, 1]")
        for name in (
            "flops_per_s",
            "flops_per_s_float32",
            "flops_per_s_float64",
            "memory_bandwidth_bytes_per_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be positive")

    def peak_flops_per_s(self, dtype: Dtype) -> float:
        """Dense peak of one precision."""
        match dtype:
            case Dtype.FLOAT64:
                return self.flops_per_s_float64
            case Dtype.FLOAT32:
                return self.flops_per_s_float32
            case Dtype.BFLOAT16 | Dtype.FLOAT16:
                return self.flops_per_s

    def attention_flops_per_s(self, dtype: Dtype, direction: Direction) -> float:
        """What a large attention kernel reaches."""
        forward = direction is Direction.FORWARD
        efficiency = self.efficiency_forward if forward else self.efficiency_backward
        return self.peak_flops_per_s(dtype) * efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of one GPU's port.

    Attributes:
        bandwidth_bytes_per_s: Bytes over time of a large message.
        latency_s: Time of an empty message.
    """

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        """Check ranges; raises ValueError with the value received and the rule."""
        if self.bandwidth_bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError(f"{self} must have a positive bandwidth and no negative latency")

    def seconds(self, size_bytes: int) -> float:
        """Time of a message of its own."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes x GPUs. Ranks fill nodes in order: rank r sits on node r // gpus_per_node.

    Every GPU has its own NVLink port, its own NIC and its own link to host memory, each full
    duplex.

    Attributes:
        name: What a user types.
        nodes: How many nodes.
        gpus_per_node: GPUs of a node, joined by NVLink through a switch.
        gpu: Every GPU.
        nvlink: A GPU's port inside the node, per direction.
        nic: A GPU's port between nodes, per direction.
        host_link: A GPU's link to host memory, per direction.
        host_launch_s: Host time of one launch in the eager runtime.
        calibration: Where the numbers come from.
        fitted: Kernels, links and effects as measured; None leaves the datasheet's.
    """

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    nvlink: Link
    nic: Link
    host_link: Link
    host_launch_s: float
    calibration: str
    fitted: Calibration | None = None

    def __post_init__(self) -> None:
        """Check ranges; raises ValueError with the value received and the rule."""
        for name in ("nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        if self.host_launch_s < 0:
            raise ValueError(f"host_launch_s ({self.host_launch_s}) must not be negative")

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.gpus_per_node

    def require(self, cp: int) -> None:
        """Refuse more ranks than there are GPUs.

        Raises:
            UnsupportedError: Names the presets that are large enough.
        """
        if cp > self.gpus:
            larger = tuple(name for name, c in CLUSTERS.items() if c.gpus >= cp)
            raise UnsupportedError(
                f"cluster {self.name}: cp ({cp}) must not exceed its {self.gpus} GPUs",
                (*(f"--cluster {name}" for name in larger), f"cp {self.gpus}"),
            )

    def link_class(self, src: Place, dst: Place) -> LinkClass:
        """What bytes cross between two places.

        Raises:
            UnsupportedError: One end is the host memory of another rank.
        """
        if src == dst:
            return LinkClass.LOCAL
        if src.rank == dst.rank:
            return LinkClass.HOST
        if Memory.HOST in (src.memory, dst.memory):
            raise UnsupportedError(
                f"cluster {self.name}: a transfer from {src} to {dst} must not cross two links",
                ("a transfer over the host link and another between the devices",),
            )
        same = self.node(src.rank) == self.node(dst.rank)
        return LinkClass.NVLINK if same else LinkClass.NIC

    def link(self, kind: LinkClass) -> Link:
        """The port of a link class; a local copy goes through the GPU's own memory."""
        match kind:
            case LinkClass.NVLINK:
                return self.nvlink
            case LinkClass.NIC:
                return self.nic
            case LinkClass.HOST:
                return self.host_link
            case LinkClass.LOCAL:
                # A copy reads and writes every byte.
                half = self.gpu.memory_bandwidth_bytes_per_s / 2
                return Link(bandwidth_bytes_per_s=half, latency_s=self.gpu.kernel_start_s)


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


_FITTED = ("h100-hamming", "dgx-h100", "h800", "a800", "a100", "h200", "local-cpu")

CLUSTERS: Mapping[str, Cluster] = {
    c.name: c
    for c in (*(measured(calibration(name)) for name in _FITTED), h100(8), h100(1), h100(2))
}
"""The presets, the default first: measured, so that its times have an expected error."""

DEFAULT = _FITTED[0]


def cluster(name: str = DEFAULT) -> Cluster:
    """Return a preset, or the cluster of a calibration file.

    Args:
        name: Of a preset; or a path that ends in `.toml`, of a file that `calibrate` wrote or that
            has the same form.

    Raises:
        ValueError: Unknown name, with the choices; or a file that is no calibration.
    """
    if name.endswith(".toml"):
        return measured(load(Path(name)))
    if name not in CLUSTERS:
        raise ValueError(
            f"cluster ({name}) is unknown; choose from {', '.join(CLUSTERS)}, or give the path of "
            "a .toml file that `calibrate` wrote"
        )
    return CLUSTERS[name]
