"""Who goes next: timings of a device, from harmless to spiteful, drawn by a seed."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from harness.program.operations import COMMUNICATORS, Lane


class Turn(NamedTuple):
    """A step that can be taken: of which rank and lane, and whether it ends an operation."""

    rank: int
    lane: Lane
    ends: bool


Policy = Callable[[Sequence[Turn]], Turn]
"""Chooses one of the steps that can be taken."""


def at_random(draw: random.Random) -> Policy:
    """Any, each as likely."""
    return draw.choice


def communication_first(draw: random.Random) -> Policy:
    """Messages before all else."""
    return partial(_preferred, draw, lambda turn: turn.lane not in COMMUNICATORS)


def communication_last(draw: random.Random) -> Policy:
    """Messages only when nothing else can go on."""
    return partial(_preferred, draw, lambda turn: turn.lane in COMMUNICATORS)


def starts_first(draw: random.Random) -> Policy:
    """All that can start does so before anything ends: as much at once as there can be."""
    return partial(_preferred, draw, lambda turn: turn.ends)


def starved(draw: random.Random) -> Policy:
    """One lane of one rank waits until nobody else can go on."""
    lane, rank = draw.choice(tuple(Lane)), draw.randrange(1 << 16)

    def last(turn: Turn) -> bool:
        return turn.lane is lane and (turn.rank + rank) % 2 == 0

    return partial(_preferred, draw, last)


def by_priority(draw: random.Random, depth: int = 3, steps: int = 2000) -> Policy:
    """The lane of the highest priority; now and then that one falls to the lowest.

    Source: probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): a bug of depth d is
    found with probability 1 / (n k**(d - 1)) at least, of n threads and k steps.
    """
    priority: dict[tuple[int, Lane], float] = {}
    falls = {draw.randrange(steps) for _ in range(depth - 1)}
    count = 0

    def choose(turns: Sequence[Turn]) -> Turn:
        nonlocal count
        count += 1
        for turn in turns:
            priority.setdefault((turn.rank, turn.lane), draw.random())
        best = max(turns, key=lambda turn: priority[turn.rank, turn.lane])
        if count in falls:
            priority[best.rank, best.lane] = -count
        return best

    return choose


POLICIES: Mapping[str, Callable[[random.Random], Policy]] = {
    "random": at_random,
    "communication-last": communication_last,
    "communication-first": communication_first,
    "starts-first": starts_first,
    "starved": starved,
    "by-priority": by_priority,
}
"""By name, those that find most first."""


def _preferred(draw: random.Random, last: Callable[[Turn], bool], turns: Sequence[Turn]) -> Turn:
    first = [turn for turn in turns if not last(turn)]
    return draw.choice(first or turns)
