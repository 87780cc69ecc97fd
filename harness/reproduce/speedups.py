"""Published speed-ups of UltraAttn beside ours: both sides of each quotient predicted.

A published speed-up is one harness over another: UltraAttn's plans in a queue that is launched
ahead and merges nothing, over a ring that eager torch launches step by step. So each is put beside
three of ours, over the same predictor:

    ours       the published kind of plan and of baseline, each as it was run
    ultraattn  our planner's plan, merging what it must, over the same baseline
    fair       our planner's plan over the baseline, both in a captured graph
    best       our planner's plan over the fastest other strategy, both in a captured graph
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

from harness.base.cache import cache_folder
from harness.base.workers import spread
from harness.cluster.calibration import Calibration, plan_class
from harness.cluster.machine import Runtime
from harness.cluster.presets import CLUSTERS, cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Dtype
from harness.prepare.scalable_plan_cache import structure_of
from harness.records.config import Config, Where
from harness.reproduce.published_runs import Case, predict_run
from harness.simulate.calibrated import pricer
from harness.simulate.job_costs import ULTRA

BOTH = "both"
"""Forward and backward, one after the other."""
_RAN = {"ring": "ring-classic", "zigzag": "zigzag", "stripe": "stripe"}
"""Baselines by their published names: the ring sends everything to everyone."""
_HEAD_DIM = 128  # Source: UltraAttn (SC'25), Llama2-7B
_RIVALS = ("ring", "zigzag", "stripe", "allgather", "ulysses", "usp")
"""Strategies on equal ground beside the published baselines; those that can do the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedConfiguration:
    """A configuration that is timed once, in the directions that any figure asks for."""

    cluster: str
    pattern: str
    cp: int
    seqlen: int
    heads: int
    baselines: tuple[str, ...]
    directions: tuple[Direction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Predicted seconds of one cell in one direction.

    Attributes:
        baseline: The fastest of the baselines as they were run.
        eager_s: Its time, as it was run: eager torch, everything sent.
        graph_s: The fastest baseline in a captured graph.
        rival: The fastest strategy but our planner in a captured graph.
        best_s: Its time.
        published_s: The published kind of plan, as its harness ran it.
        ours_s: Our planner's plan in a captured graph, all merged.
        error: How far a quotient of the first and the third may miss: the sum of the mean errors
            of both kinds of run on this cluster.
    """

    baseline: str
    eager_s: float
    graph_s: float
    rival: str
    best_s: float
    published_s: float
    ours_s: float
    error: float


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
    text = (files("harness.reproduce") / "published" / "ultraattn.toml").read_text(encoding="utf-8")
    found: Sequence[Mapping[str, Any]] = tomllib.loads(text)["table"]
    return found


def timed_configurations(chosen: FigureFilter) -> list[TimedConfiguration]:
    """Return the cells to time, each once, those of many ranks first.

    Raises:
        ValueError: Nothing is chosen, or the cluster is not calibrated.
    """
    if chosen.cluster:
        _calibrated(chosen.cluster)
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
        layers, rest = table.get("layers", 1), table.get("rest_ms", {})
        rest_s = rest.get(str(cell.heads), 0.0) / 1e3
        eager_s, graph_s, best_s, published_s, ours_s = (
            layers * sum(getattr(each, name) for each in own) + rest_s
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


# Ours ---------------------------------------------------------------------------------------


def times(
    cell: TimedConfiguration, *, seconds: float | None, folder: Path | None
) -> tuple[TimedConfiguration, Mapping[Direction, Times]]:
    """Plan and predict a cell.

    Args:
        cell: With its directions.
        seconds: See `Chosen`.
        folder: Where structures are kept; None keeps none.

    Raises:
        ValueError: The cluster is not calibrated.
    """
    fitted = _calibrated(cell.cluster)
    budget = "" if seconds is None else f":seconds={seconds:g}"
    found = {}
    for direction in cell.directions:
        eager = {name: _as_run(cell, name, direction, fitted) for name in cell.baselines}
        fastest = min(eager, key=lambda name: eager[name])
        graph = (_in_graph(cell, _RAN[name], direction, fitted, folder) for name in cell.baselines)
        rivals = _rivals(cell, direction, fitted, folder)
        rival = min(rivals, key=lambda name: rivals[name])
        found[direction] = Times(
            baseline=fastest,
            eager_s=eager[fastest],
            graph_s=min(graph),
            rival=rival,
            best_s=rivals[rival],
            published_s=_published_s(cell, budget, direction, fitted, folder),
            ours_s=_in_graph(cell, f"ultraattn{budget}", direction, fitted, folder),
            error=sum(_error(cell, direction, fitted, eager=eager) for eager in (True, False)),
        )
    return cell, found


def _calibrated(name: str) -> Calibration:
    fitted = cluster(name).fitted
    if fitted is None:
        known = ", ".join(other for other, c in CLUSTERS.items() if c.fitted and c.fitted.errors)
        raise ValueError(
            f"cluster ({name}) must be calibrated: published times had costs that no datasheet "
            f"has; choose from {known}"
        )
    return fitted


def _error(
    cell: TimedConfiguration, direction: Direction, fitted: Calibration, *, eager: bool
) -> float:
    """The mean error of such plans; where none was measured on one node, of those between nodes."""
    nodes = -(-cell.cp // fitted.hardware.gpus_per_node)
    backward = direction is Direction.BACKWARD
    near, far = (plan_class(eager=eager, nodes=n, backward=backward) for n in (nodes, 2))
    return fitted.errors[near] if near in fitted.errors else fitted.errors[far]


def _as_run(
    cell: TimedConfiguration, name: str, direction: Direction, fitted: Calibration, rows: int = 0
) -> float:
    """Time what the published harness ran under a name."""
    width = min(fitted.hardware.gpus_per_node, cell.cp)
    case = Case(
        gpu="",
        nodes=cell.cp // width,
        gpus_per_node=width,
        pattern=cell.pattern,
        direction="fwd" if direction is Direction.FORWARD else "bwd",
        strategy=name,
        heads=cell.heads,
        seqlen_q=cell.seqlen,
        seqlen_kv=cell.seqlen,
        rows=rows,
        mode="normal",
        measured_s=inf,
        author_s=None,
    )
    return predict_run(case, fitted)


def _published_s(
    cell: TimedConfiguration,
    budget: str,
    direction: Direction,
    fitted: Calibration,
    folder: Path | None,
) -> float:
    """Time the published kind of plan: the best grid for full attention, else what is solved."""
    if cell.pattern == "full":
        width = fitted.hardware.gpus_per_node
        sides = cell.cp // width if cell.cp > width else cell.cp
        grids = [rows for rows in range(1, sides + 1) if sides % rows == 0]
        names = ["grid", *(["grid-fused"] if _fused(cell, direction, width) else [])]
        return min(_as_run(cell, name, direction, fitted, rows) for rows in grids for name in names)
    return _in_graph(cell, f"ultraattn-paper{budget}", direction, fitted, folder, published=True)


def _fused(cell: TimedConfiguration, direction: Direction, width: int) -> bool:
    """Whether fused grids were run: with many heads their memory was too large but for forward."""
    return cell.heads == 1 or (cell.cp > width and direction is Direction.FORWARD)


def _rivals(
    cell: TimedConfiguration, direction: Direction, fitted: Calibration, folder: Path | None
) -> Mapping[str, float]:
    """Time the other strategies in a captured graph."""
    found = {}
    for name in _RIVALS:
        with suppress(UnsupportedError):  # one head cannot be shared by ranks
            found[name] = _in_graph(cell, name, direction, fitted, folder)
    return found


def _in_graph(
    cell: TimedConfiguration,
    name: str,
    direction: Direction,
    fitted: Calibration,
    folder: Path | None,
    *,
    published: bool = False,
) -> float:
    """Time a strategy's plan in a captured graph; merging nothing, if as published."""
    config = Config(
        strategy=name,
        pattern=cell.pattern,
        cp=cell.cp,
        seqlen_q=cell.seqlen,
        seqlen_kv=cell.seqlen,
        heads_q=cell.heads,
        heads_kv=cell.heads,
        head_dim=_HEAD_DIM,
        dtype=Dtype.BFLOAT16,
        direction=direction,
        transport=Where.SIMULATED,
        cluster=cell.cluster,
        runtime=Runtime.GRAPH,
    )
    made = structure_of(config, fitted, folder)
    prices = pricer(config.problem, direction, fitted, eager=False)
    if published:
        prices.convention = ULTRA
    return prices.seconds_of(made.shape)
