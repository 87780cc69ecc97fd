#!/usr/bin/env python3
"""How a device program queues: its time beside those of its kernels and of its busiest port alone.

A model, not a measurement, and no prediction either: kernels of attention at one rate, all others
free; lanes as queues; messages of a port share it evenly; no latencies, and no kernel slows a
transfer. It shows what the order of a program costs, and nothing else. Programs are emitted for few
tokens and timed as if each rank had `--tokens`.

    .venv/bin/python scripts/queue_programs.py --strategies zigzag,ring --cp 8,16 --heads 32/8
"""

import argparse
import heapq
import sys
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from itertools import product

from harness.base.json_fields import json_text
from harness.cluster.machine import node_of
from harness.errors import UnsupportedError
from harness.plan.kernel_calls import lower
from harness.plan.masks import MaskKind
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.slices import head_runs
from harness.plan.tasks import Tile
from harness.prepare.verified_plans import planned
from harness.program.check_progress import PostAt, matched
from harness.program.emit import emit
from harness.program.operations import (
    DeviceProgram,
    Group,
    KernelLaunch,
    Lane,
    Post,
    PostEnd,
    Record,
    Wait,
)
from harness.terminal.arguments import count, heads, length, listed
from patterns import make_pattern

FLOPS_PER_S = 600e12
"""Of a flash kernel on an H100; assumed, as are the next two."""
PORT_BYTES_PER_S = {True: 350e9, False: 45e9}
"""Of one GPU and one direction, inside a node and between nodes."""
GPUS_PER_NODE = 8
_TOKENS, _WIDTH = 16, 16
"""Of the program that is emitted: per rank, and per head."""
_REAL_WIDTH = 128
_LANES = tuple[int, Lane]
_Port = tuple[int, PostEnd, bool]
"""Rank, direction, and whether inside the node."""


@dataclass(frozen=True, slots=True)
class QueueTime:
    """Milliseconds of one program.

    Attributes:
        strategy: As typed.
        direction: Forward or backward.
        cp: Ranks.
        heads: Query heads and KV heads.
        kernels_ms: Of the busiest rank's kernels alone.
        port_ms: Of the busiest port's messages alone.
        program_ms: Of the program.
    """

    strategy: str
    direction: str
    cp: int
    heads: str
    kernels_ms: float
    port_ms: float
    program_ms: float


@dataclass(slots=True)
class Message:
    """A message under way."""

    left: float
    ports: tuple[_Port, _Port]
    ends: tuple[PostAt, PostAt]


@dataclass(slots=True)
class Model:
    """The state of all ranks."""

    plan: Plan
    program: DeviceProgram
    scale: float
    queues: dict[_LANES, deque[int]] = field(default_factory=dict)
    busy: set[_LANES] = field(default_factory=set)
    events: set[tuple[int, int]] = field(default_factory=set)
    posts_left: Counter[tuple[int, int]] = field(default_factory=Counter)
    started: set[PostAt] = field(default_factory=set)
    moving: list[Message] = field(default_factory=list)
    running: list[tuple[float, _LANES]] = field(default_factory=list)
    kernels: Counter[int] = field(default_factory=Counter)
    carried: Counter[_Port] = field(default_factory=Counter)
    now: float = 0.0

    def run(self) -> float:
        """Seconds until all is done."""
        mates = matched(self.program.ranks).mates
        for rank in self.program.ranks:
            for number, operation in enumerate(rank.operations):
                self.queues.setdefault((rank.rank, operation.lane), deque()).append(number)
        while True:
            while any([self._begin(lane, mates) for lane in self.queues]):  # noqa: C419  # all
                pass
            if not self._advance():
                break
        assert not any(self.queues.values())  # it is proved
        return self.now

    def _begin(self, at: _LANES, mates: dict[PostAt, PostAt]) -> bool:
        """Begin what a lane can begin; whether there was anything."""
        queue, rank, begun = self.queues[at], at[0], False
        while queue and at not in self.busy:
            operation = self.program.ranks[rank].operations[queue[0]]
            match operation:
                case Record(event=event):
                    self.events.add((rank, event))
                case Wait(event=event):
                    if (rank, event) not in self.events:
                        return begun
                case KernelLaunch():
                    seconds = self._seconds(operation)
                    self.kernels[rank] += seconds
                    if seconds:
                        self.busy.add(at)
                        heapq.heappush(self.running, (self.now + seconds, at))
                        return True
                case Group(posts=posts):
                    self.busy.add(at)
                    self.posts_left[rank, queue[0]] = len(posts)
                    for index, post in enumerate(posts):
                        here = PostAt(rank, queue[0], index)
                        self.started.add(here)
                        if mates[here] in self.started:
                            self._send(here, mates[here], post)
                    return True
            queue.popleft()
            begun = True
        return begun

    def _send(self, here: PostAt, there: PostAt, post: Post) -> None:
        src, dst = (here, there) if post.end is PostEnd.SEND else (there, here)
        near = node_of(src.rank, GPUS_PER_NODE) == node_of(dst.rank, GPUS_PER_NODE)
        size = post.view.size_bytes * self.scale * _REAL_WIDTH / _WIDTH
        ports = ((src.rank, PostEnd.SEND, near), (dst.rank, PostEnd.RECEIVE, near))
        for port in ports:
            self.carried[port] += size / PORT_BYTES_PER_S[near]
        self.moving.append(Message(size, ports, (src, dst)))

    def _seconds(self, launch: KernelLaunch) -> float:
        if launch.call is None or launch.task is None:
            return 0.0
        tile, plan = self.plan.tasks[launch.task], self.plan
        assert isinstance(tile, Tile)
        q, kv = (plan.chunks(piece) for piece in tile.reads[:2])
        call = lower(plan.problem.pattern, q, kv)[launch.call[0]]
        (first, last), _ = head_runs(tile.heads, plan.problem.group)[launch.call[1]]
        pairs = (call.rows[1] - call.rows[0]) * (call.cols[1] - call.cols[0]) * (last - first)
        half = 0.5 if call.mask.kind is MaskKind.CAUSAL else 1.0
        flops = 4 if tile.direction is Direction.FORWARD else 10  # of a pair and a column
        return flops * pairs * half * self.scale**2 * _REAL_WIDTH / FLOPS_PER_S

    def _advance(self) -> bool:
        """Go on to when something ends; whether there is anything."""
        users = Counter(port for message in self.moving for port in message.ports)
        rates = [
            min(PORT_BYTES_PER_S[port[2]] / users[port] for port in message.ports)
            for message in self.moving
        ]
        pairs = list(zip(self.moving, rates, strict=True))
        steps = [message.left / rate for message, rate in pairs]
        steps += [self.running[0][0] - self.now] if self.running else []
        if not steps:
            return False
        step = min(steps)
        self.now += step
        for message, rate in pairs:
            message.left -= rate * step
        over = [message for message, rate in pairs if message.left <= 1e-9 * rate]
        self.moving = [message for message, rate in pairs if message.left > 1e-9 * rate]
        for end in (end for message in over for end in message.ends):
            self.posts_left[end[:2]] -= 1
            if not self.posts_left[end[:2]]:
                operation = self.program.ranks[end.rank].operations[end.operation]
                self._free((end.rank, operation.lane))
        while self.running and self.running[0][0] <= self.now:
            self._free(heapq.heappop(self.running)[1])
        return True

    def _free(self, lane: _LANES) -> None:
        self.busy.discard(lane)
        self.queues[lane].popleft()


def queue_times(
    text: str, cp: int, pair: tuple[int, int], tokens: int, ahead: int
) -> list[QueueTime]:
    """Time both directions; none where the strategy does not do it."""
    small = _TOKENS * cp
    problem = Problem(
        pattern=make_pattern("causal", small, small),
        heads_q=pair[0],
        heads_kv=pair[1],
        head_dim=_WIDTH,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    try:
        both = planned(problem, text)
    except UnsupportedError:
        return []
    found = []
    for resolved in (both.forward, both.backward):
        program = emit(resolved, GPUS_PER_NODE, ahead=ahead)
        model = Model(resolved.plan, program, tokens / _TOKENS)
        seconds = model.run()
        times = (max(model.kernels.values()), max(model.carried.values(), default=0.0), seconds)
        direction, both_heads = resolved.plan.direction.value, f"{pair[0]}/{pair[1]}"
        figures = (round(1e3 * each, 3) for each in times)
        found.append(QueueTime(text, direction, cp, both_heads, *figures))
    return found


def main() -> int:
    """Print a line for each program, or rows as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", type=listed(str), default=["zigzag"], help="such as ring")
    parser.add_argument("--cp", type=listed(count), default=[8, 16], help="ranks, such as 8,16")
    parser.add_argument("--heads", type=listed(heads), default=[(32, 8)], help="such as 32/8")
    parser.add_argument("--tokens", type=length, default=8192, help="of each rank, such as 8k")
    parser.add_argument("--ahead", type=count, default=1, help="steps, see `emit`, such as 2")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    args = parser.parse_args()
    rows: list[QueueTime] = []
    if not args.json:
        print("ms by a model of queues                         kernels  busiest port  program")
    for text, cp, pair in product(args.strategies, args.cp, args.heads):
        for row in queue_times(text, cp, pair, args.tokens, args.ahead):
            rows.append(row)
            if not args.json:
                name = f"{row.strategy} cp={row.cp} heads={row.heads} {row.direction}"
                times = f"{row.kernels_ms:8.2f} {row.port_ms:13.2f} {row.program_ms:8.2f}"
                print(f"{name:46} {times}", flush=True)
    if args.json:
        print(json_text([asdict(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
