"""Published speed-ups of UltraAttn beside ours: both sides of each quotient predicted.

A published speed-up is one harness over another: UltraAttn's plans in a queue that is launched
ahead and merges nothing, over a ring that eager torch launches step by step. So each is put beside
three of ours, over the same predictor:

    ours       the published kind of plan and of baseline, each as it was run
    ultraattn  our planner's plan, merging what it must, over the same baseline
    fair       our planner's plan over the baseline, both in a captured graph
    best       our planner's plan over the fastest other strategy, both in a captured graph
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from harness.base.cache import cache_folder
from harness.base.workers import spread
from harness.plan.problem import Direction
from harness.reproduce.claims import Claim, ClaimVerdict, Ours, published_file
from harness.reproduce.speedup_times import (
    TimedConfiguration,
    Times,
    calibrated_cluster,
    times,
    times_kept,
)

_SOURCE = "ultraattn"
BOTH = "both"
"""Forward and backward, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """A published speed-up and ours.

    Attributes:
        figure: Where it is published, as in `fig7`.
        what: The content of the figure.
        cluster: The calibration that ours is predicted on.
        pattern: Who attends whom.
        direction: Forward, backward or both.
        heads: Query heads, and as many KV heads.
        seqlen: Tokens over all ranks.
        cp: Ranks.
        published: As printed.
        logged: The quotient of the logged times where another number was printed in its place.
        extrapolated: Whether the baseline was not measured.
        baseline: Of ours.
        ours: The same quotient, predicted.
        ultraattn: With our planner's plan, over the same baseline.
        fair: With both in a captured graph.
        best: The same over the fastest other strategy.
        rival: That strategy.
        tolerance: See `Times.error`.
        eager_s: Of the baseline, as it was run.
        published_s: Of the published kind of plan, as it was run.
        ours_s: Of our planner's plan.
    """

    figure: str
    what: str
    cluster: str
    pattern: str
    direction: str
    heads: int
    seqlen: int
    cp: int
    published: float
    logged: float | None
    extrapolated: bool
    baseline: str
    ours: float
    ultraattn: float
    fair: float
    best: float
    rival: str
    tolerance: float
    eager_s: float
    published_s: float
    ours_s: float

    @property
    def error(self) -> float:
        """Ours over what was published, or logged if that is known to differ; less 1."""
        return self.ours / (self.logged or self.published) - 1

    @property
    def holds(self) -> bool:
        """Whether ours is as published, as far as the predictor can tell."""
        return abs(self.error) <= self.tolerance

    @property
    def verdict(self) -> ClaimVerdict:
        """How it stands, as a claim."""
        if not self.holds:
            return ClaimVerdict.NOT_REPRODUCED
        least = (self.logged or self.published) * (1 - self.tolerance)
        return ClaimVerdict.BASELINE_ONLY if self.best < least else ClaimVerdict.REPRODUCED

    @property
    def runtime(self) -> float:
        """How much of the quotient is the baseline's runtime and not its plan."""
        return self.ultraattn / self.fair


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureFilter:
    """Which of the figures.

    Attributes:
        figure: Only figures whose name or title has this in it.
        cp: Only these degrees; empty is all.
        cluster: Predict all on this calibrated cluster; empty is each on its own.
        seconds: Planner's budget per distinct tiling; None is its default.
    """

    figure: str = ""
    cp: tuple[int, ...] = ()
    cluster: str = ""
    seconds: float | None = None


def speedup_tables() -> Sequence[Mapping[str, Any]]:
    """Return the published tables, as they are in their file."""
    found: Sequence[Mapping[str, Any]] = published_file(_SOURCE)["speedups"]
    return found


def mean_speedup(setting: Mapping[str, Any]) -> float:
    """Arithmetic mean of the published values of a `figure`, of some `patterns` and `heads`."""
    values = [
        value
        for table in speedup_tables()
        for row in table["rows"]
        if table["figure"] == setting["figure"]
        and row[0] in setting["patterns"]
        and row[2] == setting.get("heads", row[2])
        for value in row[4]
    ]
    return fmean(values)


def timed_configurations(chosen: FigureFilter) -> list[TimedConfiguration]:
    """Return the cells to time, each once, those of many ranks first.

    Raises:
        ValueError: Nothing is chosen, or the cluster is not calibrated.
    """
    if chosen.cluster:
        calibrated_cluster(chosen.cluster)
    ways: dict[TimedConfiguration, set[Direction]] = {}
    for table, row, cp, _ in _entries(chosen):
        ways.setdefault(_cell(table, row, cp, chosen), set()).update(_directions(row[1]))
    if not ways:
        names = ", ".join(dict.fromkeys(table["figure"] for table in speedup_tables()))
        asked = [f"figure ({chosen.figure})"] if chosen.figure else []
        asked += [f"cp ({', '.join(map(str, chosen.cp))})"] if chosen.cp else []
        raise ValueError(
            f"{', '.join(asked)}: nothing published has these; there are {names}; leave them out "
            "to see all"
        )
    found = [
        replace(cell, directions=tuple(d for d in Direction if d in own))
        for cell, own in ways.items()
    ]
    return sorted(found, key=lambda cell: -cell.cp)


def timed(
    todo: Sequence[TimedConfiguration], chosen: FigureFilter, *, jobs: int
) -> Iterator[tuple[TimedConfiguration, Mapping[Direction, Times]]]:
    """Yield the times of each cell as they are known, not in order; plans are kept between runs."""
    work = partial(times, seconds=chosen.seconds, folder=cache_folder() / "structures")
    if jobs == 1 or len(todo) == 1:
        yield from map(work, todo)
        return
    yield from spread(work, todo, jobs=jobs, lost=_lost)


def _lost(cell: TimedConfiguration) -> tuple[TimedConfiguration, Mapping[Direction, Times]]:
    raise MemoryError(f"the process that planned {cell} died")


def speedups(
    chosen: FigureFilter, known: Mapping[TimedConfiguration, Mapping[Direction, Times]]
) -> Iterator[Speedup]:
    """Yield the chosen figures from the times of their cells, in the order of the file."""
    by_cell = {replace(cell, directions=()): found for cell, found in known.items()}
    for table, row, cp, published in _entries(chosen):
        cell = _cell(table, row, cp, chosen)
        own = [by_cell[cell][direction] for direction in _directions(row[1])]
        logged = dict(*row[5:])  # nothing follows where all times were measured
        eager_s, graph_s, best_s, published_s, ours_s = (
            _whole_s(table, cell.heads, [getattr(each, name) for each in own])
            for name in ("eager_s", "graph_s", "best_s", "published_s", "ours_s")
        )
        yield Speedup(
            figure=table["figure"],
            what=table["what"],
            cluster=cell.cluster,
            pattern=cell.pattern,
            direction=row[1],
            heads=cell.heads,
            seqlen=cell.seqlen,
            cp=cp,
            published=published,
            logged=logged.get(str(cp)),
            extrapolated=cp in table.get("extrapolated", ()),
            baseline=own[0].baseline,
            ours=eager_s / published_s,
            ultraattn=eager_s / ours_s,
            fair=graph_s / ours_s,
            best=best_s / ours_s,
            rival=own[0].rival,
            tolerance=max(each.error for each in own),
            eager_s=eager_s,
            published_s=published_s,
            ours_s=ours_s,
        )


def _entries(chosen: FigureFilter) -> Iterator[tuple[Mapping[str, Any], Sequence[Any], int, float]]:
    for table in speedup_tables():
        if chosen.figure not in f"{table['figure']} {table['what']}":
            continue
        for row in table["rows"]:
            for cp, published in zip(table["cp"], row[4], strict=True):
                if not chosen.cp or cp in chosen.cp:
                    yield table, row, cp, published


def _cell(
    table: Mapping[str, Any], row: Sequence[Any], cp: int, chosen: FigureFilter
) -> TimedConfiguration:
    """A cell, as yet without directions."""
    return TimedConfiguration(
        cluster=chosen.cluster or table["cluster"],
        pattern=row[0],
        cp=cp,
        seqlen=row[3],
        heads=row[2],
        baselines=tuple(table["baselines"]),
        directions=(),
    )


def _directions(text: str) -> tuple[Direction, ...]:
    return tuple(Direction) if text == BOTH else (Direction(text),)


# Each as a claim ----------------------------------------------------------------------------


def speedup_claims() -> Iterator[Claim]:
    """Yield every published speed-up as a claim."""
    file = published_file(_SOURCE)
    for table, row, cp, published in _entries(FigureFilter()):
        cell = _cell(table, row, cp, FigureFilter())
        logged = dict(*row[5:]).get(str(cp))
        heads = f"{cell.heads} head{'s' if cell.heads > 1 else ''}"
        yield Claim(
            source=_SOURCE,
            table=f"{table['figure']}: {table['what']}",
            what=f"{cell.pattern}, {row[1]}, {heads}, {cell.seqlen} tokens, {cp} GPUs",
            published=logged or published,
            unit="",
            where=f"figure {table['figure'].removeprefix('fig')}",
            read="as printed" if logged is None else f"from the logs; drawn as {published:g}",
            tolerance=None,
            absolute=False,
            reason=file["reason"],
            kind="speedup",
            setting={"cell": cell, "directions": _directions(row[1]), "table": table},
            missing="",
            why="",
            seen="",
        )


def speedup(setting: Mapping[str, Any]) -> Ours:
    """The same quotient, predicted; on equal ground our planner over the fastest other strategy."""
    table, cell = setting["table"], setting["cell"]
    own = [times_kept(cell, direction) for direction in setting["directions"]]
    eager_s, best_s, published_s, ours_s = (
        _whole_s(table, cell.heads, [getattr(each, name) for each in own])
        for name in ("eager_s", "best_s", "published_s", "ours_s")
    )
    return Ours(
        value=eager_s / published_s,
        fair=best_s / ours_s,
        rival=own[0].rival,
        expected_error=max(each.error for each in own),
    )


def _whole_s(table: Mapping[str, Any], heads: int, seconds: Sequence[float]) -> float:
    """Attention of all layers, and the rest of an iteration."""
    rest: float = table.get("rest_ms", {}).get(str(heads), 0.0) / 1e3
    return float(table.get("layers", 1)) * sum(seconds) + rest
