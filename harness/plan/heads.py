"""Sets of heads as bit sets: bit h is head h."""

from collections.abc import Iterable
from functools import lru_cache


def span(start: int, stop: int) -> int:
    """Bit set of the heads start <= h < stop."""
    return (1 << stop) - (1 << start)


def members(heads: int) -> tuple[int, ...]:
    """Heads of a bit set, in ascending order."""
    return tuple(h for h in range(heads.bit_length()) if heads >> h & 1)


def text(heads: int) -> str:
    """Print a bit set as ranges: `0-3,8`."""
    parts: list[str] = []
    listed = members(heads)
    start = 0
    while start < len(listed):
        stop = start
        while stop + 1 < len(listed) and listed[stop + 1] == listed[stop] + 1:
            stop += 1
        first, last = listed[start], listed[stop]
        parts.append(str(first) if first == last else f"{first}-{last}")
        start = stop + 1
    return ",".join(parts)


@lru_cache(maxsize=4096)
def heads_side_by_side(part: int, *wholes: int) -> tuple[int, ...]:
    """Split a set of heads into parts whose heads lie side by side in each of the larger sets."""
    found: list[int] = []
    previous = -1
    for head in members(part):
        between = span(previous + 1, head)
        if found and not any(between & whole for whole in wholes):
            found[-1] |= 1 << head
        else:
            found.append(1 << head)
        previous = head
    return tuple(found)


def atoms(sets: Iterable[int]) -> tuple[int, ...]:
    """Coarsest partition of heads such that every given set is a union of parts."""
    parts: list[int] = []
    for heads in dict.fromkeys(sets):
        rest, split = heads, []
        for part in parts:
            inside = part & heads
            if inside:
                split.append(inside)
            if part & ~heads:
                split.append(part & ~heads)
            rest &= ~part
        if rest:
            split.append(rest)
        parts = split
    return tuple(sorted(parts, key=lambda part: part & -part))
