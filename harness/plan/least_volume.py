"""The least bytes that any plan moves, given how much of the work each rank can do.

A rank that attends pairs of other ranks' queries or keys receives these, and sends their results.
Let a rank, or a node, compute `area` pairs of one KV head's group of query heads. If it has x
queries of each head and y keys, it attends at most `PairReach.most(x, y)` pairs of each head, of
which its own tokens are free. So an area has a least price, and areas that add up to the whole
pattern have a least total: docs/bounds.md derives it.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from harness.plan.problem import Direction, Problem
from patterns.areas import NO_BOUND, Ints
from patterns.pattern import Pattern

_Floats = NDArray[np.float64]

_STEPS = 256  # counts of queries and of keys that are tried; prices are exact to about this share
_AREAS = 128  # areas up to twice the mean, and as many above


@dataclass(frozen=True, slots=True, eq=False)
class _Degrees:
    """Positions by how many others each attends, the most first."""

    largest: Ints
    before: Ints  # sums of the first 0, 1, ... of them

    def most(self, count: int | Ints, cap: int | Ints) -> Ints:
        """Pairs of the `count` largest, if each counts at most `cap`."""
        over = len(self.largest) - np.searchsorted(self.largest[::-1], cap, side="left")
        full = np.minimum(over, count)
        return full * cap + self.before[count] - self.before[full]


@dataclass(frozen=True, slots=True, eq=False)
class PairReach:
    """How many pairs some queries and some keys can have, at most, wherever they lie."""

    queries: _Degrees
    keys: _Degrees

    def most(self, queries: Ints, keys: int) -> Ints:
        """Pairs of so many queries and keys, at most: for each number of queries."""
        return np.minimum(self.queries.most(queries, keys), self.keys.most(keys, queries))


@lru_cache(maxsize=16)
def reach_of(pattern: Pattern) -> PairReach:
    """Count for every query the keys that it meets, and for every key the queries."""
    return PairReach(_sorted(_degrees(pattern)), _sorted(_degrees(pattern, keys=True)))


def _sorted(degrees: Ints) -> _Degrees:
    largest = np.sort(degrees)[::-1]
    return _Degrees(largest, np.concatenate([[0], np.cumsum(largest)]))


def _degrees(pattern: Pattern, *, keys: bool = False) -> Ints:
    """Per position of one side, how many of the other it meets."""
    length = pattern.seqlen_kv if keys else pattern.seqlen_q
    found, edges = np.zeros(length, np.int64), np.zeros(length + 1, np.int64)
    bands = np.stack(pattern.arrays.columns, axis=1).tolist()
    for q0, q1, k0, k1, low, high in bands:
        # Query q meets keys q - high ... q - low; key k meets queries k + low ... k + high.
        first, last, other, end = (k0, k1, q0, q1) if keys else (q0, q1, k0, k1)
        down, up = (low, high) if keys else (-high, -low)
        if low == -NO_BOUND and high == NO_BOUND:
            edges[first] += end - other
            edges[last] -= end - other
            continue
        at = np.arange(first, last, dtype=np.int64)
        met = np.minimum(end - 1, at + up) - np.maximum(other, at + down) + 1
        found[first:last] += np.maximum(met, 0)
    return found + np.cumsum(edges[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Bytes that move for a token of another rank: what it receives, and what it sends back.

    Attributes:
        query: Of a query of one head.
        key: Of a key of one KV head.
    """

    query: int
    key: int


def token_prices(problem: Problem, direction: Direction) -> TokenPrices:
    """Return what a foreign token costs at least.

    Results may be whole, in the precision of the inputs, and lse and delta are left out.
    """
    size = problem.dtype.bytes * problem.batch
    d_k, d_v = problem.head_dim, problem.head_dim_v
    if direction is Direction.FORWARD:  # q in and out back; k and v in
        return TokenPrices(query=size * (d_k + d_v), key=size * (d_k + d_v))
    # q and dout in and dq back; k and v in, dk and dv back
    return TokenPrices(query=size * (2 * d_k + d_v), key=size * 2 * (d_k + d_v))


@dataclass(frozen=True, slots=True, eq=False)
class AreaPrices:
    """Least bytes for areas: of one part of the cluster and one KV head's group of query heads.

    Attributes:
        areas: Pairs times heads, rising from 0; the last is all of the group.
        prices: More than `areas[i]` pairs cost at least `prices[i]` bytes; one less.
        mean: Area of a part and a group if all had the same.
        items: Parts times groups.
    """

    areas: _Floats
    prices: _Floats
    mean: float
    items: int

    def least_bytes(self, most: float) -> float:
        """Bytes that all parts receive at least if none computes more than `most` of one group.

        The lower convex hull of the prices, at the mean; infinite if `most` is below it.
        """
        if most < self.mean:
            return float("inf")
        ends = np.minimum(self.areas[1:], most)[self.areas[:-1] < most]
        prices = self.prices[: len(ends)]
        x, y = np.concatenate([[0.0], ends]), np.concatenate([[0.0], prices])
        left, right = x <= self.mean, x >= self.mean
        x_l, y_l, x_r, y_r = x[left][:, None], y[left][:, None], x[right], y[right]
        span = np.maximum(x_r - x_l, 1e-300)
        share = np.where(x_r > x_l, (self.mean - x_l) / span, 0.0)
        return self.items * float(np.min(y_l + share * (y_r - y_l)))


def area_prices(
    problem: Problem, direction: Direction, parts: int, owned: tuple[int, int]
) -> AreaPrices:
    """Price areas for one part of the cluster: a rank, or a node.

    Args:
        problem: The problem.
        direction: Forward or backward.
        parts: How many parts compute.
        owned: Query tokens and keys that a part has from the start, with all heads, at most.

    Raises:
        ValueError: The pattern allows no pair, so that there is no area to price.
    """
    if not problem.pattern.total_area:
        raise ValueError("a pattern must allow a pair, or no area has a price")
    pattern, group = problem.pattern, problem.group
    whole = pattern.total_area * group
    mean = whole / parts
    areas = np.unique(
        np.concatenate(
            [np.linspace(0, min(2 * mean, whole), _AREAS), np.geomspace(mean, whole, _AREAS)]
        )
    )
    prices = token_prices(problem, direction)
    lengths = problem.seqlen_q, problem.seqlen_kv
    own_q, own_k = (min(own, length) for own, length in zip(owned, lengths, strict=True))
    counts, keys = _counts(own_q, lengths[0]), _counts(own_k, lengths[1])
    reach = reach_of(pattern)
    least = np.full(len(areas) - 1, np.inf)
    for fewer, more in zip([own_k - 1, *keys], keys, strict=False):  # more keys than `fewer`
        most = reach.most(counts, more) * group
        gain = reach.most(np.minimum(counts + 1, lengths[0]), more) * group - most
        # The last count that has no more than the area, and what the next ones add at most.
        last = np.searchsorted(most, areas[:-1], side="right") - 1
        lacking = areas[:-1] - most[last]
        queries = counts[last] + lacking / np.maximum(gain[last], 1)
        queries[last < 0] = own_q
        queries[last == len(counts) - 1] = np.inf  # not with so few keys
        price = prices.query * group * (queries - own_q) + prices.key * float(fewer + 1 - own_k)
        least = np.minimum(least, price)
    return AreaPrices(areas, least, mean, parts * problem.heads_kv)


def _counts(own: int, length: int) -> Ints:
    """Numbers of tokens from one's own to all, each little more than the one before."""
    steps = np.ceil(np.geomspace(max(own, 1), max(length, 1), _STEPS)).astype(np.int64)
    few = np.arange(own, min(length, own + _STEPS) + 1)
    found = np.unique(np.concatenate([[own, length], few, steps]))
    return found[(found >= own) & (found <= length)]
