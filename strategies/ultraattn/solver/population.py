"""Population annealing, for instances in which one long walk freezes: many chains cool slowly.

A chain that a colder heat makes unlikely goes on from where a likelier one stands. So the chains
together find what one of them would find in many times as many moves, and numpy makes a move of
each at once.
"""

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from strategies.ultraattn.solver.instance import Instance
from strategies.ultraattn.solver.search import (
    BestAssignment,
    Chains,
    better,
    evaluated,
    flow_limits,
    prices,
)

_CHAINS = 256
_HOT, _COLD = 0.58, 0.40  # between them the plans of large grids settle
_HEATS = 280  # of a round
_STEPS = 500  # moves of each chain at a heat; with half as many, half of the rounds find nothing
_OVERLOAD = 0.5  # price of work beyond the cap, as part of that in the other searches
_VOLUME = 0.1  # price of all that is received, which leads on where many devices are at the limit
_UNSEEN = 10  # steps between two looks at the chains and the clock


class Population:
    """A search that can be continued: each call of `run` goes on where the last one stopped.

    Args:
        instance: The assignment problem.
        seed: Equal seeds give equal searches.
        best: The best assignment so far.
    """

    def __init__(self, instance: Instance, seed: int, best: BestAssignment) -> None:
        self.instance, self.best = instance, best
        self._rng = np.random.default_rng(seed + 1)
        self._chains = Chains(instance, self._fresh(), seed)
        self._target = 0
        self._steps = self._rounds()

    def run(self, end: float, target: int) -> None:
        """Cool down, again and again, until the maximum is at most `target`, or the time is over.

        Args:
            end: CPU time, as of `time.process_time`, at which to stop.
            target: Lowest maximum worth reaching.
        """
        self._target = target
        while len(self._chains.tables.free) and self.best.value > target:
            if time.process_time() >= end:
                return
            next(self._steps)

    def _rounds(self) -> Iterator[None]:
        """Cool down; pause after a few steps."""
        chains, price = self._chains, prices(self.instance)
        price[2 * chains.n :] *= _OVERLOAD
        volume = _VOLUME * float(np.sqrt(price[0]))  # per unit, as the others are per its square
        while True:
            chains.place(self._fresh())
            heat = _HOT
            for k in range(_HEATS):
                limit = flow_limits(self.instance, max(self._target, self.best.value - 1))
                before, heat = heat, _HOT * (_COLD / _HOT) ** (k / _HEATS)
                chains.resample(limit, price, volume, 1 / heat - 1 / before)
                for step in range(_STEPS):
                    chains.step(limit, price, volume, heat)
                    if step % _UNSEEN == 0:
                        self._keep(limit)
                        yield
                        limit = flow_limits(self.instance, max(self._target, self.best.value - 1))

    def _keep(self, limit: NDArray[np.float32]) -> None:
        for k in np.flatnonzero((self._chains.flow <= limit).all(axis=1))[:1]:
            found = evaluated(self.instance, self._chains.device[k].tolist())
            self.best = better(self.best, found) or self.best

    def _fresh(self) -> NDArray[np.int64]:
        """Return random assignments, with the fixed blocks where they are in the best one."""
        starts = np.array([self.best.devices] * _CHAINS)
        fixed = {(i, j) for i, j, _ in self.instance.fixed}
        free = [b for b, block in enumerate(self.instance.blocks) if block not in fixed]
        starts[:, free] = self._rng.integers(self.instance.devices, size=(_CHAINS, len(free)))
        return starts
