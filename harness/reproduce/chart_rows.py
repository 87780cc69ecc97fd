"""Rows of charts and tables of other harnesses than UltraAttn's: methods as strategies here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.reproduce.case import DENSE, FLASH_3, HEAD_DIM, UNREADABLE, Case

PublishedRow = Mapping[str, str]

RATE = "tflops_per_gpu_approx"
"""The column that tells a chart of throughput."""
_NODE = 8  # GPUs of a node of the charts' cluster


@dataclass(frozen=True, slots=True)
class ChartMethod:
    """A method of a chart as a strategy here.

    Attributes:
        text: The strategy, as it is typed; `{split}` is its split of ranks.
        full: The same for a full pattern, if another.
        known: Whether this is the plan that ran; else ours stands in for one whose split of ranks,
            or whose algorithm, the chart does not state.
    """

    text: str
    full: str = ""
    known: bool = False


# Ranks: Ulysses inside a node, a ring between nodes. LoongTrain's ring has windows, which ours has
# not; MagiAttention deals chunks by its own heuristic and casts keys in stages.
# Source: MagiAttention repository, exps/dist_attn/run_benchmark.py (CP_GROUP_META) and baselines,
# which implements them with parts of Transformer Engine.
METHODS = {
    "ulysses": ChartMethod("ulysses", known=True),
    "ring_p2p": ChartMethod("zigzag", "ring", known=True),
    "ring_allgather": ChartMethod("allgather:placement=zigzag", "allgather", known=True),
    "usp": ChartMethod("usp:{split}", known=True),
    "loongtrain": ChartMethod("usp:{split}"),
    "hybrid_dcp": ChartMethod("zigzag", "ring", known=True),
    "magi_a2av": ChartMethod("allgather:placement=zigzag", "allgather"),
    "magi_native": ChartMethod("allgather:placement=zigzag", "allgather"),
}


def charted_case(row: PublishedRow) -> Case | str:
    """A row of a chart: flops as its harness counts them, half of a square where it is causal."""
    cp, heads, dim = int(row["cp_size"]), int(row["hq"]), int(row["head_dim"])
    seqlen = int(row["seqlen_per_gpu"]) * cp
    if row["mask"] not in DENSE or row["pass"] not in ("fwd", "bwd"):
        return f"mask {row['mask']} or pass {row['pass']} does not exist here"
    if dim != HEAD_DIM or (cp > _NODE and cp % _NODE):
        return f"head_dim {dim} on {cp} GPUs was not measured"
    flops = 4.0 * seqlen * seqlen * heads * dim * int(row["batch"])
    flops *= (0.5 if row["mask"] == "causal" else 1.0) * (2.5 if row["pass"] == "bwd" else 1.0)
    rate = float(row[RATE]) * 1e12
    seconds = flops / cp / rate if rate else math.inf
    if not 0 < seconds < math.inf:
        return UNREADABLE
    method = METHODS[row["method"]]
    text = (method.full or method.text) if row["mask"] == "full" else method.text
    return Case(
        gpu=row["gpu"],
        nodes=-(-cp // _NODE),
        gpus_per_node=min(cp, _NODE),
        pattern=row["mask"],
        direction=row["pass"],
        strategy=row["method"],
        heads=heads * int(row["batch"]),
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        rows=0,
        mode="normal",
        measured_s=seconds,
        author_s=None,
        kernel=FLASH_3,
        heads_kv=int(row["hkv"]) * int(row["batch"]),
        text=text.format(split=f"{min(cp, _NODE)}x{-(-cp // _NODE)}"),
        known=method.known,
        runtime="te",
    )


def both_ways(row: PublishedRow) -> tuple[Case | str, ...]:
    """A row of forward, and of forward and backward; backward is the difference.

    Raises:
        KeyError, TypeError, ValueError: It is no such row.
    """
    name, _, options = row["strategy"].partition(" ")
    if name != "double_ring":
        return (f"strategy {name or '(none)'} does not exist here; double_ring does",)
    forward_s, both_s = float(row["fwd_ms"]) / 1e3, float(row["fwd_bwd_ms"]) / 1e3
    if int(row["head_dim"]) != HEAD_DIM or not 0 < forward_s < both_s < math.inf:
        return (UNREADABLE,)
    batch = int(row["batch"])
    forward = Case(
        gpu=row["gpu"],
        nodes=int(row["nodes"]),
        gpus_per_node=int(row["gpus_per_node"]),
        pattern=row["pattern"],
        direction="fwd",
        strategy=name,
        heads=int(row["heads_q"]) * batch,
        seqlen_q=int(row["S"]),
        seqlen_kv=int(row["S"]),
        rows=0,
        mode="normal",
        measured_s=forward_s,
        author_s=None,
        heads_kv=int(row["heads_kv"]) * batch,
        text=f"{name}:{options}" if options else name,
    )
    # LoongTrain adds what arrives from other nodes at the end of a window, ours at its beginning.
    return forward, replace(forward, direction="bwd", measured_s=both_s - forward_s, known=False)
