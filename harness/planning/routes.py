"""How a chunk gets from its owner to the ranks that need it, and partial results back.

Inside a node a chunk goes straight to each rank. To another node it goes once: GPU i of one node
sends to GPU i of the other, so that all NICs share the load, and that rank passes it on. Where only
one rank of a node needs it, it goes there straight. Results take the same ways back.

    node 0              node 1
    0 1 2 3 ----------> 4 5 6 7     chunk of rank 1, needed by 4, 6 and 7:
      1  ------NIC------> 5         1 -> 5, then 5 -> 4, 5 -> 6, 5 -> 7

Source: UltraAttn (SC'25), section 4.2: groupwise peer-to-peer.
"""

from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

RoutedChunk = tuple[bool, int]
"""Whether it is a key chunk, and its number."""


class Hop(NamedTuple):
    """One transfer of a chunk."""

    src: int
    dst: int
    chunk: RoutedChunk


def gateways(
    makers: Mapping[RoutedChunk, Set[int]], owner: Mapping[RoutedChunk, int], gpus_per_node: int
) -> dict[tuple[int, RoutedChunk], int]:
    """Return (rank, chunk) -> the rank of its node through which the chunk comes and goes.

    Only where two or more ranks of a node other than the owner's compute with the chunk.

    Args:
        makers: Ranks that compute with each chunk.
        owner: Rank that owns each chunk.
        gpus_per_node: Neighbouring ranks that share a node; divides cp.
    """
    found: dict[tuple[int, RoutedChunk], int] = {}
    for chunk, ranks in makers.items():
        home, number = divmod(owner[chunk], gpus_per_node)
        nodes: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            nodes.setdefault(rank // gpus_per_node, []).append(rank)
        for node, members in nodes.items():
            if node != home and len(members) > 1:
                gate = node * gpus_per_node + number
                found |= {(rank, chunk): gate for rank in members}
    return found


def routes(
    makers: Mapping[RoutedChunk, Set[int]],
    owner: Mapping[RoutedChunk, int],
    cp: int,
    gpus_per_node: int,
) -> list[Hop]:
    """Return the transfers that bring every chunk to all ranks that compute with it.

    They go in rounds by the distance from source to destination, so that each round is a matching
    of ports; what is passed on comes after what is sent first.

    Args:
        makers: Ranks that compute with each chunk.
        owner: Rank that owns each chunk.
        cp: Ranks.
        gpus_per_node: Neighbouring ranks that share a node; divides cp.
    """
    gate = gateways(makers, owner, gpus_per_node)
    first, second = set[Hop](), set[Hop]()
    for chunk, ranks in makers.items():
        home = owner[chunk]
        for rank in ranks - {home}:
            via = gate.get((rank, chunk), rank)
            first.add(Hop(home, via, chunk))
            if via != rank:
                second.add(Hop(via, rank, chunk))
    return [*_in_rounds(first, cp), *_in_rounds(second, cp)]


def _in_rounds(hops: Set[Hop], cp: int) -> Iterator[Hop]:
    turns: dict[tuple[int, int], int] = {}
    rounds = []
    for hop in sorted(hops):
        turn = turns[hop.src, hop.dst] = turns.get((hop.src, hop.dst), -1) + 1
        rounds.append(((hop.dst - hop.src) % cp, turn, hop))
    for _, _, hop in sorted(rounds):
        yield hop
