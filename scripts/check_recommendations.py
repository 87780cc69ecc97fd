"""Compare recommendations with exhaustive sweeps over the same candidates, on twenty problems.

    .venv/bin/python scripts/check_recommendations.py          # all
    .venv/bin/python scripts/check_recommendations.py --numbers 3 17  # some

An exhaustive sweep simulates every cell of every candidate, one after another, and reads times and
memory from its records; the rule of ties is applied to them here once more. Exit status 1 if a
recommendation differs.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness.cluster.presets import cluster
from harness.plan.problem import Direction
from harness.plan.tasks import Scope
from harness.recommend.answer import Recommendation, recommend
from harness.recommend.question import Asked
from harness.report.best import NEAR
from harness.sweep.simulate_cells import simulate_cell

DOCUMENTS = "documents:lengths=3000+500+4692"
PROBLEMS: tuple[dict[str, Any], ...] = (
    {},
    {"cp": 6, "seqlen": 6000, "heads_q": 7, "heads_kv": 1},
    {"cp": 8, "seqlen": 131072, "heads_q": 32, "heads_kv": 8},
    {"cp": 8, "seqlen": 1048576, "heads_q": 64, "heads_kv": 8},
    {"cp": 8, "named": "h100-8x8", "heads_q": 32, "heads_kv": 8},
    {"cp": 4, "patterns": (("full", 1),)},
    {"cp": 4, "patterns": (("window:left=300", 1),)},
    {"cp": 4, "patterns": (("window:left=300", 5), ("causal", 1))},
    {"cp": 5, "patterns": (("star", 1),), "seqlen": 8200},
    {"cp": 4, "patterns": ((DOCUMENTS, 1),)},
    {"cp": 8, "patterns": ((DOCUMENTS, 1),), "named": "a800"},
    {"cp": 3, "seqlen": 4097, "named": "h800"},
    {"cp": 12, "seqlen": 98304, "heads_q": 24, "heads_kv": 8},
    {"cp": 16, "seqlen": 131072, "heads_q": 32, "heads_kv": 8},
    {"cp": 2, "directions": (Direction.FORWARD,)},
    {"cp": 8, "directions": (Direction.BACKWARD,), "heads_q": 40, "heads_kv": 8},
    {"cp": 4, "memory_bytes": 2**25},
    {"cp": 2, "scope": Scope.LAYER, "hidden": 640, "heads_q": 5, "heads_kv": 5},
    {"cp": 4, "scope": Scope.LAYER, "hidden": 1536, "rotary": 5e5, "memory_bytes": 2**27},
    {"cp": 4, "framework": "megatron", "batch": 2},
)


def question(changed: dict[str, Any]) -> Asked:
    """Return a small problem with some other values."""
    machine = cluster(changed.get("named", "h100-hamming"))
    values: dict[str, Any] = {
        "machine": machine,
        "named": machine.name,
        "cp": 4,
        "seqlen": 8192,
        "heads_q": 12,
        "heads_kv": 4,
        "head_dim": 128,
        "patterns": (("causal", 1),),
        "memory_bytes": machine.gpu.memory_bytes,
    }
    return Asked(**{**values, **changed})


def exhaustive(asked: Asked, left_out: Sequence[str]) -> list[tuple[float, float, int]]:
    """Return time, error and memory of each candidate that runs."""
    found = []
    for name in asked.candidates():
        cells = list(asked.cells(name))
        records = [simulate_cell(cell, {}) for cell, _ in cells]
        times = [record.time_s for record in records if record.time_s is not None]
        peaks = [record.peak_bytes for record in records if record.peak_bytes is not None]
        if name in left_out or len(times) < len(cells) or max(peaks) > asked.memory_bytes:
            continue
        errors = [record.expected_error for record in records]
        error = NEAR if None in errors else max(each for each in errors if each is not None)
        layers = [count for _, count in cells]
        mean_s = sum(s * n for s, n in zip(times, layers, strict=True)) / asked.layers
        found.append((mean_s, error, max(peaks)))
    return found


def differs(asked: Asked, found: Recommendation) -> str:
    """Say in what a recommendation is not the best of an exhaustive sweep; empty if it is."""
    out = [one.strategy for one in found.refused if "needs " not in one.reason]
    rows = exhaustive(asked, out)
    if not rows or found.time_s is None:
        return "" if not rows and found.strategy is None else "one of the two has no answer"
    fastest_s, error, _ = min(rows)
    tied = [row for row in rows if row[0] <= fastest_s * (1 + max(error, row[1]))]
    least = min(row[2] * 10 // asked.memory_bytes for row in tied)
    best = [row for row in tied if row[2] * 10 // asked.memory_bytes == least]
    told = {f"{s:.9e}" for s in (found.time_s, *(one.time_s for one in found.ties))}
    if told != {f"{row[0]:.9e}" for row in tied}:
        return "other ties"
    if f"{found.time_s:.9e}" not in {f"{row[0]:.9e}" for row in best}:
        return "its memory is not the least of the ties"
    return ""


def main() -> int:
    """Compare the problems that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--numbers",
        nargs="*",
        type=int,
        choices=range(len(PROBLEMS)),
        metavar="N",
        help=f"of problems, 0 to {len(PROBLEMS) - 1} (default: all)",
    )
    wanted = parser.parse_args().numbers or range(len(PROBLEMS))
    wrong = 0
    for number in wanted:
        asked = question(PROBLEMS[number])
        found = recommend(asked, elsewhere=False)
        why = differs(asked, found)
        wrong += bool(why)
        print(f"{number:>2} {found.strategy}: {why or 'the best of all'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
