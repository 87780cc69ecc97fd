#!/usr/bin/env python3
"""Time our strategies against other projects' code, in pairs that run one after another.

In one team of gloo processes ours and the peer take turns, each first in every other pair, so that
what disturbs the machine disturbs both. Ours is called through `harness.attention`, the peer
through its own function, both with autograd where gradients are asked for. A sample is the slowest
rank; the ratio of a pair is ours over the peer's, below 1 where ours is faster. The floor is the
kernel calls of our busiest rank and nothing else, each on contiguous heads-first tensors.

    .venv/bin/python scripts/bench_peers.py --cp 2 --seqlen 4096,8192 --pairs 15
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.attention import context_parallel
from harness.base.json_fields import json_text
from harness.execute.kernel_floor import kernel_calls
from harness.measure.cells import quantile
from harness.oracle.inputs import make_inputs
from harness.peers.run import adapted, shards_of
from harness.plan.problem import Dtype, Problem
from harness.plan.tasks import Tensor
from harness.planning.peers import peer, refuse
from harness.prepare.verified_plans import planned
from harness.ranks.team import Member, Team
from harness.records.config import Config, Where
from harness.terminal.arguments import count, length, listed

WARMUP = 2
FLOOR_EVERY = 5
"""The kernels alone are timed in every so-manyth pair: they vary little and take as long."""
TIMEOUT_S = 1800.0
BOTH = "forward+backward"
QKV = (Tensor.Q, Tensor.K, Tensor.V)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison; times in seconds, medians over pairs.

    Attributes:
        ours: Our strategy.
        peer: The peer.
        direction: `forward`, or `forward+backward`.
        cp: Degree.
        seqlen: Tokens over all ranks.
        ratio: Ours / peer.
        p20: Of the pairs' ratios.
        p80: Of the pairs' ratios.
        floor_ratio: Ours / floor.
        cpu_ratio: Processor seconds of the busiest rank, ours / peer: without waiting, and little
            touched by what else runs on the machine.
        ours_s: Ours.
        peer_s: The peer.
        floor_s: The floor.
        pairs: How many.
    """

    ours: str
    peer: str
    direction: str
    cp: int
    seqlen: int
    ratio: float
    p20: float
    p80: float
    floor_ratio: float
    cpu_ratio: float
    ours_s: float
    peer_s: float
    floor_s: float
    pairs: int


def couples(cp: int) -> list[tuple[str, str]]:
    """Ours and the peer that does the same, by name."""
    u = max(cp // 2, 1)
    return [
        ("ring", "peer:ring-flash-attn/ring"),
        ("zigzag", "peer:ring-flash-attn/zigzag"),
        ("stripe", "peer:ring-flash-attn/stripe"),
        ("ulysses", "peer:yunchang/ulysses"),
        (f"usp:{u}x{cp // u}", f"peer:yunchang/usp-zigzag:{u}x{cp // u}"),
        ("allgather", "peer:ring-flash-attn/llama3"),
    ]


def rank_times(
    member: Member, ours: str, theirs: str, config: Config, direction: str, pairs: int
) -> list[tuple[float, ...]]:
    """Seconds of ours, the peer and the kernels alone, per pair (a job for a `Team`).

    Returns:
        Per pair, wall-clock times of ours, the peer and the kernels, then processor times of the
        same runs; NaN where the kernels were not run.
    """
    problem = config.problem
    runs = (
        _ours(ours, problem, direction),
        _theirs(theirs, problem, member.rank, direction),
        _kernels(ours, problem, member.rank, direction),
    )
    found = []
    for number in range(WARMUP + pairs):
        times = [math.nan] * 2 * len(runs)
        # The first of a pair finds the caches as the other left them, so they take turns.
        pair = (0, 1) if number % 2 else (1, 0)
        for at in (*pair, 2) if number % FLOOR_EVERY == WARMUP else pair:
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            runs[at]()
            times[at] = time.perf_counter() - begin
            times[len(runs) + at] = time.process_time() - busy
        if number >= WARMUP:
            found.append(tuple(times))
    return found


def _ours(text: str, problem: Problem, direction: str) -> Callable[[], None]:
    cp = context_parallel(
        seqlen=problem.seqlen_q,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        strategy=text,
        pattern=problem.pattern,
    )
    whole = make_inputs(problem, 0)
    return _call(
        cp.attend,
        [cp.shard(whole[tensor]) for tensor in QKV],
        cp.shard(whole[Tensor.DOUT]),
        direction,
    )


def _theirs(text: str, problem: Problem, rank: int, direction: str) -> Callable[[], None]:
    local = adapted(peer(text), problem, rank, torch.device("cpu"))
    given = shards_of(make_inputs(problem, 0), local.positions)
    return _call(local.attend, [given[t] for t in QKV], given[Tensor.DOUT], direction)


def _call(
    attend: Callable[..., torch.Tensor],
    qkv: Sequence[torch.Tensor],
    dout: torch.Tensor,
    direction: str,
) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            attend(*qkv)

    def both() -> None:
        torch.autograd.grad(attend(*qkv), qkv, dout)

    for x in qkv:
        x.requires_grad_(direction == BOTH)
    return both if direction == BOTH else forward


def _kernels(text: str, problem: Problem, rank: int, direction: str) -> Callable[[], None]:
    """The kernel calls of a rank alone."""
    plans = planned(problem, text)
    programs = (plans.forward, plans.backward) if direction == BOTH else (plans.forward,)
    parts = [kernel_calls(program, rank) for program in programs]

    def run() -> None:
        for part in parts:
            part()

    return run


def compare(team: Team, ours: str, theirs: str, config: Config, direction: str, pairs: int) -> Row:
    """Time one couple."""
    ranks = team.run(rank_times, TIMEOUT_S, ours, theirs, config, direction, pairs)
    slowest = [tuple(map(max, zip(*row, strict=True))) for row in zip(*ranks, strict=True)]
    ratios = [row[0] / row[1] for row in slowest]
    ours_s, peer_s = (statistics.median(row[at] for row in slowest) for at in (0, 1))
    floor_s = statistics.median(row[2] for row in slowest if not math.isnan(row[2]))
    return Row(
        ours=ours,
        peer=theirs,
        direction=direction,
        cp=config.cp,
        seqlen=config.seqlen_q,
        ratio=statistics.median(ratios),
        p20=quantile(ratios, 0.2),
        p80=quantile(ratios, 0.8),
        floor_ratio=ours_s / floor_s,
        cpu_ratio=statistics.median(row[3] / row[4] for row in slowest),
        ours_s=ours_s,
        peer_s=peer_s,
        floor_s=floor_s,
        pairs=len(slowest),
    )


def main() -> int:
    """Compare, print a line per row, and the rows as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cp", type=listed(count), default=(2,), help="degrees")
    parser.add_argument("--seqlen", type=listed(length), default=(4096,), help="tokens, all ranks")
    parser.add_argument("--direction", type=listed(str), default=("forward", BOTH), help="which")
    parser.add_argument("--strategies", type=listed(str), help="of ours (default: all couples)")
    parser.add_argument("--pairs", type=count, default=15, help="per row")
    parser.add_argument("--heads", type=count, default=8, help="query and KV heads")
    parser.add_argument("--head-dim", type=count, default=64, help="width")
    parser.add_argument("--threads", type=count, default=1, help="of each rank")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on stdout")
    parser.add_argument(
        "-o", "--output", type=Path, help="write the rows as JSON here, each at once"
    )
    args = parser.parse_args()
    rows: list[Row] = []
    for cp in args.cp:
        with Team(cp, threads=args.threads) as team:
            for config, direction, (ours, theirs) in _cells(args, cp):
                refuse(peer(theirs), config.problem)
                row = compare(team, ours, theirs, config, direction, args.pairs)
                rows.append(row)
                print(_line(row), file=sys.stderr if args.json else sys.stdout, flush=True)
                if args.output:
                    body = json_text([asdict(row) for row in rows], indent=1)
                    args.output.write_text(body + "\n")
    if args.json:
        print(json_text([asdict(row) for row in rows]))
    return 0


def _cells(args: argparse.Namespace, cp: int) -> Iterator[tuple[Config, str, tuple[str, str]]]:
    for seqlen in args.seqlen:
        config = Config(
            strategy="",
            pattern="causal",
            cp=cp,
            seqlen_q=seqlen,
            seqlen_kv=seqlen,
            heads_q=args.heads,
            heads_kv=args.heads,
            head_dim=args.head_dim,
            dtype=Dtype.BFLOAT16,
            transport=Where.GLOO,
        )
        for direction in args.direction:
            for couple in couples(cp):
                name = couple[0].partition(":")[0]
                if not args.strategies or name in args.strategies:
                    yield config, direction, couple


def _line(row: Row) -> str:
    return (
        f"cp={row.cp} S={row.seqlen:<6} {row.direction:<17} {row.ours:<8} / {row.peer:<30} "
        f"{row.ratio:.3f} ({row.p20:.3f}-{row.p80:.3f})  processor {row.cpu_ratio:.3f}  "
        f"ours {row.ours_s * 1e3:.1f} ms  peer {row.peer_s * 1e3:.1f} ms  "
        f"floor {row.floor_s * 1e3:.1f} ms ({row.floor_ratio:.3f})"
    )


if __name__ == "__main__":
    sys.exit(main())
