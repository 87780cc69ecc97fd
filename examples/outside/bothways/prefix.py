"""Prefix attention: all see a prefix, such as a prompt; behind it a query sees up to itself.

    prefix of 2     k0 k1 k2 k3
    q0              x  x
    q1              x  x
    q2              x  x  x
    q3              x  x  x  x

Source: Raffel et al., T5, arXiv:1910.10683, figure 4 (causal with prefix).
"""

from dataclasses import dataclass

import numpy as np

from patterns.areas import Ints
from patterns.geometry import Band
from patterns.kind import BuiltMask, Kind, Parameter, Values, whole_parameter
from patterns.pattern import Bools


@dataclass(frozen=True)
class Prefix:
    """Keys of the prefix are allowed, and others up to the query."""

    length: int

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        return np.asarray((k < self.length) | (k <= q))


def _prefix(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    length = min(int(values["length"]), seqlen_kv)
    bands = [Band(q0=0, q1=seqlen_q, k0=0, k1=length)]
    if length < min(seqlen_q, seqlen_kv):
        bands.append(Band(q0=length, q1=seqlen_q, k0=length, k1=seqlen_kv, lo=0))
    return BuiltMask(bands=tuple(bands), predicate=Prefix(length))


PATTERN = Kind(
    summary="a query sees a prefix, and behind it the keys up to its own position",
    build=_prefix,
    parameters={"length": Parameter(default=None, canonical=whole_parameter(1, least=1).canonical)},
    sample=lambda seqlen: f"length={seqlen // 3 + 1}",
)
