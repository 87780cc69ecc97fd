"""Device tiling: which device computes which block, with a proof or with the gap.

Bound by counting, search, then decide whether one unit less is possible; repeat. Afterwards the
time that is left lowers the total volume at the same maximum.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from harness.schedule.scip import Status, relative_gap
from strategies.ultraattn.solver.block_milp import decide_by_blocks
from strategies.ultraattn.solver.bounds import least_volume, lower_bound, reach
from strategies.ultraattn.solver.branch_price import Tree
from strategies.ultraattn.solver.coarse import coarsened, refined
from strategies.ultraattn.solver.columns import MOST_BLOCKS, enumerate_columns, refute
from strategies.ultraattn.solver.instance import Cells, Instance, Line, account
from strategies.ultraattn.solver.population import Crowd
from strategies.ultraattn.solver.search import (
    Assignment,
    Best,
    Search,
    better,
    cells_of_blocks,
    judged,
)
from strategies.ultraattn.solver.single_chain import Walk

DEFAULT_S = 2.0
PROOF_S = 60.0
_FIRST_S = 3.0  # for the first proof
_NO_ROOM = (
    "assign: no assignment keeps the cap ({instance.cap}) on {instance.devices} devices with work "
    "{instance.total}; raise the cap, as `blocks.instance_of` does"
)
_LEAST_VOLUME_S = {False: 0.1, True: 0.5}  # by whether a proof is asked for
_WALKS = 4  # times as long as a try of a proof, which seldom ends where a walk is needed
_HOPELESS = 600  # blocks x devices beyond which the solver has never ended; a walk has the time
_LONG_S = 60.0  # budget from which a crowd has the time to cool once, in its share
_CROWD = 0.75  # of a long budget, after the walk
_COARSE = 0.25  # share of the time that goes to a coarser instance first
_LOOK = 0.1  # share of the time that goes to a first search, unless a proof is asked for
_CLIMB = 0.5  # share of the time by which bounds are given up then
_LEAST = 0.25  # share of the time that a search gets behind them, which may take all to set up
_VOLUME = 0.2  # share of the time that goes to the volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """An assignment and what is known about it.

    Attributes:
        cells: Device of each block; None where empty.
        value: Largest amount that a device receives or sends.
        bound: Proved lower bound on it.
        volume: All that is received.
        status: OPTIMAL (value = bound) or FEASIBLE.
        seconds: CPU time.
        source: What settled it: `bound`, `proof` or `budget`.
    """

    cells: tuple[tuple[int | None, ...], ...]
    value: int
    bound: int
    volume: int
    status: Status
    seconds: float
    source: str

    @property
    def gap(self) -> float:
        """(value - bound) / value; 0 when proved."""
        return relative_gap(self.value, self.bound)

    def lines(self, instance: Instance) -> tuple[Line, ...]:
        """Return the account of each device."""
        return account(instance, self.cells)


def assign(
    instance: Instance,
    *,
    seconds: float = DEFAULT_S,
    prove: bool = False,
    seed: int = 0,
    given: Sequence[Cells] = (),
) -> Assigned:
    """Assign every block to a device.

    Args:
        instance: What is assigned.
        seconds: CPU seconds to spend; with `prove`, those beyond which it gives up.
        prove: Spend at least `PROOF_S` on the proof.
        seed: Equal seeds give the same search.
        given: Assignments to start from.
    """
    start = time.process_time()
    budget = max(seconds, PROOF_S) if prove else seconds
    end = start + budget
    if instance.cap * instance.devices < instance.total:
        raise ValueError(_NO_ROOM.format(instance=instance))
    grain = _grain(instance)
    bound = -(-lower_bound(instance) // grain) * grain
    if not instance.blocks:
        return _assigned(instance, Best(0, 0, ()), 0, start, "bound")
    starts = [*given, *_coarse_start(instance, _COARSE * seconds, seed)]
    plans = [tuple(int(cells[i][j] or 0) for i, j in instance.blocks) for cells in starts]
    search = Search(instance, seed, plans)
    if search.best is None:
        raise ValueError(_NO_ROOM.format(instance=instance))
    best = search.best
    slice_s, decider = _FIRST_S, Decider(instance, seed)
    walk = Walk(instance, seed, plans) if len(instance.blocks) > MOST_BLOCKS else None
    hopeless = walk is not None and len(instance.blocks) * instance.devices > _HOPELESS
    crowd = Crowd(instance, seed, best) if hopeless and budget >= _LONG_S else None
    if walk is None and not prove:
        best = _searched(search, best, start + _LOOK * budget, bound)
    top = end if prove else start + _CLIMB * budget
    bound, source = _climbed(instance, bound, grain, best.value, top)
    if walk is None:
        end = max(end, time.process_time() + _LEAST * budget)
    late = end if crowd is None else end - _CROWD * budget
    while best.value > bound:
        if time.process_time() >= end:
            source = "budget"
            break
        before = best.value
        searcher: Search | Walk | Crowd = search if walk is None else walk
        until = late
        if crowd is not None and time.process_time() >= late:
            searcher, until = crowd, end
        elif walk is not None and not hopeless:
            until = min(end, time.process_time() + _WALKS * slice_s)
        best = _searched(searcher, best, until, bound)
        if best.value == bound or best.value < before or hopeless:
            continue  # as long as the search improves, it is cheaper than a proof
        slice_end = min(end, time.process_time() + slice_s)
        proved, found = decider.decide(best.value - grain, slice_end)
        if proved:
            bound, source = best.value, "proof"
        elif found is not None:
            best = better(best, judged(instance, found)) or best
        slice_s *= 1.5
    share = max(_VOLUME * (time.process_time() - start), _LEAST_VOLUME_S[prove])
    best = _with_less_volume(search, best, min(end, time.process_time() + share))
    return _assigned(instance, best, bound, start, source)


def _searched(searcher: Search | Walk | Crowd, best: Best, end: float, bound: int) -> Best:
    searcher.best = best
    searcher.run(end, bound)
    return better(best, searcher.best) or best


def _climbed(instance: Instance, bound: int, grain: int, most: int, end: float) -> tuple[int, str]:
    """Raise a bound as long as linear programs refute it: the search has the right target then."""
    source = "bound"
    while bound < most and time.process_time() < end and refute(instance, bound, end):
        bound, source = bound + grain, "proof"
    return bound, source


def _with_less_volume(search: Search, best: Best, end: float) -> Best:
    if time.process_time() >= end:
        return best
    instance = search.instance
    least = least_volume(instance, reach(instance), best.value) or 0
    search.best = best
    search.run(end, best.value, volume=least + _inside(instance))
    return better(best, search.best) or best


def _grain(instance: Instance) -> int:
    """Return a number that divides every amount."""
    w = instance.weights
    inside = [instance.inside_of(i, j) for i, j in instance.blocks]
    return max(1, gcd(w.row_in, w.row_out, w.column_in, w.column_out, *inside))


def _inside(instance: Instance) -> int:
    return sum(instance.inside_of(i, j) for i, j in instance.blocks)


def _coarse_start(instance: Instance, seconds: float, seed: int) -> list[Cells]:
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
            return decision.status is Status.INFEASIBLE, decision.devices
        left = end - time.process_time()
        answer, devices = decide_by_blocks(self.instance, most, left, seed=self.seed)
        return answer.status is Status.INFEASIBLE, devices


def _assigned(instance: Instance, best: Best, bound: int, start: float, source: str) -> Assigned:
    cells = cells_of_blocks(instance, best.devices)
    return Assigned(
        cells=tuple(map(tuple, cells)),
        value=best.value,
        bound=bound,
        volume=best.volume,
        status=Status.OPTIMAL if best.value == bound else Status.FEASIBLE,
        seconds=time.process_time() - start,
        source=source,
    )
