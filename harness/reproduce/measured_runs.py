"""Measured runs of published harnesses: which plan each row of a table is.

What no strategy here plans, and what is known to be wrong or only noise, is skipped with its
reason. Tables are told apart by their columns:

    measured_dist_attn.csv              grids, rings, zigzag and stripe of the UltraAttn harness
    measured_bsa_h100.csv               its allocations of block-sparse patterns
    magi_h100_fa3_attention.csv         throughput of eight methods on FlashAttention 3
    a800_loongtrain_double_ring.csv     forward, and forward and backward, of a double ring
"""

from collections.abc import Mapping

from harness.reproduce.case import CLUSTER_OF, EAGER, FLASH_2, FLASH_3, Case
from harness.reproduce.chart_rows import METHODS, RATE, both_ways, charted_case
from harness.reproduce.ultraattn_rows import ultraattn_case

_RUN = {"gpu", "nodes", "gpus_per_node", "heads", "direction", "strategy", "time_s"}
_PAIR = {"gpu", "nodes", "gpus_per_node", "S", "heads_q", "heads_kv", "fwd_ms", "fwd_bwd_ms"}
_CHART = {"gpu", "mask", "pass", "cp_size", "seqlen_per_gpu", "hq", "hkv", "method", RATE}


def lacking(columns: set[str]) -> list[str]:
    """Columns that a table lacks to be one of measured runs; none if it is one."""
    if any(needed <= columns for needed in (_RUN, _PAIR, _CHART)):
        return []
    return sorted(_RUN - columns)


def cases_of(row: Mapping[str, str]) -> tuple[Case | str, ...]:
    """Read a row, which may time two directions; a text says why it is skipped."""
    charted = RATE in row
    kernel = FLASH_3 if charted else FLASH_2
    known = [gpu for gpu, used in CLUSTER_OF if used == kernel]
    if row["gpu"] not in known:
        gpu = row["gpu"] or "(none)"
        return (f"there is no calibration of {gpu}; there is one of {', '.join(known)}",)
    labels = tuple(METHODS) if charted else ("ultra", *EAGER)
    label = row["method" if charted else "strategy"]
    try:
        if "fwd_bwd_ms" in row:
            return both_ways(row)
        if label not in labels:
            reason = f"strategy {label or '(none)'} does not exist here; {', '.join(labels)} do"
            return (reason,)
        return (charted_case(row) if charted else ultraattn_case(row),)
    except KeyError as error:
        return (f"the row cannot be read: it has no column {error}",)
    except (TypeError, AttributeError):
        return ("the row cannot be read: it ends before its last column",)
    except ValueError as error:
        return (f"the row cannot be read: {type(error).__name__}: {error}",)
