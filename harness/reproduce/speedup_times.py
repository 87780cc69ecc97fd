"""Predicted seconds of a published comparison: each side as it was run, and all on equal ground."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path

from harness.base.cache import cache_folder, keep, kept_by_this_code
from harness.base.json_fields import json_text
from harness.cluster.calibration import Calibration
from harness.cluster.machine import Runtime
from harness.cluster.presets import CLUSTERS, cluster
from harness.cluster.validated import mean_error
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Dtype
from harness.prepare.scalable_plan_cache import structure_of
from harness.records.config import Config, Where
from harness.reproduce.case import Case
from harness.reproduce.published_runs import predict_run
from harness.simulate.calibrated import pricer
from harness.simulate.job_costs import ULTRA

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
    fitted = calibrated_cluster(cell.cluster)
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
            error=_both_errors(cell, direction, fitted),
        )
    return cell, found


def calibrated_cluster(name: str) -> Calibration:
    """Return the calibration of a cluster.

    Raises:
        ValueError: It was never measured.
    """
    fitted = cluster(name).fitted
    if fitted is None:
        known = ", ".join(other for other, c in CLUSTERS.items() if c.fitted and c.fitted.validated)
        raise ValueError(
            f"cluster ({name}) must be calibrated: published times had costs that no datasheet "
            f"has; choose from {known}"
        )
    return fitted


def class_error(fitted: Calibration, cp: int, direction: Direction, *, eager: bool) -> float | None:
    """Return the mean error of such plans; where none was measured on one node, between nodes.

    None where neither was.
    """
    nodes = -(-cp // fitted.hardware.gpus_per_node)
    runtime = (Runtime.EAGER if eager else Runtime.GRAPH).value
    near, far = (
        mean_error(fitted.validated, runtime=runtime, nodes=count, direction=direction.value)
        for count in (nodes, 2)
    )
    return far if near is None else near


def _both_errors(cell: TimedConfiguration, direction: Direction, fitted: Calibration) -> float:
    errors = [class_error(fitted, cell.cp, direction, eager=eager) for eager in (True, False)]
    assert None not in errors, f"{fitted.id} was never compared with measured runs"
    return sum(error for error in errors if error is not None)


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


def times_kept(cell: TimedConfiguration, direction: Direction) -> Times:
    """Return the times of a cell in one direction, or what this code kept of an earlier run."""
    name = hashlib.sha256(repr((cell, direction)).encode()).hexdigest()[:24] + ".json"
    folder = cache_folder() / "speedups"
    kept = kept_by_this_code(folder, name, _times_from)
    if kept is None:
        one = replace(cell, directions=(direction,))
        kept = times(one, seconds=None, folder=cache_folder() / "structures")[1][direction]
        keep(folder, name, json_text(asdict(kept)).encode())
    return kept


def _times_from(content: bytes) -> Times:
    return Times(**json.loads(content))
