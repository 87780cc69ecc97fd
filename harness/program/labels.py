"""Arithmetic of labels: how something was computed, as one number, instead of its value.

A row of a tensor has a label, a number of 64 bits made from the labels of what it was computed from
and how. Equal labels mean the same contributions in the same order, but for a coincidence of
hashes. Copies keep labels, in whatever precision; a merge with nothing and an addition to zero keep
them as well, as they keep values.

Labels here have the shape (batch, heads, rows); a weight's is (1, heads, 1).
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Labels: TypeAlias = NDArray[np.uint64]
"""(batch, heads, rows)."""

CallNumbers: TypeAlias = tuple[int, int]
"""Which of a tile's kernel calls, and which of its runs of heads."""

NOTHING = np.uint64(0)
"""Label of zeros, and of the log-sum-exp of no keys."""

_FACTOR, _OTHER, _START = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
"""The first three primes of xxHash (doc/xxhash_spec.md), which spread bits."""
_SHIFT = 29
_MASK = 2**64 - 1


def mixed(*parts: Labels | int) -> Labels:
    """Hash numbers in their order, element by element; at least one is an array."""
    start = _START
    for known, part in enumerate(parts):
        if not isinstance(part, int):
            return _mixed(start, parts[known:])
        start = ((start ^ (part * _FACTOR)) * _OTHER) & _MASK
        start ^= start >> _SHIFT
    raise AssertionError(f"no array among {parts}")


def _mixed(start: int, parts: tuple[Labels | int, ...]) -> Labels:
    factor, other, shift = np.uint64(_FACTOR), np.uint64(_OTHER), np.uint64(_SHIFT)
    total = np.full((1,), start, dtype=np.uint64)
    for part in parts:
        total = (total ^ (np.asarray(part, dtype=np.uint64) * factor)) * other
        total ^= total >> shift
    return total


def fold_rows(labels: Labels) -> Labels:
    """Hash all rows of each head by their order: (batch, heads, 1)."""
    weights = mixed(np.arange(1, labels.shape[2] + 1, dtype=np.uint64)) | np.uint64(1)
    return mixed((mixed(labels) * weights).sum(axis=2, keepdims=True, dtype=np.uint64))


def added(total: Labels, part: Labels, *also: Labels) -> Labels:
    """Labels of a sum so far after a part is added; `also` is what else it depends on."""
    made = mixed(total, part, *also)
    return np.where(total == NOTHING, part, np.where(part == NOTHING, total, made))


def attended(task: int, call: CallNumbers, q: Labels, k: Labels, v: Labels) -> list[Labels]:
    """Labels of out and lse of a kernel call."""
    keys = mixed(fold_rows(k), fold_rows(v)).repeat(q.shape[1] // k.shape[1], axis=1)
    return [mixed(which, task, *call, q, keys) for which in (1, 2)]


def differentiated(task: int, call: CallNumbers, *tensors: Labels) -> list[Labels]:
    """Labels of dq, dk and dv of a kernel call on dout, q, k, v, out or delta, and lse."""
    dout, q, k, v, row, lse = tensors
    batch, heads_kv = k.shape[:2]
    rows = mixed(dout, q, row, lse)
    keys = mixed(fold_rows(k), fold_rows(v)).repeat(q.shape[1] // heads_kv, axis=1)
    queries = fold_rows(fold_rows(rows).reshape(batch, heads_kv, -1))
    dk, dv = (mixed(which, task, *call, k, v, queries) for which in (4, 5))
    return [mixed(3, task, *call, rows, keys), dk, dv]


def projected(task: int, rows: Labels, weight: Labels) -> Labels:
    """Labels of q, k, v or dout: (batch, heads, rows) from (batch, 1, rows)."""
    return mixed(6, task, rows, weight)


def returned(task: int, values: Labels, weight: Labels) -> Labels:
    """Labels of what some heads add to rows of the model's width: (batch, 1, rows)."""
    by_head = mixed(7, task, values, weight).transpose(0, 2, 1)
    return fold_rows(by_head).transpose(0, 2, 1)


def weight_labels(task: int, values: Labels, rows: Labels) -> Labels:
    """Labels of what some tokens add to the gradient of a weight: (1, heads, 1)."""
    pairs = mixed(8, task, values, rows).transpose(1, 0, 2)
    return fold_rows(pairs.reshape(1, pairs.shape[0], -1))


def summed_rows(task: int, out: Labels, dout: Labels) -> Labels:
    """Labels of delta."""
    return mixed(9, task, out, dout)
