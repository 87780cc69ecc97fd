"""Queues: what a rank does one thing at a time on, and which of them a transfer crosses.

Each rank computes on one stream, and has an outgoing and an incoming port per link class:

    rank 0  compute                a transfer from rank 0 to rank 1 in the same node is in
            nvlink_out ──┐         both of these ports' queues
    rank 1  nvlink_in  <─┘
"""

from enum import StrEnum

from harness.cluster.machine import LinkClass
from harness.plan.tasks import Memory, Place


class Stream(StrEnum):
    """A queue of a rank: it does one thing at a time on each.

    The simulator knows every port apart. A measured run reports TRANSFER, the time in which a rank
    issues its part of a transfer, and WAIT, the time in which it is blocked until one has arrived.
    """

    __hash__ = str.__hash__  # an enum's own hash is a python function, and spans are many

    COMPUTE = "compute"
    NVLINK_OUT = "nvlink_out"
    NVLINK_IN = "nvlink_in"
    NIC_OUT = "nic_out"
    NIC_IN = "nic_in"
    HOST_OUT = "host_out"
    HOST_IN = "host_in"
    TRANSFER = "transfer"
    WAIT = "wait"
    LAUNCH = "launch"


LINK_STREAMS = frozenset(set(Stream) - {Stream.COMPUTE, Stream.LAUNCH})
"""Streams on which bytes move between places."""

STREAMS = tuple(Stream)
_INDEX = {stream: index for index, stream in enumerate(STREAMS)}


def number_of(rank: int, stream: Stream) -> int:
    """The number of a rank's stream, by which jobs and activities name it."""
    return rank * len(STREAMS) + _INDEX[stream]


def stream_of(number: int) -> tuple[int, Stream]:
    """The rank and kind of a stream's number."""
    rank, index = divmod(number, len(STREAMS))
    return rank, STREAMS[index]


def queues_between(src: Place, dst: Place, link: LinkClass) -> tuple[int, ...]:
    """Numbers of the streams that a transfer over a link holds, the source's first.

    A copy inside a GPU's memory holds its compute stream.
    """
    match link:
        case LinkClass.LOCAL:
            return (number_of(src.rank, Stream.COMPUTE),)
        case LinkClass.HOST:
            away = dst.memory is Memory.HOST
            return (number_of(src.rank, Stream.HOST_OUT if away else Stream.HOST_IN),)
        case LinkClass.NVLINK:
            out, into = Stream.NVLINK_OUT, Stream.NVLINK_IN
        case LinkClass.NIC:
            out, into = Stream.NIC_OUT, Stream.NIC_IN
    return (number_of(src.rank, out), number_of(dst.rank, into))
