"""The model of queues: times that can be said by hand."""

import pytest

from scripts import queue_programs
from scripts.queue_programs import QueueTime, queue_times


def one(text: str, cp: int, tokens: int = 8192) -> tuple[QueueTime, QueueTime]:
    forward, backward = queue_times(text, cp, (8, 8), tokens, 1)
    return forward, backward


def test_one_rank_takes_as_long_as_its_kernels() -> None:
    forward, backward = one("ring", 1)
    # 4 flops for each pair and column, of half the pairs: 8192**2 / 2 x 8 heads x 128.
    assert forward.kernels_ms == pytest.approx(1e3 * 4 * 8192**2 / 2 * 8 * 128 / 600e12, abs=1e-3)
    assert forward.program_ms == forward.kernels_ms
    assert backward.program_ms == pytest.approx(2.5 * forward.program_ms, abs=2e-3)
    assert forward.port_ms == 0


def test_no_program_is_faster_than_its_kernels_or_its_ports() -> None:
    for text, cp in (("zigzag", 4), ("ulysses", 4), ("allgather", 3), ("double_ring:inner=2", 4)):
        for row in one(text, cp):
            assert row.program_ms >= max(row.kernels_ms, row.port_ms) > 0


def test_a_gather_comes_before_its_kernels_and_a_ring_beside_them() -> None:
    gather, _ = one("allgather", 2)
    assert gather.program_ms == pytest.approx(gather.kernels_ms + gather.port_ms, rel=0.02)
    ring, _ = one("zigzag", 2)
    assert ring.program_ms == pytest.approx(ring.kernels_ms, rel=0.02)


def test_messages_of_one_port_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    near, _ = one("allgather", 2)
    monkeypatch.setattr(queue_programs, "GPUS_PER_NODE", 1)
    far, _ = one("allgather", 2)
    assert far.port_ms == pytest.approx(near.port_ms * 350 / 45, rel=0.01)
    more, _ = one("allgather:placement=zigzag", 4)
    assert more.program_ms == pytest.approx(more.kernels_ms + more.port_ms, rel=0.05)
    assert more.port_ms == pytest.approx(3 * far.port_ms, rel=0.05)
