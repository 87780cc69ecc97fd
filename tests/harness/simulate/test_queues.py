"""Which link two places share, and which queues a transfer over it holds."""

from itertools import product

import pytest

from harness.cluster.machine import LinkClass, link_between
from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Direction
from harness.plan.residency import Program
from harness.plan.tasks import Memory, Place, Transfer
from harness.simulate.calibrated import skeleton_on
from harness.simulate.queues import Stream, number_of, queues_between, stream_of
from harness.simulate.simulator import simulate
from harness.verify.proof import verify
from strategies import strategy
from tests.support import layer_problem

PER_NODE = 3
HOST = Memory.HOST


@pytest.mark.parametrize(
    ("src", "dst", "link", "held"),
    [
        (Place(4), Place(4), LinkClass.LOCAL, [(4, Stream.COMPUTE)]),
        (Place(4), Place(4, HOST), LinkClass.HOST, [(4, Stream.HOST_OUT)]),
        (Place(4, HOST), Place(4), LinkClass.HOST, [(4, Stream.HOST_IN)]),
        (Place(3), Place(5), LinkClass.NVLINK, [(3, Stream.NVLINK_OUT), (5, Stream.NVLINK_IN)]),
        (Place(5), Place(3), LinkClass.NVLINK, [(5, Stream.NVLINK_OUT), (3, Stream.NVLINK_IN)]),
        (Place(2), Place(3), LinkClass.NIC, [(2, Stream.NIC_OUT), (3, Stream.NIC_IN)]),
        (Place(7), Place(0), LinkClass.NIC, [(7, Stream.NIC_OUT), (0, Stream.NIC_IN)]),
    ],
)
def test_a_transfer_holds_the_ports_of_the_link_between_its_places(
    src: Place, dst: Place, link: LinkClass, held: list[tuple[int, Stream]]
) -> None:
    assert link_between(src, dst, PER_NODE) is link
    assert [stream_of(number) for number in queues_between(src, dst, link)] == held


def test_every_stream_of_every_rank_has_a_number_of_its_own() -> None:
    streams = list(product(range(5), Stream))
    assert len({number_of(*each) for each in streams}) == len(streams)
    assert [stream_of(number_of(*each)) for each in streams] == streams


def test_another_rank_s_host_is_two_links_away() -> None:
    with pytest.raises(UnsupportedError, match="rank 1's device to rank 2's host must not cross"):
        link_between(Place(1), Place(2, HOST), PER_NODE)


def offloading() -> Program:
    problem = layer_problem("causal", cp=4)
    return verify(strategy("ring:offload=true").plan(problem, Direction.FORWARD))


def test_both_clocks_let_a_transfer_hold_the_same_ports() -> None:
    program = offloading()
    fitted = cluster("h800").fitted
    assert fitted is not None
    full = skeleton_on(program, fitted, eager=False, fold=False)
    quick = simulate(program, cluster("h100-1x8"))
    moves = [i for i, task in enumerate(program.plan.tasks) if isinstance(task, Transfer)]
    kinds = set()
    for index in moves:
        spans = {(span.rank, span.stream) for span in quick.spans if span.task == index}
        held = {stream_of(number) for number in full.parts[index].queues}
        assert spans == held
        kinds |= {stream for _, stream in held}
    assert {Stream.HOST_OUT, Stream.NVLINK_OUT, Stream.NVLINK_IN} <= kinds
