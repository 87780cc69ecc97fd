"""One long annealing walk, for instances that are too large for many chains at once.

Where good plans are found it is so cold that one move in a hundred is accepted. So many moves are
looked at together, in numpy, and the first that is accepted is made: the same walk as one move
after another, in a fraction of the time. When it meets its goal, the goal drops.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from strategies.ultraattn.solver.instance import Instance
from strategies.ultraattn.solver.search import (
    Assignment,
    BestAssignment,
    Chains,
    better,
    evaluated,
    flow_limits,
    prices,
    starts,
)

_HOT, _COLD = 0.3, 0.12
_FIRST, _LONGEST = 50_000, 1_000_000  # moves of a round; each is twice as long as the one before
_LOOKS = 256  # moves looked at together
_UNSEEN = 16  # looks between two at the clock, which takes as long as one


class SingleChain:
    """A search that can be continued: each call of `run` goes on where the last one stopped.

    Args:
        instance: The assignment problem.
        seed: Equal seeds give equal walks.
        given: Assignments to start from, beside the simple ones.
    """

    def __init__(self, instance: Instance, seed: int = 0, given: Sequence[Assignment] = ()) -> None:
        self.instance = instance
        self.best: BestAssignment | None = None
        self._starts = [*given, *starts(instance)]
        for start in self._starts:
            self.best = better(self.best, evaluated(instance, start))
        self._rng = np.random.default_rng(seed + 1)
        self._chain = Chains(instance, np.array(self._starts[:1]), seed)
        self._target = 0
        self._steps = self._rounds()

    def run(self, end: float, target: int) -> None:
        """SingleChain until the maximum is at most `target`, or the time is over.

        Args:
            end: CPU time, as of `time.process_time`, at which to stop.
            target: Lowest maximum worth reaching.
        """
        self._target = target
        while len(self._chain.tables.free) and not self._done:
            if time.process_time() >= end:
                return
            for _ in range(_UNSEEN):
                next(self._steps)

    @property
    def _done(self) -> bool:
        return self.best is not None and self.best.value <= self._target

    def _rounds(self) -> Iterator[None]:
        """Cool down again and again, longer each time; pause after each look."""
        instance, chain = self.instance, self._chain
        price, length = prices(instance), _FIRST
        while True:
            chain.place(self._start()[None])
            step = 0
            while step < length:
                heat = _HOT * (_COLD / _HOT) ** (step / length)
                limit = flow_limits(instance, self._goal())
                step += chain.first(limit, price, heat, _LOOKS)
                if (chain.flow[0] <= limit).all():
                    self.best = better(self.best, evaluated(instance, chain.device[0].tolist()))
                yield
            length = min(2 * length, _LONGEST)

    def _goal(self) -> int:
        return self._target if self.best is None else max(self._target, self.best.value - 1)

    def _start(self) -> NDArray[np.int64]:
        """Return one of the known assignments, or none of them: every block at random."""
        free, start = self._chain.tables.free, np.array(self._starts[-1])  # with the fixed blocks
        start[free] = np.array(self._starts[self._rng.integers(len(self._starts))])[free]
        if self._rng.random() < 0.5:
            start[free] = self._rng.integers(self.instance.devices, size=len(free))
        return start
