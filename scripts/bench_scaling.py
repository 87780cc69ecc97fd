#!/usr/bin/env python
"""Seconds to plan and prove at growing lengths and numbers of documents: do they grow too fast?

    .venv/bin/python scripts/bench_scaling.py [--quick] [--part lengths|documents|calls]

lengths: every strategy that follows a rule, but `fpdt`, whose plans grow with the square of the
length as it cuts parts of a fixed length, x every pattern, 64/8 heads, cp 64, S 16K to 4M; a row
per strategy and pattern, the slower direction of each length. documents: one packing of 128K tokens
at cp 8, 10 to 8,000 documents. calls: a rank's forward kernel calls alone, 10 to 8,000 documents,
beside one dense causal call over as many tokens. The tables are Markdown. Seconds refer to the
processor, so that other work on the machine counts less. The exit status is 1 if a plan took longer
than --limit.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from harness.errors import UnsupportedError
from harness.execute.kernel_floor import kernel_calls
from harness.plan.kernel_calls import lower, lowering
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.tasks import Tile
from harness.records.defaults import usual
from harness.terminal.arguments import count, length, listed, positive_number
from harness.verify.proof import verify
from strategies import DIRECT, LAYER_STRATEGIES, strategy

PATTERNS = (
    *("full", "causal", "window:left=4096", "strided", "global_local", "star", "streaming"),
    "documents",
)
EXTRA = ("allgather:placement=stripe", "allgather:placement=zigzag", "usp:placement=stripe")
DOCUMENTS = (10, 100, 500, 1000, 2000, 4000, 8000)
PARTS = ("lengths", "documents", "calls")


def packing(documents: int, seqlen: int) -> str:
    """A packing of random lengths, the same each time."""
    cuts = sorted(random.Random(documents).sample(range(1, seqlen), documents - 1))
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, seqlen], strict=True)]
    return "documents:lengths=" + "+".join(map(str, lengths))


def proved(text: str, problem: Problem, direction: Direction) -> tuple[float, Program]:
    """Seconds to plan and prove, with no kernel calls remembered, and what came of it."""
    lowering.cache_clear()
    begin = time.process_time()
    program = verify(strategy(text).plan(problem, direction))
    return time.process_time() - begin, program


def calls_of(program: Program) -> int:
    """Kernel calls of the rank that has most."""
    plan = program.plan
    found = [0] * plan.problem.cp
    for task in plan.tasks:
        if isinstance(task, Tile):
            q, kv = (plan.chunks(piece) for piece in task.reads[:2])
            found[task.place.rank] += len(lower(plan.problem.pattern, q, kv))
    return max(found)


def lengths(names: Sequence[str], seqlens: Sequence[int], patterns: Sequence[str]) -> Iterator[str]:
    """Rows of the first table; what a strategy refuses is a dash."""
    yield "| strategy | pattern | " + " | ".join(f"{size // 1024}K" for size in seqlens) + " |"
    yield "|---|---|" + "---|" * len(seqlens)
    for name in names:
        for pattern in patterns:
            cells = [_slower(name, pattern, seqlen) for seqlen in seqlens]
            texts = ["–" if cell is None else f"{cell:.2f}" for cell in cells]
            yield f"| {name} | {pattern} | {' | '.join(texts)} |"


def _slower(name: str, pattern: str, seqlen: int) -> float | None:
    text = packing(1000, seqlen) if pattern == "documents" else pattern
    problem = usual(text, 64, seqlen, 64, 8)
    if name in LAYER_STRATEGIES:
        problem = replace(problem, hidden=problem.heads_q * problem.head_dim)
    try:
        return max(proved(name, problem, direction)[0] for direction in Direction)
    except UnsupportedError:
        return None


def documents(names: Sequence[str], counts: Sequence[int]) -> Iterator[str]:
    """Rows of the second table: both directions' seconds, and forward calls of a rank."""
    yield "| documents | " + " | ".join(f"{name}, s | calls" for name in names) + " |"
    yield "|---|" + "---|---|" * len(names)
    for number in counts:
        problem = usual(packing(number, 128 * 1024), 8, 128 * 1024, 32, 8)
        cells = []
        for name in names:
            both = [proved(name, problem, direction) for direction in Direction]
            cells.append(f"{sum(s for s, _ in both):.2f} | {calls_of(both[0][1])}")
        yield f"| {number} | {' | '.join(cells)} |"


def calls(seqlen: int, counts: Sequence[int]) -> Iterator[str]:
    """Rows of the third table: seconds of the best of three."""
    torch.set_num_threads(1)  # threads that wait for one another take processor time
    yield "| mask | calls | s |"
    yield "|---|---|---|"
    for name in ("causal", *counts):
        text = packing(name, seqlen) if isinstance(name, int) else name
        problem = replace(usual(text, 1, seqlen, 8, 2), head_dim=64, head_dim_v=64)
        program = proved("ring", problem, Direction.FORWARD)[1]
        run = kernel_calls(program, 0)
        took = []
        for _ in range(3):
            begin = time.process_time()
            run()
            took.append(time.process_time() - begin)
        label = f"{name} documents" if isinstance(name, int) else "dense causal"
        yield f"| {label} | {calls_of(program)} | {min(took):.3f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 1 if a plan took too long."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few lengths, strategies and counts")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--strategies", type=listed(str), help="of lengths (default: all direct)")
    parser.add_argument("--patterns", type=listed(str), default=PATTERNS, help="of lengths")
    parser.add_argument("--seqlen", type=listed(length), help="of lengths")
    parser.add_argument("--documents", type=listed(count), help="of documents and calls")
    parser.add_argument(
        "--limit", type=positive_number, default=2.0, help="seconds that a plan may take"
    )
    args = parser.parse_args(argv)
    steady = [name for name, each in DIRECT.items() if each.training.grows is None]
    names = ("zigzag", "stripe", "ulysses") if args.quick else (*steady, *EXTRA)
    seqlens = args.seqlen or tuple(2**k for k in ((14, 22) if args.quick else range(14, 23, 2)))
    counts = args.documents or (DOCUMENTS[:1] + DOCUMENTS[3:4] if args.quick else DOCUMENTS)
    slow = False
    for part in args.part or PARTS:
        print(f"\n## {part}\n")
        match part:
            case "lengths":
                rows = lengths(args.strategies or names, seqlens, args.patterns)
            case "documents":
                rows = documents(("zigzag", "stripe", "ulysses", "ring"), counts)
            case _:
                rows = calls(length("4k") if args.quick else length("16k"), counts)
        for row in rows:
            print(row, flush=True)
            if part == "lengths":
                slow |= any(_seconds(cell) > args.limit for cell in row.split("|")[3:-1])
    return int(slow)


def _seconds(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:  # a heading, a dash
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
