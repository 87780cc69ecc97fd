"""A cluster: nodes of GPUs, their speeds, and the links between them, in SI units."""

from dataclasses import dataclass
from enum import StrEnum

from harness.cluster.calibration import Calibration, PeakRates
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Dtype
from harness.plan.tasks import Memory, Place


class LinkClass(StrEnum):
    """Class of the link between two places."""

    __hash__ = str.__hash__  # an enum's own hash is a python function, and these are hashed a lot

    LOCAL = "local"
    NVLINK = "nvlink"
    NIC = "nic"
    HOST = "host"


def node_of(rank: int, gpus_per_node: int) -> int:
    """The node of a rank: ranks fill nodes in order."""
    return rank // gpus_per_node


def link_between(src: Place, dst: Place, gpus_per_node: int) -> LinkClass:
    """Return the class of the link between two places.

    Raises:
        UnsupportedError: One end is the host memory of another rank.
    """
    if src == dst:
        return LinkClass.LOCAL
    if src.rank == dst.rank:
        return LinkClass.HOST
    if Memory.HOST in (src.memory, dst.memory):
        raise UnsupportedError(
            f"a transfer from rank {src.rank}'s {src.memory} to rank {dst.rank}'s {dst.memory} "
            "must not cross two links",
            ("a transfer over the host link and another between the devices",),
        )
    same = node_of(src.rank, gpus_per_node) == node_of(dst.rank, gpus_per_node)
    return LinkClass.NVLINK if same else LinkClass.NIC


class Runtime(StrEnum):
    """How work reaches the GPU.

    GRAPH: A captured graph: no launch costs host time.
    EAGER: One launch after another by eager torch. Each tensor is a message of its own, a transfer
        between nodes waits for the kernel before it, and merges are separate operations.
    TE: As Transformer Engine: eager torch whose transfers have a stream of their own and move keys
        and values as one message.
    """

    GRAPH = "graph"
    EAGER = "eager-torch"
    TE = "te"

    @property
    def eager(self) -> bool:
        """Whether every launch costs host time."""
        return self is not Runtime.GRAPH

    @property
    def own_stream(self) -> bool:
        """Whether transfers have a stream of their own, though the host launches them."""
        return self is Runtime.TE


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(PeakRates):
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

    def attention_flops_per_s(self, dtype: Dtype, direction: Direction) -> float:
        """Rate of a large attention kernel, floating-point operations per second."""
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
        name: The name as a user types it.
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

    def shortage(self, peak_bytes: int) -> str:
        """Say that a plan whose fullest rank holds these bytes does not fit a GPU; else nothing."""
        room = self.gpu.memory_bytes
        return "" if peak_bytes <= room else f"needs {peak_bytes} bytes of {room} on a GPU"

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return node_of(rank, self.gpus_per_node)

    def link_class(self, src: Place, dst: Place) -> LinkClass:
        """Class of the link between two places; see `link_between`."""
        return link_between(src, dst, self.gpus_per_node)

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
