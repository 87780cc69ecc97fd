"""Effects that published cost models leave out, each a named term that can be switched off.

Sizes are fitted per cluster (see `harness.fit`), on whole runs, because no kernel's or link's own
measurement shows them.
"""

from dataclasses import dataclass
from enum import StrEnum

from harness.cluster.link_model import Crowd


class Effect(StrEnum):
    """A term that can be switched off.

    HOST: Host time of every launch of the eager runtime.
    BLOCKING: A transfer that comes while a kernel's blocks fill the GPU waits for SMs: till a wave
        of blocks ends, and in eager torch, whose streams have no priority, till the last begins.
    INTERFERENCE: Transfers hold SMs that kernels lack, and move slower beside kernels.
    CONTENTION: A GPU with several transfers at once, in both directions or with changing peers,
        gets less than a pair's bandwidth.
    MERGE: Folding partial results into accumulators.
    START: The time until a plan's first kernel runs.
    JOIN: Many nodes do not begin at once: a graph over more than four waits for the last.
    IMBALANCE: Ranks with unequal work; off, every rank's tiles take the mean.
    """

    HOST = "host"
    BLOCKING = "blocking"
    INTERFERENCE = "interference"
    CONTENTION = "contention"
    MERGE = "merge"
    START = "start"
    JOIN = "join"
    IMBALANCE = "imbalance"


ALL = frozenset(Effect)

FEW_NODES = 4
"""Up to so many nodes begin as one: grids over 2 and 4 nodes of A800 show no such wait."""

SAID: dict[Effect, str] = {
    Effect.HOST: "host time of every launch, in eager torch",
    Effect.BLOCKING: "transfers wait while kernels fill the GPU",
    Effect.INTERFERENCE: "transfers hold SMs and slow beside kernels",
    Effect.CONTENTION: "a GPU's transfers at once share its links",
    Effect.MERGE: "folding partial results into accumulators",
    Effect.START: "the time until the first kernel runs",
    Effect.JOIN: "the time until the last of many nodes begins",
    Effect.IMBALANCE: "unequal work; off, all ranks take the mean",
}
"""Each in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eager:
    """The eager torch runtime: what a launch costs the host, and how it merges.

    Attributes:
        kernel_s: Host time of a kernel call and the Python around it.
        backward_s: The same, backward.
        transfer_s: Host time of an isend and an irecv.
        merge_s: Host time of merging with separate operations.
        passes: How often merging partial outputs moves the accumulators, element by element;
            other merges have fewer operations or more, see `Pricer.fold_s`.
        far_s: Host time of a batch that leaves the node, beyond that of one that does not.
        slice_s: Host time of taking and writing back slices, in a step that has some queries only.
    """

    kernel_s: float
    backward_s: float
    transfer_s: float
    merge_s: float
    passes: float
    far_s: float
    slice_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Sizes of all effects on one cluster.

    Attributes:
        near: Transfers inside a node.
        far: Transfers between nodes.
        large_bytes: From this size on a transfer holds `large_sms` more.
        large_sms: How many more.
        start_s: Time until a plan's first kernel runs.
        passes: How often a fused merge moves the accumulators: read the part, read and write it.
        eager: The eager torch runtime.
        join_s: Time until the last of more than `FEW_NODES` nodes has begun, in a captured graph;
            eager hosts have drifted apart by more.
    """

    near: Crowd
    far: Crowd
    large_bytes: float
    large_sms: float
    start_s: float
    passes: float
    eager: Eager
    join_s: float = 0.0
