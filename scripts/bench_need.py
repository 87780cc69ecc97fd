#!/usr/bin/env python3
"""Time transfers of just what is needed against transfers of whole chunks, in pairs.

In one team of gloo processes both take turns, each first in every other pair, so that what disturbs
the machine disturbs both. Whole chunks are the same strategy with `align=` as long as the sequence.
A sample is the slowest rank; a ratio is the time with what is needed over that with whole chunks,
so below 1 where it is faster. Bytes are those that all ranks receive, counted at each call of the
transport; the script fails if they are not the plan's.

    .venv/bin/python scripts/bench_need.py --cp 2,4 --pairs 41
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch.distributed as dist

from harness.base.json_fields import json_text
from harness.check.cell import start
from harness.execute.interpreter import execute
from harness.execute.transport import GroupTransport
from harness.measure.cells import quantile
from harness.oracle.reference import inputs_of
from harness.plan.problem import Direction, Dtype
from harness.plan.sizes import traffic
from harness.prepare.verified_plans import planned_for
from harness.ranks.team import Member, Team
from harness.records.config import Config, Where
from harness.terminal.arguments import count, dtype, heads, length, listed

WARMUP = 3
TIMEOUT_S = 1800.0
PATTERNS = ("window:left=128", "documents:preset=megatron")
NAMES = ("ring", "zigzag", "allgather", "owner")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison of both ways; times in seconds, medians over pairs.

    Attributes:
        strategy: With the options that both have.
        pattern: Who attends whom.
        direction: Forward or backward alone.
        cp: Degree.
        seqlen: Tokens over all ranks.
        ratio: Needed / whole.
        p20: Of the pairs' ratios.
        p80: Of the pairs' ratios.
        cpu_ratio: Processor seconds of the busiest rank, needed / whole.
        needed_s: Transfers of what is needed.
        whole_s: Transfers of whole chunks.
        needed_bytes: Received by all ranks.
        whole_bytes: As above.
        pairs: How many.
    """

    strategy: str
    pattern: str
    direction: str
    cp: int
    seqlen: int
    ratio: float
    p20: float
    p80: float
    cpu_ratio: float
    needed_s: float
    whole_s: float
    needed_bytes: int
    whole_bytes: int
    pairs: int


Sample = tuple[float, float, float, float]
"""Wall-clock seconds of the needed and of whole chunks, then processor seconds of both."""


def rank_times(
    member: Member, needed: Config, whole: Config, pairs: int
) -> tuple[list[Sample], tuple[int, ...]]:
    """Seconds of both ways, per pair, and bytes that this rank receives (a job for a `Team`)."""
    runs = [_run(config, member.rank) for config in (needed, whole)]
    moved = tuple(run().traffic.received_bytes.get(member.rank, 0) for run in runs)
    found: list[Sample] = []
    for number in range(WARMUP + pairs):
        times = [0.0] * 4
        # The first of a pair finds the caches as the other left them, so they take turns.
        for at in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            runs[at]()
            times[at] = time.perf_counter() - begin
            times[2 + at] = time.process_time() - busy
        if number >= WARMUP:
            found.append((times[0], times[1], times[2], times[3]))
    return found, moved


def _run(config: Config, rank: int) -> Callable[[], GroupTransport]:
    plans = planned_for(config)
    tensors = inputs_of(config.problem, 0)
    program, saved = plans.forward, {}
    if config.direction is Direction.BACKWARD:
        begun = start(program.plan, tensors, {}, (rank,))
        saved = execute(program, begun, GroupTransport()).results
        program = plans.backward
    inputs = start(program.plan, tensors, saved, (rank,))

    def run() -> GroupTransport:
        transport = GroupTransport()
        execute(program, inputs, transport)
        return transport

    return run


def compare(team: Team, config: Config, pairs: int) -> Row:
    """Time one strategy both ways.

    Raises:
        AssertionError: Ranks received other bytes than planned.
    """
    apart = "," if ":" in config.strategy else ":"
    whole = replace(config, strategy=f"{config.strategy}{apart}align={config.seqlen_kv}")
    ranks = team.run(rank_times, TIMEOUT_S, config, whole, pairs)
    by_pair = zip(*(times for times, _ in ranks), strict=True)
    slowest = [tuple(map(max, zip(*row, strict=True))) for row in by_pair]
    received = [sum(moved[at] for _, moved in ranks) for at in (0, 1)]
    for one, size in zip((config, whole), received, strict=True):
        plans = planned_for(one)
        program = plans.forward if one.direction is Direction.FORWARD else plans.backward
        assert size == sum(traffic(program.plan)[1]), (one.strategy, size)
    ratios = [row[0] / row[1] for row in slowest]
    return Row(
        strategy=config.strategy,
        pattern=config.pattern,
        direction=config.direction.value,
        cp=config.cp,
        seqlen=config.seqlen_q,
        ratio=statistics.median(ratios),
        p20=quantile(ratios, 0.2),
        p80=quantile(ratios, 0.8),
        cpu_ratio=statistics.median(row[2] / row[3] for row in slowest),
        needed_s=statistics.median(row[0] for row in slowest),
        whole_s=statistics.median(row[1] for row in slowest),
        needed_bytes=received[0],
        whole_bytes=received[1],
        pairs=len(slowest),
    )


def main() -> int:
    """Compare, print a line per row, and the rows as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cp", type=listed(count), default=(2, 4), help="degrees")
    parser.add_argument("--seqlen", type=length, default=8192, help="tokens, all ranks")
    parser.add_argument("--patterns", type=listed(str), default=PATTERNS, help="with edges")
    parser.add_argument("--strategies", type=listed(str), default=NAMES, help="to compare")
    parser.add_argument("--pairs", type=count, default=21, help="per row")
    parser.add_argument("--heads", type=heads, default=(8, 8), help="query and KV heads")
    parser.add_argument("--head-dim", type=count, default=64, help="width")
    parser.add_argument("--dtype", type=dtype, default=Dtype.FLOAT32, help="precision")
    parser.add_argument("--threads", type=count, default=1, help="of each rank")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on stdout")
    args = parser.parse_args()
    rows: list[Row] = []
    for cp in args.cp:
        with Team(cp, threads=args.threads) as team:
            for pattern, direction, name in product(args.patterns, Direction, args.strategies):
                config = Config(
                    strategy=name,
                    pattern=pattern,
                    direction=direction,
                    cp=cp,
                    seqlen_q=args.seqlen,
                    seqlen_kv=args.seqlen,
                    heads_q=args.heads[0],
                    heads_kv=args.heads[1],
                    head_dim=args.head_dim,
                    dtype=args.dtype,
                    transport=Where.GLOO,
                )
                rows.append(compare(team, config, args.pairs))
                print(_line(rows[-1]), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json_text([asdict(row) for row in rows]))
    return 0


def _line(row: Row) -> str:
    return (
        f"cp={row.cp} {row.pattern:<26} {row.direction:<8} {row.strategy:<10} "
        f"{row.ratio:.3f} ({row.p20:.3f}-{row.p80:.3f})  processor {row.cpu_ratio:.3f}  "
        f"{row.needed_s * 1e3:.1f} ms, whole {row.whole_s * 1e3:.1f} ms  "
        f"{row.needed_bytes / 2**20:.2f} MiB, whole {row.whole_bytes / 2**20:.2f} MiB"
    )


if __name__ == "__main__":
    sys.exit(main())
