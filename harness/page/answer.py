"""The answer of a set of results: the fastest strategy of each problem, and by how much."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.plan.problem import Direction
from harness.records.cell import CellRecord, Source
from harness.report.best import Best, best_of, strategies_by_problem
from harness.report.format import problem, unprefixed


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """The fastest strategy of one problem.

    Attributes:
        where: Machine, model and precision.
        cp: Degree.
        seqlen: Tokens.
        pattern: As it is typed.
        directions: Passes whose times are added.
        best: The fastest.
        second: Name of the fastest of those that cannot be mistaken for it; None if there is none.
        margin: Share by which that one is slower.
        source: How the times are known.
    """

    where: str
    cp: int
    seqlen: int
    pattern: str
    directions: tuple[Direction, ...]
    best: Best
    second: str | None
    margin: float | None
    source: Source

    @property
    def tied(self) -> bool:
        """Whether others cannot be told apart from the fastest."""
        return len(self.best.names) > 1 or bool(self.best.near)


def answers(records: Sequence[CellRecord]) -> list[AnswerRow]:
    """Choose the fastest strategy of every problem, forward and backward together."""
    groups: dict[str, list[CellRecord]] = {}
    for entry in records:
        groups.setdefault(problem(entry), []).append(entry)
    return [row for where, group in groups.items() for row in _rows(where, group)]


def _rows(where: str, group: Sequence[CellRecord]) -> Iterator[AnswerRow]:
    ways = tuple(way for way in Direction if any(e.config.direction is way for e in group))
    for (cp, tokens, pattern), strategies in strategies_by_problem(group).items():
        cells = [[own[way] for way in ways] for own in strategies if own.keys() >= {*ways}]
        best = best_of(cells)
        if best is None:
            continue
        alike = {*best.names, *best.near}
        others = [
            (sum(entry.seconds for entry in own), own[0].label)
            for own in cells
            if all(entry.ok for entry in own)
        ]
        rest = [(time_s, name) for time_s, name in sorted(others) if name not in alike]
        second = rest[0] if rest else None
        yield AnswerRow(
            where=where,
            cp=cp,
            seqlen=tokens,
            pattern=pattern,
            directions=ways,
            best=best,
            second=second[1] if second else None,
            margin=second[0] / best.time_s - 1 if second else None,
            source=cells[0][0].source,
        )


def headline(rows: Sequence[AnswerRow]) -> str:
    """Say in a sentence which strategies win most problems, and how many answers are ties."""
    if not rows:
        return "No cell ran: there is no answer. The reasons are listed below."
    wins = Counter(unprefixed(row.best.names[0]) for row in rows)
    most = max(wins.values())
    first, *others = (name for name, count in wins.items() if count == most)
    name, verb = (f"{', '.join(others)} and {first}", "are each") if others else (first, "is")
    ties = sum(row.tied for row in rows)
    text = f"{name} {verb} the fastest in {most} of {len(rows)} problems"
    if len(rows) == 1:
        text = f"{name} is the fastest"
    if ties:
        of = "this is a tie" if len(rows) == 1 else f"{ties} of the answers are ties"
        text += f"; {of}, within the spread or the expected error"
    return text + "."
