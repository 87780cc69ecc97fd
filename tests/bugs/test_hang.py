"""Ranks that would wait for ever: an order that both sides share, equal plans, a time limit."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import strategies
from harness.attention import context_parallel, run_all
from harness.errors import PlanError
from harness.execute.interpreter import execute
from harness.execute.shards import initial_inputs
from harness.execute.transport import GroupTransport, Handle, LocalTransport
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Tensor as Kind
from harness.verify.proof import verify
from patterns import make_pattern
from tests.support import EVERY_STRATEGY, RankError, Ranks, problem, ranks, tensors


class Counting(LocalTransport):
    """Counts the transfers of each rank that nobody has waited for yet."""

    def __init__(self, cp: int) -> None:
        super().__init__(cp)
        self.open = dict.fromkeys(range(cp), 0)
        self.most = 0

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        super().send(buffer, src, dst, tag)
        return self._begin(src)

    def receive(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        super().receive(buffer, src, dst, tag)
        return self._begin(dst)

    def _begin(self, rank: int) -> Handle:
        self.open[rank] += 1
        self.most = max(self.most, self.open[rank])
        return _Open(self, rank)


class _Open:
    def __init__(self, transport: Counting, rank: int) -> None:
        self._transport, self._rank, self._waiting = transport, rank, True

    def wait(self) -> None:
        if self._waiting:
            self._waiting = False
            self._transport.open[self._rank] -= 1


@pytest.mark.parametrize("strategy", ["ring", "ring-classic", "zigzag", "stripe"])
def test_b074_a_ring_of_any_length_has_few_transfers_in_flight(strategy: str) -> None:
    most = []
    for cp in (4, 16):
        p = problem("full", 32, (4, 2), batch=1, cp=cp)
        q, k, v, dout = tensors(p)
        done = run_all(p, strategy, q, k, v, dout=dout, transport=Counting)
        most.append(max(t.most for t in done.transports if isinstance(t, Counting)))
        assert all(not any(t.open.values()) for t in done.transports if isinstance(t, Counting))
    assert most[0] == most[1] <= 12


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b074_every_transfer_is_waited_for(strategy: str) -> None:
    p = problem("causal", 32, (4, 2), batch=1, cp=4)
    q, k, v, dout = tensors(p)
    done = run_all(p, strategy, q, k, v, dout=dout, transport=Counting)
    assert all(not any(t.open.values()) for t in done.transports if isinstance(t, Counting))


def send_first() -> float:
    """On a rank: both send more than a socket holds before either receives."""
    transport, other = GroupTransport(), 1 - dist.get_rank()
    mine = torch.full((1 << 20,), float(dist.get_rank()), dtype=torch.float64)
    theirs = torch.empty_like(mine)
    sent = transport.send(mine, 1 - other, other, 0)
    received = transport.receive(theirs, other, 1 - other, 0)
    received.wait()
    sent.wait()
    return float(theirs.mean())


def test_b076_both_may_send_before_they_receive() -> None:
    assert ranks(2).run(send_first) == [1.0, 0.0]


def plans_differ(p: Problem) -> str:
    """On a rank: the two believe in different documents."""
    lengths = "3+4+10" if dist.get_rank() else "3+5+9"
    cp = context_parallel(
        seqlen=17, heads_q=4, heads_kv=2, pattern=f"documents:lengths={lengths}", strategy="ring"
    )
    q, k, v, _ = tensors(p)
    with pytest.raises(PlanError) as caught:
        cp.attend(cp.shard(q), cp.shard(k), cp.shard(v))
    return str(caught.value)


def test_b078_ranks_that_plan_different_exchanges_are_told_before_they_begin() -> None:
    told = ranks(2).run(plans_differ, problem("full", 17, (4, 2), cp=2))
    assert told[0] == told[1]
    assert "all ranks of a group make one call (rank 1)" in told[0]
    assert "lengths=3+5+9" in told[0]
    assert "lengths=3+4+10" in told[0]


def test_b078_equal_plans_have_equal_hashes_and_others_have_not() -> None:
    hashes = set()
    for pattern in ("documents:lengths=3+5+9", "documents:lengths=3+4+10"):
        made = [
            strategies.strategy("ring").plan(
                Problem(pattern=make_pattern(pattern, 17), heads_q=4, heads_kv=2, head_dim=8, cp=2),
                Direction.FORWARD,
            )
            for _ in range(2)
        ]
        assert made[0].hash == made[1].hash
        hashes.add(made[0].hash)
    assert len(hashes) == 2


class Skipping(GroupTransport):
    """Leaves out the first message of rank 1."""

    def send(self, buffer: torch.Tensor, src: int, dst: int, tag: int) -> Handle:
        if src == 1 and not self.traffic.messages:
            self.traffic.sent(src, buffer)
            return _Nothing()
        return super().send(buffer, src, dst, tag)


class _Nothing:
    def wait(self) -> None:
        pass


def skip(p: Problem, logs: str) -> str:
    """On a rank: run a ring in which rank 1 does not send; write down each message."""
    rank, log = dist.get_rank(), []
    transport = Skipping(on_message=log.append)
    program = verify(strategies.strategy("ring").plan(p, Direction.FORWARD))
    q, k, v, _ = tensors(p)
    inputs = initial_inputs(program.plan, {Kind.Q: q, Kind.K: k, Kind.V: v}, [rank])
    try:
        execute(program, inputs, transport)
    finally:
        Path(logs, f"rank{rank}").write_text("\n".join(log))
    return "done"


def test_b080_a_rank_that_skips_a_send_ends_in_an_error_with_a_log(tmp_path: Path) -> None:
    pool = Ranks(2, timeout_s=1.5)
    try:
        with pytest.raises(RankError, match=r"rank 0: (?s:.*)[Tt]imed? ?out"):
            pool.run(skip, problem("full", 16, (4, 2), batch=1, cp=2), str(tmp_path))
    finally:
        pool.close()
    log = (tmp_path / "rank0").read_text()
    assert re.search(r"^send \d+ to 1, \d+ bytes$", log, re.M)
    assert re.search(r"^receive \d+ from 1, \d+ bytes$", log, re.M)
