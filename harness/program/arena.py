"""Where buffers lie in an arena: freed bytes are used again, those that cost no wait first."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from harness.program.operations import Lane

BUFFER_ALIGNMENT_BYTES = 256
"""Buffers begin at multiples of this: as cudaMalloc's do (CUDA C++ programming guide, device memory
accesses), and of what every kernel asks for."""

LanePositions = Mapping[Lane, int]
"""Per lane the number of its latest operation, of some that matter, counted from 1."""


class _Hole(NamedTuple):
    """Free bytes, who used them last, and when they were freed."""

    offset: int
    size: int
    users: LanePositions
    freed: int  # in which step of the rank

    @property
    def end(self) -> int:
        return self.offset + self.size


class Arena:
    """The bytes of one memory of a rank, in use and free."""

    def __init__(self) -> None:
        self.size = 0
        self._holes: list[_Hole] = []

    def take(self, size: int, known: LanePositions, step: int) -> tuple[int, LanePositions]:
        """Find room.

        Args:
            size: Bytes.
            known: Operations that are over when the buffer is first used.
            step: Holes that were freed later are for those who know that their users are over.

        Returns:
            Its offset, and the operations that must be over before it is used: holes of which that
            is known come first, then those that were freed longest ago, then new bytes.
        """
        need = -(-size // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
        best: tuple[tuple[bool, int, int], int, int] | None = None
        for first, last in self._runs(need):
            holes = self._holes[first:last]
            unknown = any(known.get(u, 0) < p for hole in holes for u, p in hole.users.items())
            if unknown and max(hole.freed for hole in holes) > step:
                continue
            cost = (unknown, max(hole.freed for hole in holes), holes[-1].end - holes[0].offset)
            if best is None or cost < best[0]:
                best = (cost, first, last)
        if best is None:
            return self._grow(need)
        return self._cut(need, best[1], best[2])

    def give(self, offset: int, size: int, users: LanePositions, step: int) -> None:
        """Free a buffer that these operations used last, in a step of the rank."""
        need = -(-size // BUFFER_ALIGNMENT_BYTES) * BUFFER_ALIGNMENT_BYTES
        self._put(_Hole(offset, need, users, step))

    def _runs(self, need: int) -> Iterator[tuple[int, int]]:
        """Yield the shortest runs of neighbouring holes that are large enough, as indices."""
        for first, hole in enumerate(self._holes):
            last, end = first, hole.end
            while end - hole.offset < need:
                last += 1
                if last == len(self._holes) or self._holes[last].offset != end:
                    break
                end = self._holes[last].end
            else:
                yield first, last + 1

    def _cut(self, need: int, first: int, last: int) -> tuple[int, LanePositions]:
        holes = self._holes[first:last]
        del self._holes[first:last]
        offset, rest = holes[0].offset, holes[-1].end - holes[0].offset - need
        if rest:
            tail = holes[-1]
            self._put(_Hole(tail.end - rest, rest, tail.users, tail.freed))
        return offset, _latest(hole.users for hole in holes)

    def _grow(self, need: int) -> tuple[int, LanePositions]:
        offset = self.size
        self.size += need
        return offset, {}

    def _put(self, hole: _Hole) -> None:
        at = len(self._holes)
        while at and self._holes[at - 1].offset > hole.offset:
            at -= 1
        self._holes.insert(at, hole)


def _latest(all_users: Iterator[LanePositions]) -> LanePositions:
    found: dict[Lane, int] = {}
    for users in all_users:
        for lane, position in users.items():
            found[lane] = max(found.get(lane, 0), position)
    return found
