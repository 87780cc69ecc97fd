#!/usr/bin/env python3
"""Time saved by leaving out useless transfers on sparse patterns, measured and predicted.

Two strategies that attend alike and send differently (`ring` and `ring-classic`, by default) take
turns in one team of gloo processes. The prediction knows of a plan only each rank's kernel calls
and bytes: seconds of the kernel calls alone, all ranks at once, so with their imbalance, plus bytes
of the rank that sends most, times the seconds a byte takes when all ranks send around a ring.

    .venv/bin/python scripts/bench_sparse.py --cp 4 --seqlen 8192
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from harness.base.json_fields import json_text
from harness.check.cell import planned_traffic, start
from harness.execute.interpreter import execute
from harness.execute.kernel_floor import kernel_calls
from harness.execute.transport import GroupTransport
from harness.measure.cells import quantile
from harness.oracle.reference import inputs_of
from harness.plan.problem import Dtype
from harness.prepare.verified_plans import planned_for
from harness.ranks.team import Member, Team
from harness.records.config import Config, Where
from harness.terminal.arguments import count, dtype, heads, length, listed

PATTERNS = ("strided", "global_local", "star", "streaming")
WARMUP = 2
TIMEOUT_S = 1800.0
PROBE_BYTES = 4 * 2**20
PROBES = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One pattern; ratios are classic / pruned, so above 1 where leaving out saves."""

    pattern: str
    pruned: str
    classic: str
    cp: int
    seqlen: int
    ratio: float
    p20: float
    p80: float
    predicted: float
    pruned_s: float
    classic_s: float
    kernels_s: float
    pruned_bytes: int
    classic_bytes: int
    seconds_per_byte: float
    pairs: int

    @property
    def off(self) -> float:
        """How far the measured ratio is from the predicted one, as a share of it."""
        return self.ratio / self.predicted - 1


def rank_times(
    member: Member, pruned: str, classic: str, config: Config, pairs: int
) -> list[tuple[float, ...]]:
    """Seconds of pruned, classic, kernels alone and a probe of the links (a job for a `Team`)."""
    runs = (
        _run(pruned, config, member.rank),
        _run(classic, config, member.rank),
        kernel_calls(planned_for(replace(config, strategy=pruned)).forward, member.rank),
        _probe(member),
    )
    found = []
    for number in range(WARMUP + pairs):
        times = [0.0] * len(runs)
        for at in (0, 1, 2, 3) if number % 2 else (1, 0, 2, 3):
            dist.barrier()
            begin = time.perf_counter()
            runs[at]()
            times[at] = time.perf_counter() - begin
        if number >= WARMUP:
            found.append(tuple(times))
    return found


def _run(text: str, config: Config, rank: int) -> Callable[[], None]:
    program = planned_for(replace(config, strategy=text)).forward
    inputs = start(program.plan, inputs_of(config.problem, 0), {}, (rank,))

    def run() -> None:
        execute(program, inputs, GroupTransport())

    return run


def _probe(member: Member) -> Callable[[], None]:
    """Send around the ring, all ranks at once."""
    mine, theirs = (torch.ones(PROBE_BYTES, dtype=torch.uint8) for _ in range(2))
    after, before = (member.rank + 1) % member.cp, (member.rank - 1) % member.cp

    def run() -> None:
        for tag in range(PROBES):
            requests = [dist.isend(mine, after, tag=tag), dist.irecv(theirs, before, tag=tag)]
            for request in requests:
                assert request is not None
                request.wait()

    return run


def compare(team: Team, pruned: str, classic: str, config: Config, pairs: int) -> Row:
    """Time one pattern and predict it."""
    ranks = team.run(rank_times, TIMEOUT_S, pruned, classic, config, pairs)
    slowest = [tuple(map(max, zip(*row, strict=True))) for row in zip(*ranks, strict=True)]
    medians = [statistics.median(times) for times in zip(*slowest, strict=True)]
    ratios = [other / mine for mine, other, _, _ in slowest]
    sent = [
        max(
            planned_traffic(planned_for(replace(config, strategy=name)).forward.plan)[0].values(),
            default=0,
        )
        for name in (pruned, classic)
    ]
    per_byte = medians[3] / (PROBES * PROBE_BYTES)
    least, most = (medians[2] + size * per_byte for size in sent)
    return Row(
        pattern=config.pattern,
        pruned=pruned,
        classic=classic,
        cp=config.cp,
        seqlen=config.seqlen_q,
        ratio=statistics.median(ratios),
        p20=quantile(ratios, 0.2),
        p80=quantile(ratios, 0.8),
        predicted=most / least,
        pruned_s=medians[0],
        classic_s=medians[1],
        kernels_s=medians[2],
        pruned_bytes=sent[0],
        classic_bytes=sent[1],
        seconds_per_byte=per_byte,
        pairs=len(slowest),
    )


def main() -> int:
    """Print a line per pattern; 1 if a ratio is not the predicted one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pruned", default="ring", help="the strategy that leaves out")
    parser.add_argument("--classic", default="ring-classic", help="the one that sends everything")
    parser.add_argument("--patterns", type=listed(str), default=PATTERNS, help="who attends whom")
    parser.add_argument("--cp", type=count, default=4, help="degree")
    parser.add_argument("--seqlen", type=length, default=8192, help="tokens, all ranks")
    parser.add_argument("--heads", type=heads, default=(8, 8), help="query/KV heads")
    parser.add_argument("--head-dim", type=count, default=64, help="width")
    parser.add_argument("--dtype", type=dtype, default=Dtype.BFLOAT16, help="precision")
    parser.add_argument("--pairs", type=count, default=15, help="per pattern")
    parser.add_argument(
        "--tolerance", type=float, default=0.25, help="how far measured may be from predicted"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on stdout")
    parser.add_argument(
        "-o", "--output", type=Path, help="write the rows as JSON here, each at once"
    )
    args = parser.parse_args()
    rows = []
    with Team(args.cp) as team:
        for pattern in args.patterns:
            config = Config(
                strategy="",
                pattern=pattern,
                cp=args.cp,
                seqlen_q=args.seqlen,
                seqlen_kv=args.seqlen,
                heads_q=args.heads[0],
                heads_kv=args.heads[1],
                head_dim=args.head_dim,
                dtype=args.dtype,
                transport=Where.GLOO,
            )
            rows.append(compare(team, args.pruned, args.classic, config, args.pairs))
            print(_line(rows[-1]), file=sys.stderr if args.json else sys.stdout, flush=True)
            body = json_text([asdict(row) for row in rows], indent=1)
            if args.output:
                args.output.write_text(body + "\n")
    if args.json:
        print(body)
    return 0 if all(abs(row.off) <= args.tolerance for row in rows) else 1


def _line(row: Row) -> str:
    return (
        f"{row.pattern:<13} {row.classic} / {row.pruned} {row.ratio:.2f} "
        f"({row.p20:.2f}-{row.p80:.2f}), predicted {row.predicted:.2f}"
        f" ({row.off:+.0%})  {row.classic_s * 1e3:.0f} / "
        f"{row.pruned_s * 1e3:.0f} ms, kernels alone {row.kernels_s * 1e3:.0f} ms, sent "
        f"{row.classic_bytes / 2**20:.1f} / {row.pruned_bytes / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
