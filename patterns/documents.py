"""Packed documents: tokens see only their own document; causally, fully, in a window, by blocks.

Padding after the last document attends nothing and is attended by none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from patterns.areas import Ints
from patterns.geometry import Band
from patterns.kind import (
    BuiltMask,
    Kind,
    Parameter,
    Values,
    digits,
    parameter_choice,
    whole_parameter,
)
from patterns.lengths import PACK, lengths_of, sample_lengths
from patterns.pattern import LONGEST, Bools

_ALL = "all"


@dataclass(frozen=True, eq=False)
class SameDocument:
    """Keys of the query's own document are allowed; with `causal`, up to the query.

    Attributes:
        document: Document number of every position, shape (seqlen,); -1 = padding, of none.
        causal: Whether later keys are refused.
        window: The most positions between a query and a key; None where there is no such bound.
    """

    document: Ints
    causal: bool
    window: int | None = None

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        same = (self.document[q] == self.document[k]) & (self.document[k] >= 0)
        if self.window is not None:
            same = same & (np.abs(q - k) <= self.window)
        return np.asarray(same & (k <= q) if self.causal else same)


@dataclass(frozen=True, eq=False)
class SameDocumentEarlierBlock:
    """Keys of the query's own document are allowed, of its own block and of those before.

    Attributes:
        document: Document number of every position, shape (seqlen,).
        block: Block number inside the document of every position, shape (seqlen,).
    """

    document: Ints
    block: Ints

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        same = self.document[q] == self.document[k]
        return np.asarray(same & (self.block[k] <= self.block[q]))


def _window(value: str) -> str:
    number = digits(value)
    if value != _ALL and (number is None or number > LONGEST):
        raise ValueError(f"must be a whole number in 0..{LONGEST}, or {_ALL}; try 127")
    return value if number is None else str(number)


def _documents(values: Values, seqlen: int, _: int) -> BuiltMask:
    padding = int(values["padding"])
    lengths = lengths_of(values, "documents", seqlen, padding)
    causal = values["mask"] == "causal"
    window = None if values["window"] == _ALL else int(values["window"])
    bands = tuple(
        _document(start, stop, causal=causal, window=window) for start, stop in _spans(lengths)
    )
    numbers = np.append(np.arange(len(lengths), dtype=np.int64), -1)
    document = np.repeat(numbers, [*lengths, padding])
    return BuiltMask(bands=bands, predicate=SameDocument(document, causal, window))


def _document(start: int, stop: int, *, causal: bool, window: int | None) -> Band:
    """Return one document; a window that reaches beyond it cuts nothing."""
    reach = None if window is None or window >= stop - start - 1 else window
    lo = 0 if causal else None if reach is None else -reach
    return Band(q0=start, q1=stop, k0=start, k1=stop, lo=lo, hi=reach)


def _varlen_block_causal(values: Values, seqlen: int, _: int) -> BuiltMask:
    lengths = lengths_of(values, "varlen_block_causal", seqlen)
    size = int(values["block"])
    bands = tuple(
        Band(q0=q0, q1=min(q0 + size, stop), k0=start, k1=min(q0 + size, stop))
        for start, stop in _spans(lengths)
        for q0 in range(start, stop, size)
    )
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    inside = np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
    return BuiltMask(bands=bands, predicate=SameDocumentEarlierBlock(document, inside // size))


def _spans(lengths: list[int]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(lengths, initial=0))


DOCUMENTS = Kind(
    summary="packed documents; a query sees keys of its own document, at most `window` away",
    build=_documents,
    parameters={
        **PACK,
        "mask": parameter_choice("causal", "full"),
        "padding": whole_parameter(0, least=0),
        "window": Parameter(default=_ALL, canonical=_window),
    },
    cross=False,
    sample=sample_lengths,
)
VARLEN_BLOCK_CAUSAL = Kind(
    summary="packed documents in blocks; a query sees its own block and those before, whole "
    "(MAGI-1, arXiv:2505.13211)",
    build=_varlen_block_causal,
    parameters={**PACK, "block": whole_parameter(1024, least=1)},
    cross=False,
    sample=lambda seqlen: f"{sample_lengths(seqlen)},block={seqlen // 9 + 1}",
)
