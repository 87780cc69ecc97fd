"""Sizes and members of groups that share documents, solved for: the least predicted time.

Short neighbours are taken together and stay on one rank. Each longer document gets a window of
ranks side by side: the longest first, each where the fullest of its ranks is done soonest, if no
rank gets more tokens than it may. Several rules of size are tried: the smallest windows in which a
document takes at most such a share of a rank's mean time, or those that waste least of the ranks'
time, by several weights of what is wasted. The best of what comes out is improved by moves of one
run that shorten the fullest rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from harness.plan.dealing import separate_documents
from harness.plan.problem import Problem
from harness.planning.groups.grouping import Grouping, Members, Shared
from harness.planning.groups.prices import GroupPrices

_Floats = NDArray[np.float64]

_SHARES = (1.25, 1.0, 0.8, 0.6, 0.4, 0.2)  # of a rank's mean time, that a document may take
_WEIGHTS = (8.0, 2.0, 0.5)  # of wasted time beside the end of the fullest rank
_BUNDLE = 8  # neighbours are taken together up to this part of a rank's mean tokens
_SHORT = 0.04  # of a rank's mean work: what has less stays on one rank
_IMPROVED = 3  # of what comes out, the fastest
_MOVES = 24  # improvements of one, at most
_TRIED = 8  # runs that one move chooses from
_FEW = 8  # ranks that windows of every size are tried on


def solved_groups(
    problem: Problem, most: int, prices: GroupPrices, sizes: Sequence[int] | None = None
) -> list[Grouping]:
    """Return groupings of a pack, the fastest by formula first.

    Args:
        problem: Queries and keys of equal number.
        most: Tokens of a rank, at most; at least its even share.
        prices: What documents cost.
        sizes: Sizes of groups that divide the ranks in this order; None leaves them free.
    """
    ranks, runs = problem.cp, _runs(problem)
    windows = list(_windows(ranks))
    if sizes is not None:
        windows = [tuple(range(*each)) for each in pairwise(accumulate(sizes, initial=0))]
    costs = _Costs(runs, windows, ranks, prices, short=sizes is None)
    rules = [_any_window] if sizes is not None else _rules(costs)
    found = [placed for rule in rules if (placed := _placed(costs, most, rule)) is not None]
    found.sort(key=lambda each: each.seconds)
    for each in found[:_IMPROVED]:
        each.improve()
    found.sort(key=lambda each: each.seconds)
    return list(dict.fromkeys(each.grouping() for each in found))


def grouping_s(problem: Problem, grouping: Grouping, prices: GroupPrices) -> float:
    """Predict the seconds of a grouping by formula: the fullest rank's."""
    windows = list(dict.fromkeys(each.members for each in grouping))
    runs = _weighed(problem, [each.tokens for each in grouping])
    loads = _Loads(_Costs(runs, windows, problem.cp, prices, short=False), problem.seqlen_q)
    for run, each in enumerate(grouping):
        loads.give(run, windows.index(each.members))
    return loads.seconds


def most_tokens(grouping: Grouping, ranks: int) -> int:
    """Return the tokens of the rank that has most, where each document is dealt evenly."""
    tokens = [0] * ranks
    for each in grouping:
        for rank in each.members:
            tokens[rank] += -(-len(each.tokens) // len(each.members))
    return max(tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    """Documents side by side that stay together: a long one, or several short ones."""

    tokens: range
    area: int


def _weighed(problem: Problem, runs: Sequence[range]) -> list[_Run]:
    areas: list[int] = problem.pattern.areas(runs, (range(problem.seqlen_kv),))[:, 0].tolist()
    return list(map(_Run, runs, areas))


def _runs(problem: Problem) -> list[_Run]:
    limit = problem.seqlen_q // (_BUNDLE * problem.cp)
    joined: list[range] = []
    for document in separate_documents(problem.pattern):
        if joined and document.stop - joined[-1].start <= limit:
            joined[-1] = range(joined[-1].start, document.stop)
        else:
            joined.append(document)
    return _weighed(problem, joined)


def _windows(ranks: int) -> Iterator[Members]:
    """Yield neighbours, one alone first and all ranks last; windows of a size may overlap.

    Of few ranks every size, of many 1, 2, 3, 4, 6, 8, 12, ..., from every start that the largest
    power of two in the size divides.
    """
    for size in range(1, ranks):
        even = size & -size
        if ranks <= _FEW or size // even in (1, 3):
            for first in range(0, ranks - size + 1, even):
                yield tuple(range(first, first + size))
    yield tuple(range(ranks))


class _Costs:
    """What every run would cost each rank of every window: arrays of (runs, windows).

    Args:
        runs: Of documents.
        windows: Groups of ranks that a run may get.
        ranks: How many there are.
        prices: What documents cost.
        short: Whether runs of little work, and of no more tokens than ranks have on average, get
            no window but the first ones, of one rank each.
    """

    def __init__(
        self,
        runs: Sequence[_Run],
        windows: Sequence[Members],
        ranks: int,
        prices: GroupPrices,
        *,
        short: bool,
    ) -> None:
        self.runs, self.windows = runs, windows
        self.sizes = np.array([len(window) for window in windows])
        self.inside = np.zeros((len(windows), ranks))
        for at, window in enumerate(windows):
            self.inside[at, list(window)] = 1.0
        per_node = prices.machine.gpus_per_node
        crosses = [window[0] // per_node != window[-1] // per_node for window in windows]
        token_s = np.where(crosses, prices.between_s, prices.inside_s)
        tokens = np.array([[len(run.tokens)] for run in runs])
        attended = np.array([[run.area > 0] for run in runs])
        self.tokens: _Floats = np.ceil(tokens / self.sizes)
        self.link: _Floats = attended * tokens * token_s * (self.sizes - 1) / self.sizes
        work = np.array([[float(run.area)] for run in runs]) * prices.pair_s
        little = work <= _SHORT * work.sum() / ranks
        self.short = (little & (tokens * ranks <= tokens.sum()))[:, 0] & short
        self.work: _Floats = np.full(self.link.shape, np.inf)
        kinds = sorted(set(self.sizes.tolist()))
        for run, each in enumerate(runs):
            sizes = kinds[:1] if self.short[run] else kinds
            found = [prices.work_s(len(each.tokens), each.area, size) for size in sizes]
            mine = slice(ranks) if self.short[run] else slice(None)
            self.work[run, mine] = np.array(found)[np.searchsorted(sizes, self.sizes[mine])]


class _Loads:
    """What ranks have to do, while runs of documents get their windows.

    Args:
        costs: Of all choices.
        most: Tokens of a rank, at most.
    """

    def __init__(self, costs: _Costs, most: int) -> None:
        self.costs, self.most = costs, most
        self.work, self.link, self.tokens = np.zeros((3, costs.inside.shape[1]))
        self.window = [-1] * len(costs.runs)

    @property
    def seconds(self) -> float:
        """When the fullest rank is done."""
        return float(np.maximum(self.work, self.link).max())

    def give(self, run: int, window: int) -> None:
        """Give a run to a window; from the one that it has, if it has one."""
        costs, before = self.costs, self.window[run]
        for at, sign in ((before, -1), (window, 1)):
            if at >= 0:
                here = sign * costs.inside[at]
                self.work += costs.work[run, at] * here
                self.link += costs.link[run, at] * here
                self.tokens += costs.tokens[run, at] * here
        self.window[run] = window

    def ends(self, run: int, *, everywhere: bool) -> _Floats:
        """When the fullest rank of each window, or of all, would be done with a run there too.

        Inf where tokens are too many. Of a short run, the windows of one rank.
        """
        costs = self.costs
        if costs.short[run]:
            alone = np.maximum(self.work + costs.work[run, 0], self.link)
            busy = np.maximum(alone, self.seconds) if everywhere else alone
            full = self.tokens + costs.tokens[run, 0]
        else:
            here = costs.inside
            each = np.maximum(
                self.work + costs.work[run][:, None] * here,
                self.link + costs.link[run][:, None] * here,
            )
            busy = (each if everywhere else each * here).max(axis=1)
            full = ((self.tokens + costs.tokens[run][:, None]) * here).max(axis=1)
        return np.where(full > self.most, np.inf, busy)

    def improve(self) -> None:
        """Move one run of the fullest rank at a time, while that shortens it."""
        for _ in range(_MOVES):
            if not self._move():
                return

    def _move(self) -> bool:
        fullest = int(np.maximum(self.work, self.link).argmax())
        here = [r for r, at in enumerate(self.window) if self.costs.inside[at, fullest]]
        here.sort(key=lambda run: -self.costs.work[run, self.window[run]])
        best = (self.seconds, -1, -1)
        for run in here[:_TRIED]:
            window = self.window[run]
            self.give(run, -1)
            ends = self.ends(run, everywhere=True)
            at = int(ends.argmin())
            best = min(best, (float(ends[at]), run, at))
            self.give(run, window)
        _, run, window = best
        if run < 0 or window == self.window[run]:
            return False
        self.give(run, window)
        return True

    def grouping(self) -> Grouping:
        """Name the groups."""
        windows = self.costs.windows
        return tuple(
            Shared(run.tokens, windows[at])
            for run, at in zip(self.costs.runs, self.window, strict=True)
        )


_SizeRule = Callable[[int, _Floats], _Floats]
"""From a run, and when each window would be done with it (inf: no room), to what must be least."""


def _any_window(run: int, ends: _Floats) -> _Floats:
    del run
    return ends


def _rules(costs: _Costs) -> list[_SizeRule]:
    ranks = costs.inside.shape[1]
    mean_s = float(costs.work[:, 0].sum()) / ranks
    return [
        *(partial(_small_enough, costs, share * mean_s) for share in _SHARES),
        *(partial(_least_waste, costs, weight / ranks) for weight in _WEIGHTS),
    ]


def _small_enough(costs: _Costs, limit_s: float, run: int, ends: _Floats) -> _Floats:
    """Leave the smallest windows that keep a limit of time and have room; else the largest."""
    room = ends < np.inf
    wanted = costs.sizes[room & (costs.work[run] <= limit_s)]
    size = wanted[0] if wanted.size else costs.sizes[room][-1:]
    return np.where(costs.sizes == size, ends, np.inf) if room.any() else ends


def _least_waste(costs: _Costs, weight: float, run: int, ends: _Floats) -> _Floats:
    """Add what all ranks of a window spend beyond one rank alone."""
    wasted: _Floats = costs.work[run] * costs.sizes - costs.work[run, 0]
    return ends + weight * wasted


def _placed(costs: _Costs, most: int, rule: _SizeRule) -> _Loads | None:
    """Place all runs, those of most work first; None if tokens fit nowhere."""
    loads = _Loads(costs, most)
    for run in np.argsort(-costs.work[:, 0], kind="stable").tolist():
        ends = loads.ends(run, everywhere=False)
        if not costs.short[run]:
            ends = rule(run, ends)
        window = int(ends.argmin())
        if ends[window] == np.inf:
            return None
        loads.give(run, window)
    return loads
