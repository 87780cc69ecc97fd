"""The example of an article on ring attention: four queries and keys, whole and block by block.

Float64 and numpy alone: no kernel and no merge of this project, which `measured in small` checks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
_Q = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]])
_K = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]])
_V = np.array([[1.0, 2.0], [2.0, 0.0], [0.0, 3.0], [4.0, 1.0]])
_BLOCK = 2  # keys of a block in the article's script


def example_output(setting: Mapping[str, Any]) -> float:
    """An `element` of the first query's output, `how`: `full`, or `ring` by blocks of two keys."""
    out = _whole() if setting["how"] == "full" else _by_blocks(_BLOCK)
    return float(out[0, setting["element"]])


def example_difference(setting: Mapping[str, Any]) -> float:
    """Largest difference between the whole and blocks of `block` keys."""
    return float(np.abs(_whole() - _by_blocks(setting["block"])).max())


def _whole() -> F64:
    weights = np.exp(_Q @ _K.T / np.sqrt(_Q.shape[1]))
    whole: F64 = weights @ _V / weights.sum(axis=1, keepdims=True)
    return whole


def _by_blocks(size: int) -> F64:
    """Merge partial outputs by their log-sum-exp (Milakov and Gimelshein, arXiv:1805.02867)."""
    out, lse = np.zeros_like(_V), np.full(len(_Q), -np.inf)
    for start in range(0, len(_K), size):
        scores = _Q @ _K[start : start + size].T / np.sqrt(_Q.shape[1])
        own_lse = np.log(np.exp(scores).sum(axis=1))
        own = np.exp(scores - own_lse[:, None]) @ _V[start : start + size]
        both = np.logaddexp(lse, own_lse)
        out = out * np.exp(lse - both)[:, None] + own * np.exp(own_lse - both)[:, None]
        lse = both
    return out
