"""Who shares which documents by the rule of Megatron's scheduler for dynamic context parallelism.

A document gets the power of two of ranks that its length asks for, and counts as length squared
over ranks. Documents go in rounds, longest first: each to free ranks or to the least loaded group
of its size, until ranks are even to 5 %. Of an overloaded group the last document waits for the
next round, and where ranks are left without any, the smallest group grows to twice its size.

Source: Megatron-LM, megatron/core/pipeline_parallel/hybrid_cp_schedule.py, `BalancedCPScheduler`.
There every document of a round runs by itself, with a barrier behind each round; here only its
choice of groups is taken. Where it would fail, for degrees that are no power of two, a group is all
ranks at most, and ranks that no group can grow into stay idle in that round.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log2

from harness.planning.groups.grouping import Members

_SLACK = 0.05  # Source: as above, `delta`: a round ends where ranks differ by less
_OVER = 1.1  # Source: as above, a bucket is closed at so much of its share of the work


def ranks_needed(length: int, most: int, ranks: int) -> int:
    """Return how many ranks a document of some tokens gets, at most `most` tokens each."""
    doublings = max(0, ceil(log2(length / most)))
    return min(1 << doublings, ranks)


def megatron_groups(lengths: Sequence[int], ranks: int, most: int) -> tuple[Members, ...]:
    """Choose a group for every document.

    Args:
        lengths: Tokens of each document.
        ranks: How many there are.
        most: Tokens of one document that a rank takes (`--max-seqlen-per-dp-cp-rank`).

    Returns:
        Of each document, the ranks that share it.
    """
    found: dict[int, Members] = {}
    waiting = sorted(range(len(lengths)), key=lambda d: -lengths[d])
    while waiting:
        turn = _Turn(lengths, ranks, most)
        waiting = turn.fill(waiting)
        turn.grow()
        found |= turn.placed()
    return tuple(found[document] for document in range(len(lengths)))


@dataclass(slots=True)
class _Group:
    """Ranks side by side that run the same documents.

    Attributes:
        members: The ranks.
        documents: What they run, in order.
        load: Work of one of them.
    """

    members: list[int]
    documents: list[int] = field(default_factory=list)
    load: float = 0.0


class _Turn:
    """One round of documents.

    Args:
        lengths: Of all documents.
        ranks: How many there are.
        most: See `megatron_groups`.
    """

    def __init__(self, lengths: Sequence[int], ranks: int, most: int) -> None:
        self.ranks = ranks
        self.needed = [ranks_needed(length, most, ranks) for length in lengths]
        self.cost = [length**2 / n for length, n in zip(lengths, self.needed, strict=True)]
        self.groups: list[_Group] = []

    @property
    def used(self) -> int:
        """Ranks that have something to do: the first ones."""
        return sum(len(group.members) for group in self.groups)

    def fill(self, waiting: Sequence[int]) -> list[int]:
        """Place documents until ranks are even, or nothing fits; return those that must wait."""
        buckets = self._buckets(waiting)
        first, smaller = self.needed[waiting[0]], False
        while buckets:
            bucket = next((b for b in buckets if self._fits(self.needed[b[0]])), None)
            if bucket is None:
                break
            document = bucket.popleft()
            self._place(document)
            buckets = [each for each in buckets if each]
            smaller = smaller or self.needed[document] < first
            if smaller and buckets and self._slack() <= _SLACK * self._largest():
                break
        late = [document for bucket in buckets for document in bucket]
        return late + self._trimmed()

    def _buckets(self, waiting: Sequence[int]) -> list[deque[int]]:
        """Cut the documents into runs of about equal work, as many as there are sizes."""
        left = len({self.needed[d] for d in waiting})
        target = sum(self.cost[d] for d in waiting) / left
        buckets: list[deque[int]] = [deque()]
        work = 0.0
        for at, document in enumerate(waiting):
            full = work + self.cost[document] > _OVER * target
            scarce = len(waiting) - at <= left - (len(buckets) - 1)
            if buckets[-1] and (full or scarce):
                buckets.append(deque())
                work, left = 0.0, left - 1
            buckets[-1].append(document)
            work += self.cost[document]
        return buckets

    def _fits(self, needed: int) -> bool:
        equal = any(len(group.members) == needed for group in self.groups)
        return equal or self.ranks - self.used >= needed

    def _place(self, document: int) -> None:
        """Give a document to new ranks if there are free ones that beat its group so far."""
        needed = self.needed[document]
        equal = [group for group in self.groups if len(group.members) == needed]
        best = min(equal, key=lambda group: group.load, default=None)
        if self.ranks - self.used >= needed and (best is None or best.load > 0):
            best = _Group(list(range(self.used, self.used + needed)))
            self.groups.append(best)
        assert best is not None  # `_fits` says so
        best.documents.append(document)
        best.load += self.cost[document]

    def _loads(self) -> list[float]:
        loads = [group.load for group in self.groups]
        return loads + [0.0] * (self.used < self.ranks)

    def _largest(self) -> float:
        return max(self._loads())

    def _slack(self) -> float:
        return max(self._loads()) - min(self._loads())

    def _trimmed(self) -> list[int]:
        """Take last documents from the fullest group while ranks get evener by it."""
        taken: list[int] = []
        while self.used == self.ranks and self._slack() > _SLACK * self._largest():
            group = max(self.groups, key=lambda each: each.load)
            if len(group.documents) <= 1:
                break
            before, last = self._slack(), group.documents[-1]
            group.load -= self.cost[last]
            if self._slack() >= before:
                group.load += self.cost[last]
                break
            taken.append(group.documents.pop())
        return taken

    def grow(self) -> None:
        """Let the smallest groups double, the first of them first, until no rank is idle."""
        while self.used < self.ranks:
            group = min(self.groups, key=lambda each: len(each.members))
            more = min(len(group.members), self.ranks - len(group.members))
            if not 0 < more <= self.ranks - self.used:
                break
            later = self.groups[self.groups.index(group) + 1 :]
            last = group.members[-1]
            group.members += range(last + 1, last + 1 + more)
            for each in later:
                each.members = [rank + more for rank in each.members]

    def placed(self) -> dict[int, Members]:
        """The ranks of each document of this round."""
        return {d: tuple(group.members) for group in self.groups for d in group.documents}
