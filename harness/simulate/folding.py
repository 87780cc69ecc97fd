"""Folding: jobs that look alike and wait for jobs that look alike run at the same times.

So one of each kind is enough. The kinds are the coarsest partition in which every job of a kind
needs, queues behind, and is queued with the same kinds (colour refinement); a plan that every rank
runs in step becomes as small as one rank's part. `tests/harness/simulate/test_job_graph.py` shows
that times stay equal, to the bit, where both can be run.
"""

from collections.abc import Hashable, Iterable, Sequence

from harness.simulate.jobs import UntimedJob
from harness.simulate.queues import STREAMS, Stream, number_of

_PER_RANK = len(STREAMS)


def folded(parts: Sequence[UntimedJob]) -> tuple[tuple[UntimedJob, ...], dict[int, int]]:
    """Keep one part of each kind: the coarsest partition that times cannot tell apart."""
    kinds = _kinds(parts)
    if len(set(kinds)) == len(parts):
        ranks_met = {queue // _PER_RANK for part in parts for queue in _lines(part)}
        return tuple(parts), dict.fromkeys(sorted(ranks_met), 1)
    first: dict[int, int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    kept = sorted(first.values())
    number = {kinds[index]: at for at, index in enumerate(kept)}
    alike = _ranks_alike(parts, kinds)

    def stands(earlier: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({number[kinds[index]] for index in earlier}))

    found = []
    for index in kept:
        part = parts[index]
        ranks = tuple(alike[rank] for rank in part.ranks)
        queues = tuple(alike[q // _PER_RANK] * _PER_RANK + q % _PER_RANK for q in part.queues)
        if part.peers:  # a collective holds the ports of ranks that are one here
            queues = tuple(dict.fromkeys(queues))
        found.append(
            part._replace(
                queues=queues,
                ranks=ranks,
                after=stands(part.after),
                gates=stands(part.gates),
                latest=stands(part.latest),
                peers=tuple(sorted({alike[rank] for rank in part.peers})),
                launched=part.launched if part.ranks else tuple(dict.fromkeys(part.launched)),
            )
        )
    counts: dict[int, int] = {}
    for rank in alike.values():
        counts[rank] = counts.get(rank, 0) + 1
    return tuple(found), counts


def _lines(part: UntimedJob) -> tuple[int, ...]:
    """The queues of a part; what no port is held for has one too here, for it comes in an order."""
    return part.queues or tuple(number_of(rank, Stream.TRANSFER) for rank in part.peers)


def _ranks_alike(parts: Sequence[UntimedJob], kinds: Sequence[int]) -> dict[int, int]:
    """Per rank, the first rank whose queues all hold the same kinds in the same order."""
    lines: dict[int, dict[int, list[int]]] = {}
    for part, kind in zip(parts, kinds, strict=True):
        for queue in _lines(part):
            rank, stream = divmod(queue, _PER_RANK)
            lines.setdefault(rank, {}).setdefault(stream, []).append(kind)
    seen: dict[Hashable, int] = {}
    return {
        rank: seen.setdefault(tuple(sorted((s, tuple(line)) for s, line in queues.items())), rank)
        for rank, queues in sorted(lines.items())
    }


def _kinds(parts: Sequence[UntimedJob]) -> list[int]:
    """Refine: same need, then same kinds waited for, same place in line, same kind of rank."""
    places: list[list[tuple[int, int]]] = [[] for _ in parts]
    lengths: dict[int, int] = {}
    for index, part in enumerate(parts):
        for queue in _lines(part):
            places[index].append((queue % _PER_RANK, lengths.get(queue, 0)))
            lengths[queue] = lengths.get(queue, 0) + 1
    kinds = _numbered(
        [
            (part.need, part.launched, tuple(place))
            for part, place in zip(parts, places, strict=True)
        ]
    )
    queued = all(places)
    while True:
        count = len(set(kinds))
        alike = _ranks_alike(parts, kinds)
        if queued and len(set(alike.values())) == len(alike):
            # No two ranks are alike, and no two parts have one place in a line: nothing folds.
            return list(range(len(parts)))
        kinds = _numbered(
            [
                (
                    kinds[index],
                    tuple(sorted({kinds[earlier] for earlier in part.after})),
                    tuple(sorted({kinds[earlier] for earlier in part.gates})),
                    tuple([kinds[earlier] for earlier in part.latest]),
                    tuple([alike[rank] for rank in part.peers or part.ranks]),
                )
                for index, part in enumerate(parts)
            ]
        )
        if len(set(kinds)) == count:
            return kinds


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
