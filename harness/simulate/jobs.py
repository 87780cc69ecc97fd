"""Jobs of a plan and their needs, with sizes left open: plan once, time at many sizes.

Two problems that differ only in the lengths of their chunks and in the number of heads have the
same tasks. A skeleton keeps, per job, what it needs in units of a small reference problem: kernel
calls (rows x columns), and bytes that scale with queries or with keys. `job_graph` takes it from a
plan; `job_costs.Pricer` gives its jobs seconds, for `contention.run_jobs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from harness.simulate.tile_calls import TimedCall


class Size(NamedTuple):
    """Elements that scale with query or with key tokens, by what they are.

    Attributes:
        plain_q: Of inputs and finished results that scale with queries.
        plain_kv: With keys.
        result_q: Of partial results that scale with queries.
        result_kv: With keys.
        row_q: Of values that a query has one of: lse, delta.
    """

    plain_q: int = 0
    plain_kv: int = 0
    result_q: int = 0
    result_kv: int = 0
    row_q: int = 0


class NeedKind(StrEnum):
    """Kind of a job; every price list must have a price for each.

    COPY moves inside the memory of a GPU, HOST between a GPU and its host, TRANSFER between two
    ranks. A DELAY takes no time.
    """

    __hash__ = str.__hash__  # an enum's own hash is a python function, and jobs are many

    TILE = "tile"
    MERGE = "merge"
    FINISH = "finish"
    DELTA = "delta"
    LINEAR = "linear"
    COPY = "copy"
    HOST = "host"
    TRANSFER = "transfer"
    COLLECTIVE = "collective"
    DELAY = "delay"


class Need(NamedTuple):
    """Needs of one job.

    Attributes:
        kind: The kind of the job.
        calls: Kernel calls of a tile.
        size: What a transfer moves; what a rank gets of a collective from its own node; what a tile
            folds into accumulators that exist already; what another kernel reads and writes.
        far: Of a transfer, whether it leaves the node. Of a collective, whether some leg does.
        far_size: Receipts of a rank from other nodes in a collective.
        far_peers: From how many ranks it gets that.
        sharing: By how many ranks of a node NCCL shares what enters the node.
        delta: Of a tile, whether it reads delta and not out.
        flops: Of a projection, floating-point operations; they scale with tokens.
        again: Of a tile of a backward plan, whether it attends forward, to make what was not saved.
        sliced: Of a tile, whether it has some of its rank's queries only.
        messages: Of a transfer, how many tensors it moves.
    """

    kind: NeedKind
    calls: tuple[TimedCall, ...] = ()
    size: Size = Size()
    far: bool = False
    far_size: Size = Size()
    far_peers: int = 0
    sharing: int = 1
    delta: bool = False
    flops: int = 0
    again: bool = False
    sliced: bool = False
    messages: int = 1


class LaunchCounts(NamedTuple):
    """Launches of a rank's host so far.

    Attributes:
        calls: Kernel calls of tiles.
        folds: Tiles that fold into accumulators.
        merges: Merges of what arrived.
        moves: Batches of a send and a receive, and collectives.
        again: Kernel calls of forward tiles in a backward plan; they are not among `calls`.
        far: Of `moves`, those that leave the node.
        slices: Tiles on some of the rank's queries.
        messages: Of `moves`, the tensors that move in them.
    """

    calls: int = 0
    folds: int = 0
    merges: int = 0
    moves: int = 0
    again: int = 0
    far: int = 0
    slices: int = 0
    messages: int = 0


class UntimedJob(NamedTuple):
    """A job without times, see `contention.Job`.

    Attributes:
        queues: As there; of a collective, the ports that its legs cross.
        ranks: As there.
        after: As there.
        need: Needs of the job.
        task: The task that it is of.
        peers: Of a collective, the ranks that exchange.
        launched: Per rank, what its host must have launched before this can run.
        latest: Of a transfer between nodes, per rank the last kernel launched before it.
        gates: As there.
    """

    queues: tuple[int, ...]
    ranks: tuple[int, ...]
    after: tuple[int, ...]
    need: Need
    task: int
    peers: tuple[int, ...] = ()
    launched: tuple[LaunchCounts, ...] = ()
    latest: tuple[int, ...] = ()
    gates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Parts in the order in which queues serve them, and the reference lengths.

    Attributes:
        parts: The jobs.
        seqlen_q: Query tokens of the reference problem.
        seqlen_kv: Its key tokens.
        folded: Jobs of the plan before folding.
        alike: Per rank that is left, how many ranks it stands for, itself included.
        lonely: Whether at most one rank of each node sends to other nodes.
        kinds: Kinds of its transfers, with commas between; see `cluster.transfer_kinds`.
    """

    parts: tuple[UntimedJob, ...]
    seqlen_q: int
    seqlen_kv: int
    folded: int
    alike: Mapping[int, int]
    lonely: bool
    kinds: str = ""
