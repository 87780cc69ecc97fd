"""The four masks that one kernel call can apply, as plain values: no torch here."""

from dataclasses import dataclass
from enum import StrEnum

from patterns.areas import BandArrays


class MaskKind(StrEnum):
    """How a kernel call decides which keys a query meets."""

    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one kernel call.

    FULL: every query meets every key. CAUSAL: query index i meets key index j if `j <= i`, counted
    from the first row and column of the call (top-left), whatever the two lengths. BAND: query i
    meets key j if `lo <= q[i] - k[j] <= hi` in token positions; a bound that is None does not bind.
    PACKED: they meet if one of `bands` allows it. A row of the last two may meet no key.

    Args:
        kind: Which of the four.
        q: Token positions of the query rows, one a row.
        k: Token positions of the key columns, one a column.
        lo: Least `query - key` distance of a BAND; None = no lower bound.
        hi: Greatest such distance; None = no upper bound.
        bands: Of PACKED: ascending, so that no two share a query position or a key position.
    """

    kind: MaskKind
    q: range
    k: range
    lo: int | None = None
    hi: int | None = None
    bands: BandArrays | None = None

    def __post_init__(self) -> None:
        """Refuse bounds and bands that the kind would ignore, and PACKED without bands."""
        if self.kind is not MaskKind.BAND and (self.lo is not None or self.hi is not None):
            msg = f"mask: {self.kind} takes no bounds, got lo={self.lo}, hi={self.hi}; use BAND"
            raise ValueError(msg)
        if (self.kind is MaskKind.PACKED) is (self.bands is None):
            given = "none" if self.bands is None else len(self.bands)
            msg = f"mask: {self.kind} takes bands if it is PACKED and else none, got {given}"
            raise ValueError(msg)
