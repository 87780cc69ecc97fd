"""The three masks that one kernel call can apply, as plain values: no torch here."""

from dataclasses import dataclass
from enum import StrEnum


class MaskKind(StrEnum):
    """How a kernel call decides which keys a query meets."""

    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one kernel call.

    FULL: every query meets every key. CAUSAL: query index i meets key index j if `j <= i`, counted
    from the first row and column of the call (top-left), whatever the two lengths. BAND: query i
    meets key j if `lo <= q[i] - k[j] <= hi` in token positions; a bound that is None does not bind.

    Args:
        kind: Which of the three.
        q: Token positions of the query rows, one a row.
        k: Token positions of the key columns, one a column.
        lo: Least `query - key` distance of a BAND; None = no lower bound.
        hi: Greatest such distance; None = no upper bound.
    """

    kind: MaskKind
    q: range
    k: range
    lo: int | None = None
    hi: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that the kind would ignore."""
        if self.kind is not MaskKind.BAND and (self.lo is not None or self.hi is not None):
            msg = f"mask: {self.kind} takes no bounds, got lo={self.lo}, hi={self.hi}; use BAND"
            raise ValueError(msg)
