"""The ranks of a group make one call: compared in every call, before anything else moves.

Each rank tells the others three whole numbers: what it does and, as a digest, with what. That is
one small collective of a fixed size, so it fits whatever the others do here. Where the numbers
differ the ranks tell in words, and each raises what differs. A rank that refuses a call tells it
too, so that the others do not wait for it.

The numbers go through the CPU where the group reaches it. A group of NCCL alone makes the host wait
for the GPU in each call; `init_process_group("cpu:gloo,cuda:nccl")` does not.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from harness.errors import HarnessError, PlanError, UnsupportedError, told

_LONGEST_TO_TELL = timedelta(seconds=10)
"""A rank that refuses waits so long for the others to hear it."""

Facts = tuple[tuple[str, str], ...]
"""The facts of a call, by name, in a fixed order."""


class Word(IntEnum):
    """The step that a rank is about to take."""

    RUN = 1
    REFUSE = 2
    COUNT_TOKENS = 3
    GATHER = 4
    CHOOSE = 5


def compare_calls(group: dist.ProcessGroup | None, word: Word, facts: Facts, digest: bytes) -> None:
    """Return when all ranks of a group are about to do the same. A collective.

    Args:
        group: The ranks; None = this process is alone.
        word: This rank's step.
        facts: With what; told where ranks differ.
        digest: `digest_of(facts)`, which callers keep.

    Raises:
        PlanError: Ranks differ; names in what. Every rank raises it.
    """
    if group is not None:
        halves = (int.from_bytes(digest[at : at + 8], "big", signed=True) for at in (0, 8))
        rows = _told(group, (word, *halves))
        if len(set(rows)) > 1:
            _complain(group, facts)


def lengths(group: dist.ProcessGroup | None, queries: int, keys: int) -> tuple[int, int]:
    """Return the tokens of all ranks together. A collective.

    Raises:
        PlanError: Some rank is about to do something else.
    """
    if group is None:
        return queries, keys
    rows = _told(group, (Word.COUNT_TOKENS, queries, keys))
    if {row[0] for row in rows} != {Word.COUNT_TOKENS}:
        _complain(group, (("call", "a sum of the ranks' lengths, as seqlen is not given"),))
    return sum(row[1] for row in rows), sum(row[2] for row in rows)


def told_by_first(group: dist.ProcessGroup | None, make: Callable[[], str]) -> str:
    """Let rank 0 of a group make a text, and return it on all of them. A collective.

    Raises:
        UnsupportedError: Rank 0 could not make it; on every rank, with its reason.
    """
    if group is None:
        return make()
    said: list[Any] = [None, ""]
    if dist.get_rank(group) == 0:
        try:
            said = [make(), ""]
        except (HarnessError, ValueError) as error:
            said = [None, told(error)]
    dist.broadcast_object_list(said, src=dist.get_global_rank(group, 0), group=group)
    text, why = said
    if text is None:
        raise UnsupportedError(str(why))
    return str(text)


@contextmanager
def telling(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Tell the other ranks what this one refuses inside, then raise it."""
    try:
        yield
    except (HarnessError, ValueError, TypeError) as error:
        if group is not None:
            with suppress(PlanError, RuntimeError):  # of the two errors this rank's own says more
                rows = _told(group, (Word.REFUSE, 0, 0), _LONGEST_TO_TELL)
                if len(set(rows)) > 1:
                    _complain(group, (("call", f"none, it is refused there: {told(error)}"),))
        raise


def digest_of(facts: Facts) -> bytes:
    """Return 16 bytes that stand for a call."""
    return hashlib.sha256(repr(facts).encode()).digest()[:16]


def _told(
    group: dist.ProcessGroup, row: Sequence[int], wait: timedelta | None = None
) -> list[tuple[int, ...]]:
    """Gather a row from each rank, in rank order."""
    reached = dist.get_backend_config(group)
    device = torch.device("cpu" if "cpu:" in reached else "cuda")
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(rows, mine, group=group, async_op=True)
    assert work is not None  # this rank is a member of the group
    work.wait() if wait is None else work.wait(wait)
    return [tuple(each.tolist()) for each in rows]


def _complain(group: dist.ProcessGroup, facts: Facts) -> NoReturn:
    """Compare in words what ranks differ in; all ranks of a group come here, or none."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, facts, group=group)
    everyone: list[dict[str, str]] = list(map(dict, found))
    lines = []
    for name in everyone[0]:
        values = [each.get(name) for each in everyone]
        if None not in values and len(set(values)) > 1:
            each = (
                f"{value} on ranks {[rank for rank, other in enumerate(values) if other == value]}"
                for value in dict.fromkeys(values)
            )
            lines.append(f"{name}: {', '.join(each)}")
    first = next(rank for rank, other in enumerate(everyone) if other != everyone[0])
    raise PlanError(
        "all ranks of a group make one call", rank=first, task=None, detail="; ".join(lines)
    )
