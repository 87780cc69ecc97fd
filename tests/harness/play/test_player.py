"""Bound programs: virtual ranks and processes of a gloo group give the executor's bits each run."""

from collections.abc import Mapping

import pytest
import torch

from harness.check.cell import rank_digests, start
from harness.execute.interpreter import Run, execute
from harness.execute.transport import LocalTransport
from harness.oracle.reference import inputs_of
from harness.plan.problem import Dtype, Problem
from harness.plan.tasks import Resident
from harness.play.bound import dense_pairs
from harness.play.links import linked_ranks
from harness.play.player import bind_all, bind_rank
from harness.play.streams import CudaStreams, HostStreams
from harness.prepare.verified_plans import planned
from harness.program.emit import emit
from harness.program.operations import COMMUNICATORS, Lane
from tests.support import layer_problem, problem, ranks

CPU = torch.device("cpu")
Bits = dict[int, str]


def small(cp: int) -> Problem:
    return problem("window:left=7", 23, (8, 4), dims=(6, 4), dtype=Dtype.BFLOAT16, cp=cp)


def executed(p: Problem, text: str) -> list[Bits]:
    """Digests of each direction's results by rank."""
    tensors, saved, found = inputs_of(p, 0), dict[Resident, torch.Tensor](), []
    both = planned(p, text)
    for resolved in (both.forward, both.backward):
        inputs = start(resolved.plan, tensors, saved, range(p.cp))
        run = execute(resolved, inputs, LocalTransport(p.cp))
        saved = run.results
        found.append(rank_digests(run))
    return found


@pytest.mark.parametrize("text", ["zigzag", "owner", "ulysses"])
def test_virtual_ranks_have_the_executors_bits_in_every_run(text: str) -> None:
    p = small(4)
    both, tensors = planned(p, text), inputs_of(p, 0)
    saved: Mapping[Resident, torch.Tensor] = {}
    for resolved, wanted in zip((both.forward, both.backward), executed(p, text), strict=True):
        bound = bind_all(resolved.plan, emit(resolved, gpus_per_node=3), CPU)
        inputs = start(resolved.plan, tensors, saved, range(p.cp))
        bound.fill(inputs)
        for _ in range(2):
            bound.run()
            assert rank_digests(Run(dict(bound.outputs))) == wanted
        saved = {resident: tensor.clone() for resident, tensor in bound.outputs.items()}


def job(p: Problem, text: str, rank: int | None = None) -> list[Bits]:
    """Both directions on one rank of a group, twice each (runs in its process)."""
    rank = torch.distributed.get_rank() if rank is None else rank
    both, tensors, found = planned(p, text), inputs_of(p, 0), []
    saved: Mapping[Resident, torch.Tensor] = {}
    for resolved in (both.forward, both.backward):
        program = emit(resolved, gpus_per_node=1)
        bound = bind_rank(resolved.plan, program.ranks[rank], CPU, linked_ranks(program, CPU))
        bound.fill(start(resolved.plan, tensors, saved, (rank,)))
        for _ in range(2):
            bound.run()
        saved = {resident: tensor.clone() for resident, tensor in bound.outputs.items()}
        found.append(rank_digests(Run(dict(saved))))
    return found


@pytest.mark.parametrize("text", ["zigzag", "allgather", "fpdt"])
def test_processes_have_the_executors_bits(text: str) -> None:
    p = layer_problem(heads=(8, 4)) if text == "fpdt" else small(2)
    by_rank = ranks(2).run(job, p, text)
    joined = [each[0] | each[1] for each in zip(*by_rank, strict=True)]
    assert joined == executed(p, text)


def test_copies_between_memories_are_of_bytes_side_by_side() -> None:
    whole = torch.arange(2 * 3 * 7 * 5.0).reshape(2, 3, 7, 5)
    source, target = whole[:, :2, 1:4], torch.zeros(2, 4, 9, 5)[:, 1:3, 2:5]
    pairs = dense_pairs(source, target)
    assert len(pairs) == 4
    for part, place in pairs:
        assert part.is_contiguous()
        assert place.is_contiguous()
        place.copy_(part)
    assert torch.equal(source, target)
    assert dense_pairs(whole, whole) == [(whole, whole)]


# Streams of a GPU, by what is called --------------------------------------------------------


class FakeEvent:
    def __init__(self) -> None:
        self.recorded: FakeStream | None = None

    def record(self, stream: "FakeStream") -> None:
        self.recorded = stream


class FakeStream:
    def __init__(self, device: object = None, priority: int = 0) -> None:
        del device
        self.priority = priority
        self.after: list[object] = []

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded is not None, "CUDA does not wait for an event that was not recorded"
        self.after.append(event.recorded)

    def wait_stream(self, stream: "FakeStream") -> None:
        self.after.append(stream)


def test_lanes_of_a_gpu_fork_from_the_callers_stream_and_join_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: caller)
    streams = CudaStreams(CPU, Lane)
    lanes = streams._streams
    assert {lane for lane in Lane if lanes[lane].priority < 0} == COMMUNICATORS
    streams.fork()
    assert all(stream.after == [caller] for stream in lanes.values())
    mark = streams.mark()
    streams.record(mark, Lane.COMPUTE)
    streams.hold(mark, Lane.NIC_EVEN)
    assert lanes[Lane.NIC_EVEN].after == [caller, lanes[Lane.COMPUTE]]
    streams.join()
    assert caller.after == list(lanes.values())


class FakeRequest:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"waited {self.name}")


def test_a_host_waits_for_a_group_when_its_lane_or_a_mark_asks_and_once() -> None:
    log: list[str] = []
    streams = HostStreams(CPU)

    def group(name: str) -> None:
        streams.issue(Lane.NIC_EVEN, lambda: [FakeRequest(log, name)])

    group("a")
    mark = streams.mark()
    streams.record(mark, Lane.NIC_EVEN)
    assert log == []
    group("b")
    assert log == ["waited a"]
    streams.hold(mark, Lane.COMPUTE)
    assert log == ["waited a"]
    streams.join()
    assert log == ["waited a", "waited b"]
