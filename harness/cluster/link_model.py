"""Seconds of one message over one link, from its size: latency, protocol switch, saturation.

Below the switch NCCL uses few channels, above it all: two straight lines, each a latency and a
bandwidth. A curve is for one pair of GPUs that has its ports to itself; what a whole node's
exchange leaves of it is a `Crowd`, fitted on whole plans (see `effects`).

    seconds                      ____/   bandwidth
      ^                    __---
      |       ___----____/         switch
      |  ---'   latency of the small protocol
      +---------------------------------> bytes
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Fitted parameters of one link and use.

    Attributes:
        latency_s: Time of an empty message, small protocol.
        small_bytes_per_s: Bandwidth below the switch.
        switch_bytes: Size from which the large protocol is used.
        large_latency_s: Time of the large line at 0 bytes.
        bytes_per_s: Bandwidth above the switch.
    """

    latency_s: float
    small_bytes_per_s: float
    switch_bytes: float
    large_latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        """Check ranges; raises ValueError with the value received and the rule."""
        if self.small_bytes_per_s <= 0 or self.bytes_per_s <= 0:
            raise ValueError(f"{self} must have positive bandwidths")
        if min(self.latency_s, self.large_latency_s, self.switch_bytes) < 0:
            raise ValueError(f"{self} must have no negative latency and no negative switch")

    def seconds(self, size_bytes: float) -> float:
        """Time of a message."""
        if size_bytes < self.switch_bytes:
            return self.latency_s + size_bytes / self.small_bytes_per_s
        return self.large_latency_s + size_bytes / self.bytes_per_s

    @property
    def most_bytes_per_s(self) -> float:
        """Bytes over seconds, at most: of a very large message, or of one at the switch."""
        below_s = self.latency_s + self.switch_bytes / self.small_bytes_per_s
        return max(self.bytes_per_s, self.switch_bytes / below_s if below_s else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of one cluster, as far as they were measured.

    Attributes:
        near: A pair inside a node, both directions at once.
        near_one_way: The same, one direction at a time.
        far: A pair between nodes while every GPU of the two nodes talks to its peer.
        far_alone: A pair between nodes while all others are silent, as in a ring over nodes.
        near_collective: All-gather of 8 GPUs, by the bytes that a rank receives.
    """

    near: Curve
    near_one_way: Curve
    far: Curve
    far_alone: Curve
    near_collective: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Slowdown of a link by the other transfers and kernels of a plan.

    Attributes:
        handshake_s: Time until both ends of a transfer have found one another.
        share: Of a pair's bandwidth, while an end has other transfers too and no kernel runs; <= 1.
        share_beside: Of that, if a kernel runs at either end; <= 1.
        held_sms: SMs that a transfer holds at each end from its posting to its end.
    """

    handshake_s: float
    share: float
    share_beside: float
    held_sms: float


def crowded_s(curve: Curve, crowd: Crowd, size_bytes: float) -> float:
    """Seconds of a message while all GPUs exchange and no kernel runs."""
    slower = size_bytes / curve.bytes_per_s * (1 / crowd.share - 1)
    return curve.seconds(size_bytes) + crowd.handshake_s + slower
