"""The training stack around attention: tensors saved, recomputed, tiled and offloaded.

The same stack carries every strategy. What released code adds to its strategy, the strategy says
itself; see `released`.
"""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from harness.cluster.machine import Cluster, Link
from harness.memory.counting import ALGORITHM, Counting, Use
from harness.planning.chosen import Chosen
from harness.planning.strategy import PLAIN, Holding, Released


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Options of a training run, of batch 1, in bfloat16 with FSDP over all ranks.

    Attributes:
        checkpoint: Keep only the input of each block, and run the block again in backward.
        offload: Keep those inputs on the host, all but the first.
        tiled: MLP, norms and loss in tiles of tokens, run again in backward.
        state_bytes: Per parameter: float32 master, gradient and two moments of AdamW.
    """

    checkpoint: bool = True
    offload: bool = True
    tiled: bool = True
    state_bytes: int = 16  # Source: released scripts of arXiv:2602.21196, AdamW in float32, FSDP2


DEFAULT_STACK = Stack()

HOST_BYTES = 1_600_000_000_000
"""Host memory of a node that holds what is offloaded.

Inferred, not published: UPipe ran 8B at 5M with 1240 GiB and FPDT 32B at 4M with about 1450; FPDT,
which also rests q, k, v, out and their gradients there, has no 8B result at 5M, about 1500 GiB.
"""

STEP_TOKENS = 2**20
"""Steps of contexts that are tried, per node: as far apart as in the published runs."""


# How memory is counted ----------------------------------------------------------------------

_ELSEWHERE = frozenset({Use.WEIGHTS, Use.INPUT})  # FSDP's; dy is the stream's gradient


class Column(StrEnum):
    """Which memory of attention is counted."""

    ALGORITHM = "algorithm"
    """Needs of the algorithm: values until their last use, sums as wide as values."""
    IMPLEMENTATION = "implementation"
    """The same flags for all: float32 sums, results of kernels and what kernels hold inside."""
    RELEASED = "released"
    """As the released code of the strategy holds it; see `released`."""


_ALGORITHM = replace(ALGORITHM, apart=_ELSEWHERE)


def released(chosen: Chosen) -> Released[Any] | None:
    """Return how released code runs a strategy; None without released code."""
    known = chosen.strategy.training.released
    return None if known is None else known(chosen.options)


def counting(column: Column, chosen: Chosen) -> Counting:
    """Return how to count a strategy's memory; without released code, as `IMPLEMENTATION`."""
    match column:
        case Column.ALGORITHM:
            return _ALGORITHM
        case Column.IMPLEMENTATION:
            return _held(PLAIN)
        case Column.RELEASED:
            known = released(chosen)
            return _held(PLAIN if known is None else known.holding)


def _held(holding: Holding) -> Counting:
    return replace(_ALGORITHM, **asdict(holding))


def as_planned(column: Column, chosen: Chosen) -> Chosen:
    """Return the strategy as a column plans it: released rings send everything, needed or not."""
    known = released(chosen) if column is Column.RELEASED else None
    return chosen if known is None else replace(chosen, options=known.options)


# What the machine gives ---------------------------------------------------------------------


def as_run(machine: Cluster) -> Cluster:
    """Return a cluster with the rates of the published runs: FlashAttention 3, eager torch, NCCL.

    They are those of H100s and H200s; another cluster keeps its own, and its `calibration` says so.
    Only `efficiency_backward` and `efficiency_linear` are fitted, to the 8B table (docs/models.md).
    """
    if not machine.gpu.name.startswith(("H100", "H200")):
        own = f"{machine.name}'s own rates, not those of a published run: {machine.calibration}"
        return replace(machine, fitted=None, calibration=own)
    gpu = replace(
        machine.gpu,
        efficiency_forward=0.748,  # Source: FlashAttention 3 (arXiv:2407.08608), 740 TFLOP/s
        efficiency_backward=EFFICIENCY_BACKWARD,
        efficiency_linear=EFFICIENCY_LINEAR,
        merge_passes=17.22,  # Source: clusters/h100-hamming.toml, effects.eager.passes
    )
    return replace(
        machine,
        gpu=gpu,
        # Source: clusters/h100-hamming.toml, links.near x effects.near.share, and links.far
        nvlink=Link(bandwidth_bytes_per_s=3.511e11 * 0.414, latency_s=2.7e-5),
        nic=Link(bandwidth_bytes_per_s=3.578e10, latency_s=1.4e-4),
        fitted=None,
        calibration="rates of the published UPipe runs: fitted to its 8B table, see docs/models.md",
    )


# Three numbers are fitted, by least squares of the relative error over the rows of Ring, Ulysses,
# FPDT and UPipe of the 8B table of arXiv:2602.21196 (table 3), and to nothing else.
EFFICIENCY_BACKWARD = 0.58
EFFICIENCY_LINEAR = 0.49
HOST_REST_BYTES_PER_S = 5.8e9
"""How fast the host takes what comes to rest there between two directions."""
