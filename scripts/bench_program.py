#!/usr/bin/env python3
"""What one run of one rank costs its host: the executor's walk, and a bound device program's.

Messages are over at once and tensors are tiny, so that what is left is the host: Python, and (in
the columns with kernels) the kernels of a CPU in place of the launches of a GPU. A captured graph
costs the host one launch, whatever the program. Milliseconds of process time, medians over runs.

    .venv/bin/python scripts/bench_program.py --strategies zigzag --cp 8,64
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from unittest.mock import patch

import torch

from harness.base.json_fields import json_text
from harness.execute.interpreter import execute
from harness.execute.transport import Handle, Traffic
from harness.plan.problem import Dtype, Problem
from harness.plan.residency import Program
from harness.play import player
from harness.play.player import BoundProgram, bind_rank
from harness.prepare.verified_plans import planned
from harness.program.emit import emit_rank
from harness.program.operations import KernelLaunch
from harness.terminal.arguments import count, listed
from patterns import make_pattern

_TOKENS = 16
"""Of each rank."""


@dataclass(frozen=True, slots=True)
class HostCost:
    """Milliseconds of host time of one run of one rank.

    Attributes:
        strategy: As typed.
        direction: Forward or backward.
        cp: Ranks.
        rank: Which.
        operations: Of its device program.
        launches: Kernels among them.
        executor_ms: The executor's walk, with kernels.
        bound_ms: The bound program, with kernels.
        walk_ms: The bound program without kernels.
        bind_ms: Emitting and binding, once.
    """

    strategy: str
    direction: str
    cp: int
    rank: int
    operations: int
    launches: int
    executor_ms: float
    bound_ms: float
    walk_ms: float
    bind_ms: float


class _Over:
    def wait(self) -> None:
        """It is over."""


class InstantTransport:
    """Messages that are over when they are posted; nothing moves."""

    def __init__(self, rank: int) -> None:
        self.ranks = (rank,)
        self.traffic = Traffic()

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Send nothing."""
        del buffer, src, dst, tag
        return _Over()

    def receive(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        """Receive nothing."""
        del buffer, src, dst, tag
        return _Over()

    def batch(self) -> AbstractContextManager[None]:
        """Bracket nothing."""
        return nullcontext()


def nothing(*_: object) -> tuple[()]:
    """Do nothing, and have nothing under way."""
    return ()


def host_ms(work: Callable[[], object], runs: int) -> float:
    """Median process time, after two runs that do not count."""
    found = []
    for _ in range(runs + 2):
        begin = time.process_time()
        work()
        found.append(1e3 * (time.process_time() - begin))
    return statistics.median(found[2:])


def cost(resolved: Program, text: str, runs: int) -> HostCost:
    """Time one direction on the middle rank."""
    plan = resolved.plan
    rank = plan.problem.cp // 2
    begin = time.process_time()
    program = emit_rank(resolved, rank)
    groups = lambda *_: nothing  # noqa: E731  # a group that starts nothing
    bound = bind_rank(plan, program, torch.device("cpu"), groups)
    bind = 1e3 * (time.process_time() - begin)
    for tensor in bound.inputs.values():
        tensor.zero_()
    with patch.object(player, "bind_launch", lambda *_: nothing):
        bare: BoundProgram = bind_rank(plan, program, torch.device("cpu"), groups)
    walked = partial(execute, resolved, bound.inputs, InstantTransport(rank))
    launches = sum(isinstance(operation, KernelLaunch) for operation in program.operations)
    return HostCost(
        text,
        plan.direction.value,
        plan.problem.cp,
        rank,
        len(program.operations),
        launches,
        host_ms(walked, runs),
        host_ms(bound.run, runs),
        host_ms(bare.run, runs),
        bind,
    )


def main() -> int:
    """Print a line for each strategy, degree and direction, or rows as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", type=listed(str), default=["zigzag"], help="such as ring")
    parser.add_argument("--cp", type=listed(count), default=[8, 64], help="ranks, such as 8,64")
    parser.add_argument("--runs", type=count, default=11, help="runs, such as 11")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[HostCost] = []
    if not args.json:
        print("ms of host time       operations launches executor  bound   walk   bind")
    for text, cp in product(args.strategies, args.cp):
        both = planned(_problem(cp), text)
        for resolved in (both.forward, both.backward):
            rows.append(cost(resolved, text, args.runs))
            if not args.json:
                print(_line(rows[-1]), flush=True)
    if args.json:
        print(json_text([asdict(row) for row in rows]))
    return 0


def _problem(cp: int) -> Problem:
    tokens = _TOKENS * cp
    return Problem(
        pattern=make_pattern("causal", tokens, tokens),
        heads_q=8,
        heads_kv=2,
        head_dim=32,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def _line(row: HostCost) -> str:
    name = f"{row.strategy} {row.direction} cp={row.cp}"
    times = (row.executor_ms, row.bound_ms, row.walk_ms, row.bind_ms)
    figures = " ".join(f"{each:6.2f}" for each in times)
    return f"{name:22}{row.operations:10} {row.launches:8}   {figures}"


if __name__ == "__main__":
    sys.exit(main())
