"""Packed documents and padding as patterns, from what loaders have: lengths, or their ends."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from patterns import Pattern, make_pattern
from patterns.areas import Ints
from patterns.kind import integer

Numbers = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor | Ints
"""Whole numbers in a row; or rows of them, one for each sequence of a batch."""


def documents_of(
    cu_seqlens: Numbers | None = None,
    *,
    lengths: Numbers | None = None,
    seqlen: int | None = None,
    causal: bool = True,
) -> Pattern:
    """Return the pattern of documents side by side, and of padding behind them.

    `documents_of(cu_seqlens)` takes what varlen kernels take; `documents_of(lengths=[n], seqlen=S)`
    is key padding: n tokens, then padding that attends nothing and is attended by none.

    Args:
        cu_seqlens: Where each document starts, and where the last one ends: 0, ..., tokens. Read
            on the host, so a tensor on a GPU makes it wait.
        lengths: Tokens of each document, in place of `cu_seqlens`. Empty documents are left out.
        seqlen: Tokens of the whole sequence; None = no padding.
        causal: Whether a query sees no later keys.

    Raises:
        ValueError: Both or none are given, the numbers are no lengths, or rows of a batch differ:
            the sequences of a batch share one pattern.
    """
    if (cu_seqlens is None) is (lengths is None):
        raise ValueError("documents_of: give cu_seqlens or lengths, one of them")
    if lengths is None:
        assert cu_seqlens is not None
        ends = _row("cu_seqlens", cu_seqlens)
        if not ends or ends[0] or any(end < start for start, end in pairwise(ends)):
            raise ValueError(
                f"documents_of: cu_seqlens ({_short(ends)}) must start with 0 and never fall; try "
                "[0, 5, 16]"
            )
        found = [end - start for start, end in pairwise(ends)]
    else:
        found = _row("lengths", lengths)
    if not any(found) or min(found) < 0:
        raise ValueError(f"documents_of: lengths ({_short(found)}) must be 0 or more, one above 0")
    total = sum(found)
    whole = total if seqlen is None else integer("seqlen", seqlen)
    if whole < total:
        raise ValueError(f"documents_of: seqlen ({whole}) is less than the {total} tokens of all")
    text = f"documents:lengths={'+'.join(str(length) for length in found if length)}"
    padding = f",padding={whole - total}" if whole > total else ""
    return make_pattern(text + ("" if causal else ",mask=full") + padding, whole)


def within_documents(pattern: Pattern, positions: torch.Tensor) -> torch.Tensor:
    """Return each position counted from the start of its document; padding is one document.

    Documents are blocks of queries and keys on the diagonal that follow one another. In a pattern
    that is not made of them all is one document.

    Args:
        pattern: Who attends whom.
        positions: Positions in the whole sequence, int64.
    """
    bands = pattern.arrays
    alike = np.array_equal(bands.q0, bands.k0) and np.array_equal(bands.q1, bands.k1)
    if not (pattern.descends and alike):
        return positions
    starts = torch.from_numpy(np.append(bands.q0, bands.q1[-1:]).astype(np.int64))
    document = torch.searchsorted(starts, positions, right=True) - 1
    return positions - starts[document]


def _row(name: str, numbers: Numbers) -> list[int]:
    """Take one row of whole numbers, or several that are alike."""
    array = isinstance(numbers, torch.Tensor | np.ndarray)
    rows: list[Any] = numbers.tolist() if array else list(numbers)  # type: ignore[union-attr]  # as asked
    if rows and isinstance(rows[0], Sequence):
        if any(list(row) != list(rows[0]) for row in rows):
            raise ValueError(
                f"documents_of: {name} has {len(rows)} rows that differ, and the sequences of a "
                "batch share one pattern; lay them side by side in one sequence, as "
                "documents_of(lengths=[n0, n1, ...]) with batch 1"
            )
        rows = list(rows[0])
    return [integer(name, each) for each in rows]


def _short(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ..." if len(numbers) > 8 else shown
