"""Rows of the tables of UltraAttn's harness: which plan each is, or why it is skipped."""

import math
from collections.abc import Mapping

from harness.reproduce.case import DENSE, HEAD_DIM, UNREADABLE, Case

PublishedRow = Mapping[str, str]

OWN_CHUNKS = {"strided": 16, "global_local": 16, "star": 4, "streaming": 8}
"""Chunks of the published tables of blocks. Source: UltraAttn (SC'25)."""

PAIRED_NODES = 8  # of so many a strided pattern joins pairs; fewer it keeps apart
_MOST_GPUS = 1024  # a ring of so many is planned in a minute
_MOST_SEARCHED = 64  # others take long to search or to lay out
_MODES = ("normal", "nocomm", "nocomp")
_OWNER_NODES = (1, 2, 4, PAIRED_NODES)


def ultraattn_case(row: PublishedRow) -> Case | str:
    """Read a row; a text says why it is skipped.

    Raises:
        KeyError, TypeError, ValueError: It is no such row.
    """
    case = _sparse(row) if "author_predicted_s" in row else _dense(row)
    return case if isinstance(case, str) else _refused(case) or case


def _refused(case: Case) -> str:
    """Reason why a row is inconsistent or cannot be planned; empty if it can."""
    counts = (case.seqlen_q, case.seqlen_kv, case.heads, case.nodes, case.gpus_per_node)
    if not (0 < case.measured_s < math.inf) or min(counts) <= 0:
        return UNREADABLE
    named = (
        ("direction", case.direction, ("fwd", "bwd")),
        ("mode", case.mode, _MODES),
        ("pattern", case.pattern, (*DENSE, *OWN_CHUNKS)),
    )
    for what, name, known in named:
        if name not in known:
            return f"{what} {name or '(none)'} does not exist here; {', '.join(known)} do"
    most = _MOST_GPUS if case.is_eager else _MOST_SEARCHED
    if case.cp > most:
        return f"{case.cp} GPUs are more than the {most} that such plans are made for here"
    if case.strategy.startswith("grid"):
        return _refused_grid(case)
    return "" if case.is_eager else _refused_allocation(case)


def _refused_grid(case: Case) -> str:
    ranks = case.gpus_per_node if case.nodes == 1 else case.nodes
    if not case.rows or ranks % case.rows:
        return f"a grid of {case.rows} rows does not fit {ranks} GPUs or nodes"
    return "" if case.pattern == "full" else f"grids of pattern {case.pattern} do not exist here"


def _refused_allocation(case: Case) -> str:
    if case.pattern in DENSE:
        return f"allocations of pattern {case.pattern} do not exist here"
    if chunks_of(case) % case.cp:
        return f"{chunks_of(case)} chunks of pattern {case.pattern} do not divide by {case.cp} GPUs"
    if case.strategy == "owner" and not case.levels and case.nodes not in _OWNER_NODES:
        return f"pattern strided on {case.nodes} nodes was not measured and is not planned here"
    return ""


def chunks_of(case: Case) -> int:
    """Chunks that a sparse pattern is cut into: its own, or one per GPU if those are more."""
    return max(OWN_CHUNKS[case.pattern], case.cp)


def _dense(row: PublishedRow) -> Case | str:
    if row["gpus_per_node"] == "1":
        return "8 nodes of 1 GPU are an emulation"
    mode, fused = row["mode"] or "normal", row["kernel_tile"] == "1"
    if row["strategy"] == "ultra":
        if row["scheduler"] != "manual":
            return "the allocation of blocks to GPUs is unknown"
        label = "grid-fused" if fused else "grid"
        if mode != "normal" and (fused or row["heads"] != "32"):
            return "the switches nocomm and nocomp do not act on fused plans"
    else:
        label = row["strategy"]
    return Case(
        gpu=row["gpu"],
        nodes=int(row["nodes"]),
        gpus_per_node=int(row["gpus_per_node"]),
        pattern=row["pattern"],
        direction=row["direction"],
        strategy=label,
        heads=_heads(row),
        seqlen_q=int(row["Sq"]),
        seqlen_kv=int(row["Skv"]),
        rows=int(row["Y"] or 0),
        mode=mode,
        measured_s=float(row["time_s"]),
        author_s=None,
    )


def _heads(row: PublishedRow) -> int:
    """Heads of all sequences: a kernel and a transfer take them alike.

    Raises:
        ValueError: The heads have another width than all measured ones.
    """
    if int(row["head_dim"]) != HEAD_DIM:
        raise ValueError(f"head_dim ({row['head_dim']}) must be {HEAD_DIM}, as was measured")
    return int(row["heads"]) * int(row["bs"])


def _sparse(row: PublishedRow) -> Case | str:
    nodes, seqlen = int(row["nodes"]), int(row["S"])
    pattern, levels = row["pattern"], ""
    if row["strategy"] == "ring":
        label = "ring"
    elif row["allocation"] == "device_tile":
        fused = row["kernel_tile"] == "1"
        label, levels = "ultraattn", "node+device+schedule" + ("+kernel" if fused else "")
    elif row["allocation"] == "node_tile":
        label, levels = "owner", "" if nodes == 1 or pattern == "strided" else "node+schedule"
    else:
        return f"allocation {row['allocation'] or '(none)'} does not exist here"
    if pattern == "global_local" and nodes == 8 and seqlen < 256 * 1024:
        return "8 nodes, global+local, under 256K: variants differ up to 12.7 times by noise"
    return Case(
        gpu=row["gpu"],
        nodes=nodes,
        gpus_per_node=int(row["gpus_per_node"]),
        pattern=pattern,
        direction=row["direction"],
        strategy=label,
        heads=_heads(row),
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        rows=0,
        mode="normal",
        measured_s=float(row["time_s"]),
        author_s=float(row["author_predicted_s"]) if row["author_predicted_s"] else None,
        levels=levels,
        known=not levels,  # ties of its integer programs are not published
    )
