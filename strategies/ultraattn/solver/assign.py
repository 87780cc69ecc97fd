"""Device tiling: which device computes which block, with a proof or with the gap.

    coarse      a plan of pairs of chunks, to start from, where the instance is large
    look        a first search, unless a proof is asked for
    climb       raise the bound as long as linear programs refute it
    improve     search, then decide whether one unit less is possible, by turns
    volume      lower the total volume at the same maximum

Each step ends early when the best assignment meets the bound. The shares of the time that they get
are listed below.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from harness.schedule.scip import SolverStatus, relative_gap
from strategies.ultraattn.solver.block_milp import decide_by_blocks
from strategies.ultraattn.solver.bounds import least_total_volume, lower_bound, reach
from strategies.ultraattn.solver.branch_price import Tree
from strategies.ultraattn.solver.coarse import coarsened, refined
from strategies.ultraattn.solver.columns import MOST_BLOCKS, enumerate_columns, refute
from strategies.ultraattn.solver.instance import DeviceAccount, DeviceTable, Instance, account
from strategies.ultraattn.solver.population import Population
from strategies.ultraattn.solver.search import (
    Assignment,
    BestAssignment,
    ManyChains,
    better,
    cells_of_blocks,
    evaluated,
)
from strategies.ultraattn.solver.single_chain import SingleChain

DEFAULT_S = 2.0
PROOF_S = 60.0
_NO_ROOM = (
    "assign: no assignment keeps the cap ({instance.cap}) on {instance.devices} devices with work "
    "{instance.total}; raise the cap, as `blocks.instance_of` does"
)

# Shares of the time of a solve, in the order of its steps.
_COARSE = 0.25  # of the seconds asked for
_LOOK = 0.1
_CLIMB = 0.5  # the share by which bounds are given up, unless a proof is asked for
_LEAST = 0.25  # of a search behind the bounds, which may take all to set up
_POPULATION = 0.75  # of a long budget, after the single chain
_VOLUME = 0.2  # of the time that was spent
_LEAST_VOLUME_S = {False: 0.1, True: 0.5}  # by whether a proof is asked for

_LONG_S = 60.0  # budget from which a population has the time to cool once, in its share
_FIRST_PROOF_S = 3.0
_LONGER = 1.5  # times as long as the one before gets the next try of a proof
_CHAIN = 4  # times as long as a try of a proof, which seldom ends where a single chain is needed
_HOPELESS = 600  # blocks x devices beyond which no proof has ever ended; the chain has the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """An assignment, its bound and its status.

    Attributes:
        cells: Device of each block; None where empty.
        value: Largest amount that a device receives or sends.
        bound: Proved lower bound on it.
        volume: All that is received.
        status: OPTIMAL (value = bound) or FEASIBLE.
        seconds: CPU time.
        source: How the search ended: `bound`, `proof` or `budget`.
    """

    cells: tuple[tuple[int | None, ...], ...]
    value: int
    bound: int
    volume: int
    status: SolverStatus
    seconds: float
    source: str

    @property
    def gap(self) -> float:
        """(value - bound) / value; 0 when proved."""
        return relative_gap(self.value, self.bound)

    def lines(self, instance: Instance) -> tuple[DeviceAccount, ...]:
        """Return the account of each device."""
        return account(instance, self.cells)


def assign(
    instance: Instance,
    *,
    seconds: float = DEFAULT_S,
    prove: bool = False,
    seed: int = 0,
    given: Sequence[DeviceTable] = (),
) -> Assigned:
    """Assign every block to a device.

    Args:
        instance: The assignment problem.
        seconds: CPU seconds to spend; with `prove`, those beyond which it gives up.
        prove: Spend at least `PROOF_S` on the proof.
        seed: Equal seeds give the same search.
        given: Assignments to start from.
    """
    start = time.process_time()
    if instance.cap * instance.devices < instance.total:
        raise ValueError(_NO_ROOM.format(instance=instance))
    grain = _grain(instance)
    bound = -(-lower_bound(instance) // grain) * grain
    if not instance.blocks:
        return _assigned(instance, BestAssignment(0, 0, ()), 0, start, "bound")
    starts = [*given, *_coarse_start(instance, _COARSE * seconds, seed)]
    solve = _Solve(instance, starts, bound, start, seconds=seconds, prove=prove, seed=seed)
    solve.look()
    solve.climb()
    solve.improve()
    solve.lower_volume()
    return _assigned(instance, solve.best, solve.bound, start, solve.source)


class _Solve:
    """One solve: the best assignment so far, the bound, and what searches and proves.

    Up to `MOST_BLOCKS` blocks, many chains search. Beyond, a single chain does, and where no proof
    is to be hoped for and the budget is long, a population after it.
    """

    def __init__(
        self,
        instance: Instance,
        starts: Sequence[DeviceTable],
        bound: int,
        start: float,
        *,
        seconds: float,
        prove: bool,
        seed: int,
    ) -> None:
        self.instance, self.start, self.prove = instance, start, prove
        self.budget = max(seconds, PROOF_S) if prove else seconds
        self.end = start + self.budget
        self.bound, self.source, self.grain = bound, "bound", _grain(instance)
        self.large = len(instance.blocks) > MOST_BLOCKS
        self.hopeless = self.large and len(instance.blocks) * instance.devices > _HOPELESS
        plans = [tuple(int(cells[i][j] or 0) for i, j in instance.blocks) for cells in starts]
        self.search = ManyChains(instance, seed, plans)
        if self.search.best is None:
            raise ValueError(_NO_ROOM.format(instance=instance))
        self.best = self.search.best
        self.decider = Decider(instance, seed)
        self.chain = SingleChain(instance, seed, plans) if self.large else None
        long = self.hopeless and self.budget >= _LONG_S
        self.population = Population(instance, seed, self.best) if long else None

    def look(self) -> None:
        """Search a little: the better the first assignment, the fewer bounds are worth a proof."""
        if not self.large and not self.prove:
            self._run(self.search, self.start + _LOOK * self.budget)

    def climb(self) -> None:
        """Raise the bound while linear programs refute it: the search has the right target then."""
        end = self.end if self.prove else self.start + _CLIMB * self.budget
        while (
            self.bound < self.best.value
            and time.process_time() < end
            and refute(self.instance, self.bound, end)
        ):
            self.bound, self.source = self.bound + self.grain, "proof"

    def improve(self) -> None:
        """Search and prove by turns, the longer the later, until one of them settles it."""
        if not self.large:
            self.end = max(self.end, time.process_time() + _LEAST * self.budget)
        proof_s = _FIRST_PROOF_S
        while self.best.value > self.bound:
            if time.process_time() >= self.end:
                self.source = "budget"
                return
            before = self.best.value
            self._run(*self._turn(proof_s))
            # As long as the search improves, it is cheaper than a proof.
            if self.best.value == self.bound or self.best.value < before or self.hopeless:
                continue
            self._try_proof(min(self.end, time.process_time() + proof_s))
            proof_s *= _LONGER

    def lower_volume(self) -> None:
        """Lower the volume at the same maximum."""
        spent_s = time.process_time() - self.start
        share_s = max(_VOLUME * spent_s, _LEAST_VOLUME_S[self.prove])
        end = min(self.end, time.process_time() + share_s)
        if time.process_time() >= end:
            return
        instance = self.instance
        least = least_total_volume(instance, reach(instance), self.best.value) or 0
        self.search.best = self.best
        self.search.run(end, self.best.value, volume=least + _inside(instance))
        self.best = better(self.best, self.search.best) or self.best

    def _turn(self, proof_s: float) -> tuple[ManyChains | SingleChain | Population, float]:
        """Return the next search, and its deadline."""
        late = self.end - _POPULATION * self.budget if self.population else self.end
        if self.population and time.process_time() >= late:
            return self.population, self.end
        if self.chain is None:
            return self.search, late
        if self.hopeless:
            return self.chain, late
        return self.chain, min(self.end, time.process_time() + _CHAIN * proof_s)

    def _run(self, searcher: ManyChains | SingleChain | Population, end: float) -> None:
        searcher.best = self.best
        searcher.run(end, self.bound)
        self.best = better(self.best, searcher.best) or self.best

    def _try_proof(self, end: float) -> None:
        """Decide whether one unit less is possible, if that can be told by `end`."""
        proved, found = self.decider.decide(self.best.value - self.grain, end)
        if proved:
            self.bound, self.source = self.best.value, "proof"
        elif found is not None:
            self.best = better(self.best, evaluated(self.instance, found)) or self.best


def _grain(instance: Instance) -> int:
    """Return a number that divides every amount."""
    w = instance.weights
    inside = [instance.inside_of(i, j) for i, j in instance.blocks]
    return max(1, gcd(w.row_in, w.row_out, w.column_in, w.column_out, *inside))


def _inside(instance: Instance) -> int:
    return sum(instance.inside_of(i, j) for i, j in instance.blocks)


def _coarse_start(instance: Instance, seconds: float, seed: int) -> list[DeviceTable]:
    """Return the plan of pairs of chunks, where the instance is too large to be proved itself."""
    coarse = coarsened(instance) if len(instance.blocks) > MOST_BLOCKS else None
    if coarse is None:
        return []
    try:
        found = assign(coarse, seconds=seconds, seed=seed)
    except ValueError:  # the larger blocks do not fit the cap
        return []
    return [refined(instance, found.cells)]


class Decider:
    """Decides whether a maximum can be kept; a question that is asked again goes on."""

    def __init__(self, instance: Instance, seed: int) -> None:
        self.instance, self.seed = instance, seed
        self._most: int | None = None
        self._tree: Tree | None = None

    def decide(self, most: int, end: float) -> tuple[bool, Assignment | None]:
        """Return whether `most` is refuted, and otherwise a plan if one was found."""
        if most != self._most:
            columns = enumerate_columns(self.instance, most)
            self._most = most
            self._tree = None if columns is None else Tree(self.instance, columns, most, end)
        if self._tree is not None:
            decision = self._tree.run(end)
            return decision.status is SolverStatus.INFEASIBLE, decision.devices
        left = end - time.process_time()
        answer, devices = decide_by_blocks(self.instance, most, left, seed=self.seed)
        return answer.status is SolverStatus.INFEASIBLE, devices


def _assigned(
    instance: Instance, best: BestAssignment, bound: int, start: float, source: str
) -> Assigned:
    cells = cells_of_blocks(instance, best.devices)
    return Assigned(
        cells=tuple(map(tuple, cells)),
        value=best.value,
        bound=bound,
        volume=best.volume,
        status=SolverStatus.OPTIMAL if best.value == bound else SolverStatus.FEASIBLE,
        seconds=time.process_time() - start,
        source=source,
    )
