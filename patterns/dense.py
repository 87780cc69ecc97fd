"""Full, causal and sliding-window attention: one band each.

The window follows the convention of flash-attention's `window_size=(left, right)`: key `k` is seen
from query `q` iff `q - left <= k <= q + right`. Causal is aligned to the top-left corner by
default (PyTorch's `is_causal`); `bottom_right` is flash-attention's alignment since version 2.1.

Source:
    https://github.com/Dao-AILab/flash-attention, README, "Change the behavior of the causal flag".
"""

from dataclasses import dataclass

import numpy as np

from patterns.areas import Ints
from patterns.geometry import Band
from patterns.kind import BuiltMask, Kind, Values, parameter_choice, whole_parameter
from patterns.pattern import Bools


@dataclass(frozen=True)
class AllKeys:
    """Every key is allowed."""

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        return np.ones(np.broadcast_shapes(q.shape, k.shape), dtype=np.bool_)


@dataclass(frozen=True)
class Before:
    """Keys up to `ahead` positions after the query are allowed."""

    ahead: int

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        return np.asarray(k <= q + self.ahead)


@dataclass(frozen=True)
class WithinWindow:
    """Keys from `left` positions before to `right` positions after the query are allowed."""

    left: int
    right: int

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        return np.asarray((q - self.left <= k) & (k <= q + self.right))


def _full(_: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    return BuiltMask(bands=(Band(q0=0, q1=seqlen_q, k0=0, k1=seqlen_kv),), predicate=AllKeys())


def _causal(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    ahead = seqlen_kv - seqlen_q if values["align"] == "bottom_right" else 0
    band = Band(q0=0, q1=seqlen_q, k0=0, k1=seqlen_kv, lo=-ahead)
    return BuiltMask(bands=(band,), predicate=Before(ahead))


def _window(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    # a window wider than the sequence is the whole sequence; so the numbers stay small
    left = min(int(values["left"]), seqlen_q - 1)
    right = min(int(values["right"]), seqlen_kv - 1)
    band = Band(q0=0, q1=seqlen_q, k0=0, k1=seqlen_kv, lo=-right, hi=left)
    return BuiltMask(bands=(band,), predicate=WithinWindow(left, right))


FULL_KIND = Kind(summary="every query sees every key", build=_full, sample_cross="")
CAUSAL_KIND = Kind(
    summary="a query sees the keys up to its own position",
    build=_causal,
    parameters={"align": parameter_choice("top_left", "bottom_right")},
    sample_cross="align=bottom_right",
)
WINDOW = Kind(
    summary="a query sees `left` keys before and `right` keys after its own position",
    build=_window,
    parameters={"left": whole_parameter(128, least=0), "right": whole_parameter(0, least=0)},
    sample=lambda seqlen: f"left={seqlen // 5},right=3",
)
