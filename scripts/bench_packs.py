"""Seconds to plan, prove and deal a fresh pack of documents, and memory over a thousand of them.

    .venv/bin/python scripts/bench_packs.py --cp 8 --seqlen 64k [--packs 200] [--memory 1000]

Each pack is another pattern of the same lengths, as training meets them: `for_pattern` deals its
tokens, `prepare` plans and proves both directions. Times are processor seconds of this process, so
that other work on the machine counts less; the first pack, which also loads modules, is left out.
"""

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

import torch

from harness.attention import ContextParallel, context_parallel
from harness.errors import UnsupportedError
from harness.terminal.arguments import count, length, listed
from patterns import make_pattern

NAMES = (
    "ring",
    "zigzag",
    "allgather",
    "owner",
    "ulysses",
    "usp",
    "dynamic",
    "dynamic:rule=megatron",
)
PAGE = os.sysconf("SC_PAGE_SIZE")


def first_rank(strategy: str, pack: str, seqlen: int, cp: int) -> ContextParallel:
    """Rank 0 of so many, without the others: what is timed here asks nobody."""
    alone = context_parallel(
        seqlen=seqlen, heads_q=32, heads_kv=8, strategy=strategy, pattern="full"
    )
    return replace(alone, cp=cp).for_pattern(pack)


def text_of(preset: str, seed: int) -> str:
    """A pack that no other seed draws."""
    return f"documents:preset={preset},seed={seed}"


def plan_pack(seat: ContextParallel, text: str) -> float:
    """Deal, plan and prove a pack; return the processor seconds that it took."""
    begin_s = time.process_time()
    pack = make_pattern(text, seat.pattern.seqlen_q)
    seat.for_pattern(pack).prepare(head_dim=128, dtype=torch.bfloat16)
    return time.process_time() - begin_s


def resident_mib() -> float:
    """Resident memory of this process."""
    with Path("/proc/self/statm").open() as pages:
        return int(pages.read().split()[1]) * PAGE / 2**20


def times(strategy: str, args: argparse.Namespace) -> list[float]:
    """Seconds of each pack but the first."""
    seat = first_rank(strategy, text_of(args.preset, 0), args.seqlen, args.cp)
    packs = [text_of(args.preset, seed) for seed in range(1, args.packs + 2)]
    return [plan_pack(seat, text) for text in packs][1:]


def memory(strategy: str, args: argparse.Namespace) -> list[float]:
    """MiB resident after each tenth of the packs."""
    seat = first_rank(strategy, text_of(args.preset, 0), args.seqlen, args.cp)
    each = max(args.memory // 10, 1)
    found = []
    for seed in range(10 * each):
        plan_pack(seat, text_of(args.preset, 10_000 + seed))
        if (seed + 1) % each == 0:
            found.append(resident_mib())
    return found


def main() -> None:
    """Print one line per strategy, and the memory of the first one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", type=listed(str), default=NAMES, help="names")
    parser.add_argument("--preset", default="megatron", help="lengths of documents")
    parser.add_argument("--cp", type=count, default=8, help="degree")
    parser.add_argument("--seqlen", type=length, default=65536, help="tokens of a pack")
    parser.add_argument("--packs", type=count, default=200, help="packs that are timed")
    parser.add_argument("--memory", type=int, default=0, help="packs over which memory is followed")
    args = parser.parse_args()
    print(f"cp={args.cp} S={args.seqlen} documents:preset={args.preset}, {args.packs} fresh packs")
    print(f"{'strategy':28} {'p50 ms':>8} {'p95 ms':>8} {'most ms':>8}")
    for name in args.strategies:
        try:
            found = sorted(times(name, args))
        except UnsupportedError as error:
            print(f"{name:28} not legal: {error}")
            continue
        cuts = quantiles(found, n=20, method="inclusive") if len(found) > 1 else found * 19
        p50, p95, most = (1e3 * seconds for seconds in (cuts[9], cuts[18], found[-1]))
        print(f"{name:28} {p50:8.1f} {p95:8.1f} {most:8.1f}", flush=True)
    if args.memory:
        found = memory(args.strategies[0], args)
        shown = " ".join(f"{each:.0f}" for each in found)
        print(
            f"{args.strategies[0]}: MiB resident after each tenth of {args.memory} packs: {shown}"
        )


if __name__ == "__main__":
    main()
