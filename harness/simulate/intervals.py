"""Spans of time: joined, and what of one another they leave uncovered."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""(start, end), in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch; return disjoint ascending ones."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def gaps(start: float, end: float, cover: Sequence[Interval]) -> list[Interval]:
    """Parts of start..end outside of disjoint ascending intervals; one empty part if covered."""
    found, left = [], start
    for opens, closes in cover[bisect_right(cover, start, key=lambda c: c[1]) :]:
        if opens >= end:
            break
        if opens > left:
            found.append((left, opens))
        left = closes
    if left < end or not found:
        found.append((left, max(left, end)))
    return found


def outside(inner: Sequence[Interval], cover: Sequence[Interval]) -> float:
    """Length of intervals that other, disjoint and ascending ones leave uncovered."""
    return sum(b - a for start, end in inner for a, b in gaps(start, end, cover))
