"""From who computes each block to a whole plan: operands out, tiles, partial results home.

A block's rank gets the query chunk and the key chunk that it lacks, from their owners or through
one GPU of its node. It accumulates there, and when a chunk's last block is done the
partial result goes home the same way, where the owner folds all that come back in a fixed order.
Chunks may be cut: then what is moved of one are the parts that its block, or a block behind a GPU
that passes it on, needs.

Inside a node a chunk goes straight to each rank. To another node it goes once: GPU i of one node
sends to GPU i of the other, so that all NICs share the load, and that rank passes it on. Where only
one rank of a node needs it, it goes there straight. Results take the same ways back.

    node 0              node 1
    0 1 2 3 ----------> 4 5 6 7     chunk of rank 1, needed by 4, 6 and 7:
      1  ------NIC------> 5         1 -> 5, then 5 -> 4, 5 -> 6, 5 -> 7

Source: UltraAttn (SC'25), section 4.2: groupwise peer-to-peer.
"""

from collections.abc import Iterator, Mapping, Set
from functools import partial
from typing import NamedTuple

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.planning.block_assignment import Allocation
from harness.planning.builder import Chunks, PlanBuilder
from harness.planning.errands import Errands
from harness.planning.need import NeedCut

BlockIndex = tuple[int, int]
"""A query chunk and a key chunk."""


RoutedChunk = tuple[bool, int]
"""Whether it is a key chunk, and its number."""


class Hop(NamedTuple):
    """One transfer of a chunk."""

    src: int
    dst: int
    chunk: RoutedChunk


def plan_allocation(
    problem: Problem,
    name: str,
    direction: Direction,
    allocation: Allocation,
    *,
    delta: bool = True,
    gpus_per_node: int | None = None,
    cut: NeedCut = NeedCut.WHOLE,
    align: int = 1,
) -> Plan:
    """Plan an allocation, one tile per block, in an order that a first-in-first-out stream can run.

    Transfers go in rounds by the distance from source to destination, so that each round is a
    matching of ports. A rank computes what it has first, then what arrives first, and of that the
    rows of others before its own, so that partial results leave early.

    Args:
        problem: The problem.
        name: Name that the plan will carry.
        direction: Forward or backward.
        allocation: Who owns chunks and who computes blocks; blocks without allowed pairs are
            left out whoever they are given to.
        delta: Backward, ship delta with rows that are computed elsewhere; else ship out. Where no
            row leaves its owner, nothing is shipped and kernels take out.
        gpus_per_node: Cross to another node once per chunk, between GPUs of equal number, and go on
            inside it; divides cp. None sends straight to every rank.
        cut: `NeedCut.BLOCKS` moves just what is needed, `NeedCut.KEYS` where every block is at the
            owner of its queries, in both directions: chunks are cut alike in both.
        align: Tokens that what is sent of a chunk is rounded up to.

    Raises:
        ValueError: Nobody computes a block that has allowed pairs, or nodes are not whole.
    """
    per_node = gpus_per_node or problem.cp
    if problem.cp % per_node:
        raise ValueError(
            f"allocation: gpus_per_node ({per_node}) must divide cp ({problem.cp}); "
            "None sends straight to every rank"
        )
    work = _Work(problem, allocation, per_node)
    b = PlanBuilder(
        problem, name, direction, allocation.queries, allocation.keys, cut=cut, align=align
    )
    errands = Errands(b, delta=delta and work.rows_leave)
    errands.start()
    needs = _Needs(b, work)
    for src, dst, chunk in work.hops:
        bring = errands.bring_columns if chunk[0] else errands.bring_rows
        bring(src, dst, needs.through(dst, chunk))
    homecoming = _Homecoming(errands, work, needs)
    for rank, (i, j) in work.order():
        errands.attend_all(rank, needs.there(rank, (False, i)), needs.there(rank, (True, j)))
        if work.last_of_row[rank, i] == j:
            homecoming.finished(rank, (False, i))
        if work.last_of_column[rank, j] == i and direction is Direction.BACKWARD:
            homecoming.finished(rank, (True, j))
    return errands.end()


class _Needs:
    """Parts of chunks that ranks compute with, and parts that go through a rank to others."""

    def __init__(self, b: PlanBuilder, work: "_Work") -> None:
        self.gate = gateways(work.makers, work.owner, work.gpus_per_node)
        self._owner = work.owner
        self._parts = (
            [b.attending_q(parts) for parts in b.parts_q],
            [b.attended_kv(parts) for parts in b.parts_kv],
        )
        self._own: dict[tuple[int, RoutedChunk], Chunks] = {}
        self._through: dict[tuple[int, RoutedChunk], Chunks] = {}
        for rank, blocks in enumerate(work.blocks):
            for i, j in blocks:
                q, kv = b.parts_q[i], b.parts_kv[j]
                self._add(rank, (False, i), b.needed_q(q, kv))
                self._add(rank, (True, j), b.needed_kv(q, kv))

    def _add(self, rank: int, chunk: RoutedChunk, parts: Chunks) -> None:
        for table, at in (
            (self._own, (rank, chunk)),
            (self._through, (self.gate.get((rank, chunk), rank), chunk)),
        ):
            known = table.get(at, ())
            if known != parts:
                table[at] = tuple(sorted({*known, *parts})) if known else parts

    def own(self, rank: int, chunk: RoutedChunk) -> Chunks:
        """Parts of a chunk that a rank computes with."""
        return self._own[rank, chunk]

    def there(self, rank: int, chunk: RoutedChunk) -> Chunks:
        """Parts of a chunk that a rank has to compute with.

        All that anybody needs where it owns the chunk, and else all that any of its blocks needs:
        so blocks of one chunk have the same parts, and can be fused.
        """
        if self._owner[chunk] == rank:
            return self._parts[chunk[0]][chunk[1]]
        return self._own[rank, chunk]

    def through(self, rank: int, chunk: RoutedChunk) -> Chunks:
        """Parts of a chunk that must reach a rank: for itself and for those it passes them to."""
        return self._through.get((rank, chunk), ()) or self.own(rank, chunk)


class _Homecoming:
    """Send partial results home when they are done, through one rank per node."""

    def __init__(self, errands: Errands, work: "_Work", needs: _Needs) -> None:
        self.errands = errands
        self.owner = work.owner
        self.needs = needs
        self.waits: dict[tuple[int, RoutedChunk], set[int]] = {}
        self.parts: dict[tuple[int, RoutedChunk], list[int]] = {}
        for (rank, chunk), gate in needs.gate.items():
            self.waits.setdefault((gate, chunk), set()).add(rank)
            if rank != gate:
                self.parts.setdefault((gate, chunk), []).append(rank)

    def finished(self, rank: int, chunk: RoutedChunk) -> None:
        """Take note that a rank's partial result of a chunk is done."""
        gate, on_kv = self.needs.gate.get((rank, chunk), rank), chunk[0]
        if gate != rank:
            self.errands.relay(rank, gate, on_kv, self.needs.own(rank, chunk))
        waits = self.waits.get((gate, chunk), set())
        waits.discard(rank)
        if waits:
            return
        for src in sorted(self.parts.get((gate, chunk), ())):
            self.errands.fold(gate, src, on_kv, self.needs.own(src, chunk))
        back = self.errands.return_columns if on_kv else self.errands.return_rows
        back(gate, self.owner[chunk], self.needs.through(gate, chunk))


class _Work:
    """Work and transfers of each rank under an allocation, in order.

    Attributes:
        owner: Rank that owns each chunk.
        makers: Ranks that compute some block of each chunk.
        hops: How chunks get to ranks that lack them, in order.
        last_of_row: (rank, row) -> the column of the last block of the row there.
        last_of_column: (rank, column) -> the row of the last block of the column there.
    """

    def __init__(self, problem: Problem, allocation: Allocation, gpus_per_node: int) -> None:
        self.gpus_per_node = gpus_per_node
        rows, columns = allocation.queries.owner(), allocation.keys.owner()
        self.owner: dict[RoutedChunk, int] = {(False, i): rank for i, rank in rows.items()}
        self.owner |= {(True, j): rank for j, rank in columns.items()}
        self.areas: list[list[int]] = problem.pattern.areas(
            allocation.queries.chunks, allocation.keys.chunks
        ).tolist()
        self.blocks: list[list[BlockIndex]] = [[] for _ in range(problem.cp)]
        self.makers: dict[RoutedChunk, set[int]] = {}
        for i, (row, areas) in enumerate(zip(allocation.cells, self.areas, strict=True)):
            for j, (rank, area) in enumerate(zip(row, areas, strict=True)):
                if not area:
                    continue
                if rank is None:
                    raise ValueError(
                        f"allocation: block ({i}, {j}) has {area} allowed pairs and must have a "
                        f"rank in 0..{problem.cp - 1}"
                    )
                self.blocks[rank].append((i, j))
                self.makers.setdefault((False, i), set()).add(rank)
                self.makers.setdefault((True, j), set()).add(rank)
        self.hops: list[Hop] = routes(self.makers, self.owner, problem.cp, gpus_per_node)
        arrival: dict[tuple[int, RoutedChunk], int] = {}
        got = [0] * problem.cp
        for _, dst, chunk in self.hops:
            arrival[dst, chunk] = got[dst]
            got[dst] += 1

        for rank, mine in enumerate(self.blocks):
            mine.sort(key=partial(self._priority, arrival, rank))
        self.last_of_row = {(r, i): j for r, mine in enumerate(self.blocks) for i, j in mine}
        self.last_of_column = {(r, j): i for r, mine in enumerate(self.blocks) for i, j in mine}

    def _priority(
        self, arrival: Mapping[tuple[int, RoutedChunk], int], rank: int, block: BlockIndex
    ) -> tuple[int, bool, int, int]:
        row, column = (False, block[0]), (True, block[1])
        ready = max(arrival.get((rank, row), -1), arrival.get((rank, column), -1))
        return ready, self.owner[row] == rank, *block

    @property
    def rows_leave(self) -> bool:
        """Whether some row is computed away from its owner."""
        return any(
            self.makers.get(chunk, {rank}) - {rank}
            for chunk, rank in self.owner.items()
            if not chunk[0]
        )

    def order(self) -> Iterator[tuple[int, BlockIndex]]:
        """All blocks in about the order in which ranks finish them, if areas were times."""
        ends = []
        for rank, blocks in enumerate(self.blocks):
            done = 0
            for at, (i, j) in enumerate(blocks):
                done += self.areas[i][j]
                ends.append((done, rank, at))
        for _, rank, at in sorted(ends):
            yield rank, self.blocks[rank][at]


# How chunks get to other nodes ------------------------------------------------------------


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
