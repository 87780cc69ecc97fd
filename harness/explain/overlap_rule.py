"""Whether a ring's transfers can hide behind its kernels, at peak rates of known devices."""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.cluster.presets import h100
from harness.plan.problem import Dtype, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLink:
    """A device and the link that a ring's keys take.

    Attributes:
        name: For tables.
        flops_per_s: Dense bfloat16 or float16 peak.
        bandwidth_bytes_per_s: Of one device, one direction.
        source: Where both numbers stand.
    """

    name: str
    flops_per_s: float
    bandwidth_bytes_per_s: float
    source: str


_H100 = h100(1)

LINKS = (
    DeviceLink(
        name="A100, NVLink",
        flops_per_s=312e12,  # NVIDIA A100 datasheet, bfloat16 tensor core, dense
        bandwidth_bytes_per_s=300e9,  # NVIDIA A100 datasheet, NVLink 600 GB/s, half per direction
        source="A100 datasheet: 312 TFLOP/s, NVLink 600 GB/s both ways",
    ),
    DeviceLink(
        name="A100, InfiniBand",
        flops_per_s=312e12,  # as above
        bandwidth_bytes_per_s=12.5e9,  # HDR100, 100 Gb/s; arXiv:2310.01889, table 2, "12.5"
        source="A100 datasheet; 100 Gb/s as in arXiv:2310.01889, table 2 (it has 24.5 thousand)",
    ),
    DeviceLink(
        name="H100, NVLink",
        flops_per_s=_H100.gpu.flops_per_s,
        bandwidth_bytes_per_s=_H100.nvlink.bandwidth_bytes_per_s,
        source="H100 SXM datasheet: 989.4 TFLOP/s dense, NVLink 900 GB/s both ways",
    ),
    DeviceLink(
        name="H100, InfiniBand",
        flops_per_s=_H100.gpu.flops_per_s,
        bandwidth_bytes_per_s=_H100.nic.bandwidth_bytes_per_s,
        source="H100 SXM datasheet: 989.4 TFLOP/s dense; ConnectX-7 datasheet: 400 Gb/s",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """Whether a ring's transfers can hide behind its kernels over one link.

    Attributes:
        link: Name of the link.
        block_tokens: Shortest block that hides them, at peak rates, if no pair is masked.
        hidden: Whether the plan's blocks are that long.
        source: Where the rates stand.
    """

    link: str
    block_tokens: float
    hidden: bool
    source: str


def hiding_block_tokens(
    problem: Problem, link: DeviceLink, *, heads_q: int | None = None, heads_kv: int | None = None
) -> float:
    """Return the shortest block of a ring that hides its transfer: c >= (F / B) (b / 2) (m / n).

    A block of c queries and c keys takes 2 c^2 n (d_k + d_v) flops, and its keys and values are
    c m (d_k + d_v) b bytes, for n query heads, m KV heads and b bytes per element. With as many
    KV heads as query heads, in bfloat16, c >= F / B. At peak rates and without latency, so a real
    ring needs longer blocks; a pattern that masks a part of each block, longer by that part.

    Args:
        problem: Its heads and dtype.
        link: Rates F and B.
        heads_q: n of one rank; None = all of the problem's.
        heads_kv: m of one rank; None = all of the problem's.

    Source:
        Liu et al., Ring Attention, arXiv:2310.01889, section 3.
    """
    rates = link.flops_per_s / link.bandwidth_bytes_per_s
    n, m = heads_q or problem.heads_q, heads_kv or problem.heads_kv
    return rates * problem.dtype.bytes / 2 * m / n


def hidings(problem: Problem, heads: Iterable[int], block_tokens: int) -> tuple[Hiding, ...]:
    """Say of each link whether blocks of so many tokens hide a ring's transfers over it.

    Args:
        problem: Its heads and dtype; without 16-bit rates nothing is said.
        heads: Query heads of each rank, as bit sets.
        block_tokens: Queries that meet each visiting block of keys.
    """
    if problem.dtype not in (Dtype.BFLOAT16, Dtype.FLOAT16):
        return ()  # the rates are those of 16-bit products
    fullest = max(heads, key=int.bit_count)
    held = problem.kv_heads(fullest).bit_count()
    found = []
    for link in LINKS:
        shortest = hiding_block_tokens(problem, link, heads_q=fullest.bit_count(), heads_kv=held)
        found.append(
            Hiding(
                link=link.name,
                block_tokens=shortest,
                hidden=block_tokens >= shortest,
                source=link.source,
            )
        )
    return tuple(found)
