#!/usr/bin/env python3
"""Where the time of one run goes: kernels, merges, copies, waiting, issuing transfers, the rest.

One cell runs in gloo processes; in it the functions that do each kind of work are timed, each
less what it calls of the others. The rest is Python: walking the plan and finding views. Times are
medians over runs, per rank; the timers take a few microseconds a call, which fall to the rest.

    .venv/bin/python scripts/bench_executor.py --strategies ring,zigzag --seqlen 4096
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from harness.base.json_fields import json_text
from harness.check.cell import start
from harness.execute import kernels, transport
from harness.execute.interpreter import execute
from harness.execute.transport import GroupTransport
from harness.oracle.reference import inputs_of
from harness.plan.problem import Direction, Dtype
from harness.prepare.verified_plans import planned_for
from harness.ranks.team import Member, Team
from harness.records.config import Config, Where
from harness.terminal.arguments import choice_of, count, dtype, heads, length, listed

WARMUP = 3
TIMEOUT_S = 600.0


class Kind(StrEnum):
    """Kind of work that time is spent on."""

    KERNEL = "kernel"
    MERGE = "merge"
    COPY = "copy"
    ISSUE = "issue"
    WAIT = "wait"


class Timers:
    """Seconds of each kind of work, each less what it calls of the others."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(Kind, 0.0)
        self._inner = [0.0]

    def around(self, kind: Kind, work: Callable[..., Any]) -> Callable[..., Any]:
        """Time a function."""

        def timed(*args: object, **kwargs: object) -> object:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                whole = time.perf_counter() - begin
                self.seconds[kind] += whole - self._inner.pop()
                self._inner[-1] += whole

        return timed


_PLACES: tuple[tuple[object, str, Kind], ...] = (
    (kernels, "attend_call", Kind.KERNEL),
    (kernels, "attend_backward", Kind.KERNEL),
    (kernels, "attend_backward_delta", Kind.KERNEL),
    (kernels, "merge_", Kind.MERGE),
    (kernels, "delta", Kind.MERGE),
    (kernels, "add", Kind.MERGE),
    (torch.Tensor, "copy_", Kind.COPY),
    (torch.Tensor, "contiguous", Kind.COPY),
    (torch.Tensor, "clone", Kind.COPY),
    (torch, "empty", Kind.COPY),
    (torch, "full", Kind.COPY),
    (GroupTransport, "send", Kind.ISSUE),
    (GroupTransport, "receive", Kind.ISSUE),
    (transport._Work, "wait", Kind.WAIT),
)
"""Timed functions, by the place where each is looked up."""


@contextmanager
def timed() -> Iterator[Timers]:
    """Time every kind of work inside."""
    timers = Timers()
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in _PLACES]
    for (owner, name, kind), (_, _, work) in zip(_PLACES, kept, strict=True):
        setattr(owner, name, timers.around(kind, work))
    try:
        yield timers
    finally:
        for owner, name, work in kept:
            setattr(owner, name, work)


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of one rank: of the whole run, of each kind, of waiting, and what is left."""

    strategy: str
    direction: str
    cp: int
    seqlen: int
    rank: int
    tasks: int
    run_s: float
    kernel_s: float
    merge_s: float
    copy_s: float
    issue_s: float
    wait_s: float
    python_s: float


def rank_shares(member: Member, config: Config, runs: int) -> list[dict[str, float]]:
    """Run one cell several times; seconds of each kind, per run (a job for a `Team`)."""
    problem = config.problem
    plans = planned_for(config)
    tensors = inputs_of(problem, 0)
    inputs = start(plans.forward.plan, tensors, {}, (member.rank,))
    program = plans.forward
    if config.direction is Direction.BACKWARD:
        saved = execute(program, inputs, GroupTransport()).results
        program = plans.backward
        inputs = start(program.plan, tensors, saved, (member.rank,))
    found = []
    for number in range(WARMUP + runs):
        dist.barrier()
        with timed() as timers:
            begin = time.perf_counter()
            execute(program, inputs, GroupTransport())
            whole = time.perf_counter() - begin
        parts = {f"{kind.value}_s": seconds for kind, seconds in timers.seconds.items()}
        rest = whole - sum(parts.values())
        if number >= WARMUP:
            found.append({"run_s": whole, **parts, "python_s": rest})
    return found


def shares(team: Team, config: Config, runs: int) -> Iterator[Share]:
    """Medians of each rank."""
    both = planned_for(config)
    program = both.forward if config.direction is Direction.FORWARD else both.backward
    for rank, found in enumerate(team.run(rank_shares, TIMEOUT_S, config, runs)):
        yield Share(
            strategy=config.strategy,
            direction=config.direction.value,
            cp=config.cp,
            seqlen=config.seqlen_q,
            rank=rank,
            tasks=len(program.plan.tasks),
            **{name: statistics.median(run[name] for run in found) for name in found[0]},
        )


def main() -> int:
    """Print a line per rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", type=listed(str), default=("zigzag",), help="names")
    parser.add_argument("--pattern", default="causal", help="who attends whom")
    parser.add_argument("--cp", type=listed(count), default=(2,), help="degrees")
    parser.add_argument("--seqlen", type=listed(length), default=(4096,), help="tokens, all ranks")
    parser.add_argument("--heads", type=heads, default=(8, 8), help="query/KV heads")
    parser.add_argument("--head-dim", type=count, default=64, help="width")
    parser.add_argument("--dtype", type=dtype, default=Dtype.BFLOAT16, help="precision")
    parser.add_argument("--direction", type=listed(choice_of(Direction)), default=tuple(Direction))
    parser.add_argument("--runs", type=count, default=7, help="of each cell")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    rows: list[Share] = []
    if not args.json:
        print("ms            run  kernel   merge    copy   issue    wait  python  tasks")
    for cp in args.cp:
        with Team(cp) as team:
            for config in _cells(args, cp):
                for row in shares(team, config, args.runs):
                    rows.append(row)
                    if not args.json:
                        print(_line(row), flush=True)
    if args.json:
        print(json_text([asdict(row) for row in rows]))
    return 0


def _cells(args: argparse.Namespace, cp: int) -> Iterator[Config]:
    for seqlen in args.seqlen:
        for direction in args.direction:
            for name in args.strategies:
                cell = Config(
                    strategy=name,
                    pattern=args.pattern,
                    cp=cp,
                    seqlen_q=seqlen,
                    seqlen_kv=seqlen,
                    heads_q=args.heads[0],
                    heads_kv=args.heads[1],
                    head_dim=args.head_dim,
                    dtype=args.dtype,
                    transport=Where.GLOO,
                )
                yield replace(cell, direction=direction)


def _line(row: Share) -> str:
    times = (
        row.run_s,
        row.kernel_s,
        row.merge_s,
        row.copy_s,
        row.issue_s,
        row.wait_s,
        row.python_s,
    )
    figures = " ".join(f"{seconds * 1e3:7.2f}" for seconds in times)
    name = f"{row.strategy} {row.direction} cp={row.cp} S={row.seqlen} rank {row.rank}"
    return f"{name}\n         {figures} {row.tasks:6}"


if __name__ == "__main__":
    sys.exit(main())
