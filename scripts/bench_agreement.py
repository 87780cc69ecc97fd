#!/usr/bin/env python3
"""Cost of comparing each call over the ranks: training steps with and without it, in turns.

    .venv/bin/python scripts/bench_agreement.py --seqlen 8k --pairs 21

Each pair is one step (attend, forward and backward) that compares and one that does not, in an
order that changes; the ratio is that of the seconds of the slower rank, median and quantiles.
"""

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist

from harness.attention import call as attention_call
from harness.attention import context_parallel
from harness.base.json_fields import json_text
from harness.plan.problem import Dtype
from harness.ranks.team import Member, Team
from harness.terminal.arguments import count, dtype, heads, length

WARMUP = 2
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step that compares, and how many times those of one that does not."""

    cp: int
    seqlen: int
    pairs: int
    step_s: float
    ratio: float
    p20: float
    p80: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A configuration that is timed."""

    strategy: str
    cp: int
    seqlen: int
    heads: tuple[int, int]
    head_dim: int
    dtype: Dtype
    pairs: int


def steps(member: Member, cell: Cell) -> list[tuple[float, float]]:
    """Seconds of each pair: with comparing, without (a job for a `Team`)."""
    del member
    heads_q, heads_kv = cell.heads
    cp = context_parallel(
        strategy=cell.strategy, seqlen=cell.seqlen, heads_q=heads_q, heads_kv=heads_kv
    )
    tokens, kind = cp.queries.tokens(cp.rank), getattr(torch, cell.dtype.value)
    q, k, v = (
        torch.randn(1, number, tokens, cell.head_dim, dtype=kind, requires_grad=True)
        for number in (heads_q, heads_kv, heads_kv)
    )
    dout, real, found = torch.randn_like(q), attention_call.compare_calls, []
    for pair in range(WARMUP + cell.pairs):
        both = {}
        for comparing in (True, False) if pair % 2 else (False, True):
            attention_call.compare_calls = real if comparing else lambda *_: None
            dist.barrier()
            begin = time.perf_counter()
            cp.attend(q, k, v).backward(dout)
            both[comparing] = time.perf_counter() - begin
        if pair >= WARMUP:
            found.append((both[True], both[False]))
    attention_call.compare_calls = real
    return found


def cost(team: Team, cell: Cell) -> Cost:
    """Join the ranks: a step takes as long as its slower rank."""
    ranks = team.run(steps, TIMEOUT_S, cell)
    pairs = [tuple(map(max, zip(*each, strict=True))) for each in zip(*ranks, strict=True)]
    ratios = sorted(comparing / plain for comparing, plain in pairs)
    return Cost(
        cp=cell.cp,
        seqlen=cell.seqlen,
        pairs=len(pairs),
        step_s=statistics.median(comparing for comparing, _ in pairs),
        ratio=statistics.median(ratios),
        p20=ratios[len(ratios) // 5],
        p80=ratios[len(ratios) * 4 // 5],
    )


def main() -> int:
    """Print one line, or one row as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="zigzag", help="name, such as ring")
    parser.add_argument("--cp", type=count, default=2, help="ranks, such as 2")
    parser.add_argument("--seqlen", type=length, default=8192, help="tokens, such as 8k")
    parser.add_argument("--heads", type=heads, default=(8, 2), help="query/KV heads, such as 8/2")
    parser.add_argument("--head-dim", type=count, default=64, help="width, such as 64")
    parser.add_argument("--dtype", type=dtype, default=Dtype.BFLOAT16, help="such as float32")
    parser.add_argument("--pairs", type=count, default=21, help="steps of each kind, such as 21")
    parser.add_argument("--json", action="store_true", help="print the row as JSON")
    args = parser.parse_args()
    names = (field.name for field in fields(Cell))
    cell = Cell(**{name: getattr(args, name) for name in names})
    with Team(cell.cp) as team:
        row = cost(team, cell)
    if args.json:
        print(json_text([asdict(row)]))
    else:
        print(
            f"{cell.strategy} cp={row.cp} S={row.seqlen}: a step of {row.step_s * 1e3:.1f} ms "
            f"takes {row.ratio:.4f} times one without comparing ({row.p20:.4f} to {row.p80:.4f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
