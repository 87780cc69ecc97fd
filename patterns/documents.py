"""Packed documents: tokens see only their own document, causally or fully; one band each.

Padding after the last document attends nothing and is attended by none.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from patterns.areas import Ints
from patterns.geometry import Band
from patterns.kind import Kind, Mask, Parameter, Values, choice, digits, whole
from patterns.pattern import LONGEST, Bools


@dataclass(frozen=True, eq=False)
class SameDocument:
    """Keys of the query's own document are allowed; with `causal`, up to the query.

    Attributes:
        document: Document number of every position, shape (seqlen,); -1 = padding, of none.
        causal: Whether later keys are refused.
    """

    document: Ints
    causal: bool

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        same = (self.document[q] == self.document[k]) & (self.document[k] >= 0)
        return np.asarray(same & (k <= q) if self.causal else same)


def _lengths(value: str) -> str:
    parts = [part.strip() for part in value.split("+")]
    lengths = [digits(part) for part in parts]
    if not all(length is not None and 1 <= length <= LONGEST for length in lengths):
        raise ValueError(f"must be whole numbers in 1..{LONGEST} joined by +; try 5+11+48")
    return "+".join(map(str, lengths))


def _documents(values: Values, seqlen_q: int, _: int) -> Mask:
    lengths = [int(part) for part in values["lengths"].split("+")]
    padding = int(values["padding"])
    total = sum(lengths) + padding
    if total != seqlen_q:
        gap = f"add a document of {seqlen_q - total}" if total < seqlen_q else "shorten a document"
        what = "lengths and padding" if padding else "lengths"
        raise ValueError(
            f"documents: {what} sum to {total}, which must equal the sequence length "
            f"({seqlen_q}); {gap}"
        )
    causal = values["mask"] == "causal"
    bands = tuple(
        Band(q0=start, q1=stop, k0=start, k1=stop, lo=0 if causal else None)
        for start, stop in pairwise(accumulate(lengths, initial=0))
    )
    numbers = np.append(np.arange(len(lengths), dtype=np.int64), -1)
    document = np.repeat(numbers, [*lengths, padding])
    return Mask(bands=bands, predicate=SameDocument(document, causal))


def _sample(seqlen: int) -> str:
    """A third or so, one token, and the rest."""
    first = seqlen * 2 // 7
    rest = [first, 1, seqlen - first - 1] if first and seqlen - first > 1 else [seqlen]
    return "lengths=" + "+".join(map(str, rest))


DOCUMENTS = Kind(
    summary="packed documents; a query sees keys of its own document",
    build=_documents,
    parameters={
        "lengths": Parameter(default=None, canonical=_lengths),
        "mask": choice("causal", "full"),
        "padding": whole(0, least=0),
    },
    cross=False,
    sample=_sample,
)
