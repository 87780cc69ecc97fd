"""Price candidates: simulated seconds and peak bytes of each, or why it is refused.

Where both directions are asked for, a candidate's backward cells are simulated only if it may still
be the answer, the second or tied: its forward time and the lower bound of all backward plans say
so. What is left out is slower than all of these, whatever its plan.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.base.workers import cores
from harness.plan.problem import Direction
from harness.recommend.question import Asked
from harness.records.cell import CellRecord, Prose, Status
from harness.records.config import Config
from harness.report.best import NEAR
from harness.simulate.bounds import problem_bound_s
from harness.sweep.simulate_cells import simulate_cells

MANY_RANKS = 32
"""From here on planning a cell takes longer than starting processes for it."""
_FIRST = 6
"""Candidates whose backward cells are simulated before any is left out."""

Advance = Callable[[], None]
"""Called as a cell is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A candidate that runs.

    Attributes:
        strategy: As it is typed, with what it chose where that is the same in all its plans.
        order: Its place in the list of candidates.
        options: How many options are typed behind its name.
        time_s: Mean over the layers, summed over the directions, seconds.
        error: Expected share by which the time is off; None where unknown.
        peak_bytes: Most bytes that a rank holds.
        bound_s: No plan of the problem takes less.
    """

    strategy: str
    order: int
    options: int
    time_s: float
    error: float | None
    peak_bytes: int
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedCandidate:
    """A candidate that cannot run.

    Attributes:
        strategy: As it is typed.
        reason: Why.
    """

    strategy: str
    reason: Prose


def price(
    question: Asked,
    names: Sequence[str],
    *,
    whole: bool = False,
    advance: Advance | None = None,
) -> tuple[list[Priced], list[RefusedCandidate]]:
    """Price candidates, side by side where that is worth it.

    Args:
        question: The problem.
        names: The candidates.
        whole: Price also those that can be neither the answer, nor second, nor tied.
        advance: Called as cells are done.

    Returns:
        Those that run, in the order of their names, and those that do not.
    """
    book = _Book(question, names, advance)
    passes = question.directions
    if whole or len(passes) == 1:
        book.simulate(names, passes)
        return book.priced(), book.refused()
    book.simulate(names, (Direction.FORWARD,))
    rest = sorted(book.running(), key=book.seconds)
    rest_s = book.bound_s(Direction.BACKWARD)
    while rest:
        tried, rest = rest[:_FIRST], rest[_FIRST:]
        book.simulate(tried, (Direction.BACKWARD,))
        limit_s = _limit_s(book.priced(), book.most_error)
        rest = [name for name in rest if book.seconds(name) + rest_s <= limit_s]
    return book.priced(), book.refused()


def _limit_s(priced: Sequence[Priced], most_error: float) -> float:
    """Time from which on a candidate is neither the answer, nor second, nor tied."""
    times = sorted({f"{one.time_s:.9e}": one.time_s for one in priced}.values())
    if len(times) < 2:
        return float("inf")
    return max(times[0] * (1 + most_error), times[1])


def _nothing() -> None:
    pass


class _Book:
    """Records of the cells that were simulated so far."""

    def __init__(self, question: Asked, names: Sequence[str], advance: Advance | None) -> None:
        self.question = question
        self.names = names
        self.cells = {name: list(question.cells(name)) for name in names}
        self.records: dict[Config, CellRecord] = {}
        self.advance = advance or _nothing

    @property
    def most_error(self) -> float:
        """The largest share by which any of these times may be off."""
        fitted = self.question.machine.fitted
        known = [] if fitted is None else list(fitted.errors.values())
        return max([NEAR, *known])

    def simulate(self, names: Iterable[str], directions: Sequence[Direction]) -> None:
        """Simulate the cells of some candidates in some directions."""
        cells = [
            cell for name in names for cell, _ in self.cells[name] if cell.direction in directions
        ]
        jobs = cores() if self.question.cp >= MANY_RANKS else 1
        machine = self.question.machine
        for record in simulate_cells(cells, jobs=jobs, machine=machine):
            self.records[record.config] = record
            self.advance()

    def running(self) -> list[str]:
        """Candidates none of whose simulated cells is refused or too large."""
        return [name for name in self.names if not self._reason(name)]

    def seconds(self, name: str) -> float:
        """Time of a candidate's simulated cells, mean over the layers."""
        return self._mean(
            (self.records[cell].time_s or 0.0, count)
            for cell, count in self.cells[name]
            if cell in self.records
        )

    def bound_s(self, direction: Direction) -> float:
        """Least time of any plan of a direction, mean over the layers."""
        cells = self.cells[self.names[0]] if self.names else []
        machine = self.question.machine
        return self._mean(
            (problem_bound_s(cell.problem, direction, machine), count)
            for cell, count in cells
            if cell.direction is direction
        )

    def _mean(self, parts: Iterable[tuple[float, int]]) -> float:
        return sum(seconds * count for seconds, count in parts) / self.question.layers

    def _reason(self, name: str) -> str:
        """Why a candidate cannot run, as far as its cells were simulated; empty if it can."""
        found = [self.records[cell] for cell, _ in self.cells[name] if cell in self.records]
        failed = [one for one in found if one.status not in (Status.OK, Status.OOM)]
        if failed:
            return failed[0].reason
        room = self.question.memory_bytes
        peak = max(one.peak_bytes or 0 for one in found)
        return f"needs {peak} bytes of {room} on a GPU" if peak > room else ""

    def priced(self) -> list[Priced]:
        """Candidates all of whose cells were simulated and fit."""
        known = [name for name in self.running() if self._complete(name)]
        return [self._priced(name) for name in known]

    def refused(self) -> list[RefusedCandidate]:
        """Candidates that cannot run."""
        reasons = {name: self._reason(name) for name in self.names}
        return [RefusedCandidate(strategy=name, reason=why) for name, why in reasons.items() if why]

    def _complete(self, name: str) -> bool:
        return all(cell in self.records for cell, _ in self.cells[name])

    def _priced(self, name: str) -> Priced:
        found = [(self.records[cell], count) for cell, count in self.cells[name]]
        records = [record for record, _ in found]
        labels = {record.label for record in records}
        errors = [record.expected_error for record in records]
        known = [error for error in errors if error is not None]
        return Priced(
            strategy=labels.pop() if len(labels) == 1 else name,
            order=self.names.index(name),
            options=sum(1 for part in name.partition(":")[2].split(",") if part),
            time_s=self._mean((record.time_s or 0.0, count) for record, count in found),
            error=max(known) if len(known) == len(errors) else None,
            peak_bytes=max(record.peak_bytes or 0 for record in records),
            bound_s=self._mean((record.bound_s or 0.0, count) for record, count in found),
        )
