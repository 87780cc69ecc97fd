"""Launches of each rank's host in eager torch, where every launch costs host time."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from harness.simulate.jobs import LaunchCounts, Need, NeedKind, UntimedJob


def launched_eagerly(parts: Sequence[UntimedJob]) -> list[UntimedJob]:
    """Note what hosts have launched by each part, and what waits for a batch's other half."""
    return _launched(_batched(parts))


def _batched(parts: Sequence[UntimedJob]) -> list[UntimedJob]:
    """Let what waits for a receive wait for the send that was launched with it too.

    torch issues the n-th send and the n-th receive of a rank as one batch, and waits for both.
    """
    sends: dict[int, list[int]] = {}
    received: dict[int, tuple[int, int]] = {}  # transfer -> rank, how many it had received before
    counts: dict[int, int] = {}
    for index, part in enumerate(parts):
        if part.need.kind is NeedKind.TRANSFER:
            src, dst = part.ranks
            sends.setdefault(src, []).append(index)
            received[index] = dst, counts.get(dst, 0)
            counts[dst] = counts.get(dst, 0) + 1
    found = []
    for index, part in enumerate(parts):
        more = set(part.after)
        if part.need.kind is not NeedKind.TRANSFER:
            for rank, at in (received[earlier] for earlier in part.after if earlier in received):
                more.update(sends.get(rank, [])[at : at + 1])
        found.append(part._replace(after=tuple(sorted(n for n in more if n < index))))
    return found


@dataclass(slots=True)
class _Host:
    """Launches of a rank's host so far, before sends and receives become one batch.

    Attributes are those of `Launched`; of what moves, each side apart.
    """

    calls: int = 0
    folds: int = 0
    merges: int = 0
    again: int = 0
    slices: int = 0
    sends: int = 0
    receives: int = 0
    far_sends: int = 0
    far_receives: int = 0
    sent: int = 0
    received: int = 0

    def attend(self, need: Need) -> None:
        """Launch a tile."""
        if need.again:
            self.again += len(need.calls)
        else:
            self.calls += len(need.calls)
        self.folds += any(need.size)
        self.slices += need.sliced

    def send(self, need: Need) -> None:
        """Launch the sending side of what moves."""
        self.sends += 1
        self.far_sends += need.far
        self.sent += need.messages

    def receive(self, need: Need) -> None:
        """Launch the receiving side of what moves."""
        self.receives += 1
        self.far_receives += need.far
        self.received += need.messages

    @property
    def launched(self) -> LaunchCounts:
        """The launches so far, with the larger of the counts of sends and receives as batches."""
        return LaunchCounts(
            calls=self.calls,
            folds=self.folds,
            merges=self.merges,
            moves=max(self.sends, self.receives),
            again=self.again,
            far=max(self.far_sends, self.far_receives),
            slices=self.slices,
            messages=max(self.sent, self.received),
        )


def _launched(parts: Sequence[UntimedJob]) -> list[UntimedJob]:
    """Note what hosts have launched by each part, in the plan's order."""
    hosts: defaultdict[int, _Host] = defaultdict(_Host)
    latest: dict[int, int] = {}
    found = []
    for index, part in enumerate(parts):
        need = part.need
        ranks = _launch(part, hosts)
        launched = tuple([hosts[rank].launched for rank in ranks])
        moves = need.kind is NeedKind.TRANSFER
        before: tuple[int, ...] = ()
        # Gradients of keys wait for what made them, and are sent when a step has ended.
        if moves and need.far and not need.size.result_kv:
            before = tuple(latest[r] for r in part.ranks if r in latest)
        elif part.ranks and not moves:
            latest[part.ranks[0]] = index
        found.append(part._replace(launched=launched, latest=before))
    return found


def _launch(part: UntimedJob, hosts: Mapping[int, _Host]) -> tuple[int, ...]:
    """Let the hosts of a part's ranks launch it; return them, none if that costs no host time."""
    need = part.need
    match need.kind:
        case NeedKind.TILE:
            hosts[part.ranks[0]].attend(need)
        case NeedKind.MERGE:
            hosts[part.ranks[0]].merges += 1
        case NeedKind.TRANSFER:
            src, dst = part.ranks
            hosts[src].send(need)
            hosts[dst].receive(need)
        case NeedKind.COLLECTIVE:
            for rank in part.peers:
                hosts[rank].send(need)
                hosts[rank].receive(need)
        case (
            NeedKind.FINISH
            | NeedKind.DELTA
            | NeedKind.LINEAR
            | NeedKind.COPY
            | NeedKind.HOST
            | NeedKind.DELAY
        ):
            return ()
        case _:
            assert_never(need.kind)
    return part.peers or part.ranks
