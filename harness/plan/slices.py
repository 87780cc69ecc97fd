"""Where parts lie in wholes: heads in sets of heads, chunks in slabs.

Shared by the executor and the memory ledger, so that both cut alike.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from harness.plan import heads as head_sets

OffsetRange = tuple[int, int]
Cut = tuple[OffsetRange, OffsetRange]
"""Half-open ranges of rows and of heads."""


@lru_cache(maxsize=4096)
def positions(whole: int, part: int) -> OffsetRange:
    """Where a set of heads lies in the ascending list of a larger set's heads.

    Raises:
        ValueError: The part is not a run of the whole.
    """
    low = (whole & ((part & -part) - 1)).bit_count()
    high = low + part.bit_count()
    inside = head_sets.members(whole)[low:high]
    if sum(1 << head for head in inside) != part:
        raise ValueError(
            f"heads {head_sets.text(part)} are no run of heads {head_sets.text(whole)}"
        )
    return low, high


@lru_cache(maxsize=1024)
def head_runs(heads: int, group: int) -> tuple[Cut, ...]:
    """Split query heads into runs in which each KV head serves equally many.

    Returns:
        Per run, offsets into the ascending query heads and into their ascending KV heads.
    """
    counts: dict[int, int] = {}
    for head in head_sets.members(heads):
        counts[head // group] = counts.get(head // group, 0) + 1
    found: list[Cut] = []
    q, equal = 0, 0
    for kv, count in enumerate(counts.values()):
        if found and count == equal:
            (q0, _), (kv0, _) = found[-1]
            found[-1] = ((q0, q + count), (kv0, kv + 1))
        else:
            found.append(((q, q + count), (kv, kv + 1)))
        q, equal = q + count, count
    return tuple(found)


def runs(whole: Sequence[int], part: Sequence[int]) -> Iterator[list[int]]:
    """Split chunks into runs that lie side by side in `whole`."""
    at = {chunk: index for index, chunk in enumerate(whole)}
    run: list[int] = []
    for chunk in part:
        if run and at[run[-1]] + 1 != at[chunk]:
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run
