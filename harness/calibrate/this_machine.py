"""This machine as a cluster: calibrate it, and compare predicted with measured sweeps on it."""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from harness.base.environment import environment
from harness.calibrate.measure_machine import empty_cell, measure_machine
from harness.cluster.calibration import Calibration, dump
from harness.fit.this_machine import fit_local, machine_sources, with_overheads
from harness.measure.cells import measure_cells
from harness.plan.problem import Direction, Dtype
from harness.planning.strategy import Context
from harness.proved.plans import proved
from harness.records.cell import CellRecord
from harness.records.config import Config, Where
from harness.records.store import FILE, ResultFile
from harness.simulate.calibrated import pricer, skeleton_on
from harness.sweep.limits import Limits
from harness.sweep.simulate_cells import simulate_cell
from strategies import STRATEGIES, strategy

RecordPair = tuple[CellRecord, CellRecord]
"""The measured and the simulated record of one cell."""
PROMISED = 0.15
"""Median error of predicted sweeps on the machine that was calibrated."""


def calibrated(date: str, log: Callable[[str], None]) -> str:
    """Measure this machine and fit; return the calibration as TOML."""
    figures = measure_machine(log)
    value = fit_local(figures, date, log)
    empty = {(d, cp): _seconds(empty_cell(cp, Direction(d)), value) for d, cp in figures.empty}
    return dump(with_overheads(value, empty, figures.empty), machine_sources(date))


def _seconds(config: Config, fitted: Calibration) -> float:
    """Predict a cell, planned as it is."""
    problem, direction = config.problem, config.direction
    context = Context(gpus_per_node=fitted.hardware.gpus_per_node)
    program = proved(strategy(config.strategy), problem, direction, context)
    prices = pricer(problem, direction, fitted, eager=False)
    return prices.seconds_of(skeleton_on(program, fitted, eager=False))


def compared_cells() -> Iterator[Config]:
    """Cells to compare: every strategy, two patterns, small and medium lengths, cp 1, 2 and 4."""
    axes = product((1, 2, 4), (512, 1024, 2048), ("causal", "star"), Direction, STRATEGIES)
    for cp, tokens, pattern, direction, name in axes:
        yield Config(
            strategy=name,
            pattern=pattern,
            cp=cp,
            seqlen_q=tokens,
            seqlen_kv=tokens,
            heads_q=8,
            heads_kv=2,
            head_dim=64,
            dtype=Dtype.FLOAT32,
            direction=direction,
            transport=Where.GLOO,
        )


def check_predictions(path: Path, output: Path | None, log: Callable[[str], None]) -> int:
    """Measure, predict and compare; print the table and keep the records.

    Returns:
        0 if the median error is at most what is promised, 1 if not.
    """
    configs = list(compared_cells())
    limits = Limits(iterations=10, warmup=3)
    log(f"measuring {len(configs)} cells, about half a second each")
    measured = list(measure_cells(configs, limits))
    context = environment()
    simulated = [
        simulate_cell(replace(config, transport=Where.SIMULATED, cluster=str(path)), context)
        for config in configs
    ]
    pairs = [(m, s) for m, s in zip(measured, simulated, strict=True) if m.ok and s.ok]
    if output is not None:
        with ResultFile(output / FILE) as results:
            results.append(*(record.as_json() for record in [*measured, *simulated]))
    text = table(pairs)
    sys.stdout.write(text)
    if output is not None:
        (output / "check.md").write_text(text, encoding="utf-8")
    return 0 if statistics.median(map(_gap, pairs)) <= PROMISED else 1


def _gap(pair: RecordPair) -> float:
    return abs(pair[1].seconds / pair[0].seconds - 1)


def table(pairs: Sequence[RecordPair]) -> str:
    """Per degree, length and direction: cells, median, mean and largest error, signed error."""
    groups: dict[tuple[int, int, Direction], list[RecordPair]] = {}
    for pair in pairs:
        cell = pair[0].config
        key = (cell.cp, cell.seqlen_q, cell.direction)
        groups.setdefault(key, []).append(pair)
    calibration, when = pairs[0][1].calibration_id, pairs[0][0].recorded_at
    lines = [
        f"predicted against measured, gloo, one thread a rank; calibration {calibration}, {when}",
        "",
        "| cp | S | direction | cells | median | mean | largest | signed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, members in sorted(groups.items(), key=lambda item: str(item[0])):
        lines.append(f"| {' | '.join(map(str, key))} | {_row(members)} |")
    lines.append(f"| all | | | {_row(list(pairs))} |")
    return "\n".join(lines) + "\n"


def _row(members: Sequence[RecordPair]) -> str:
    gaps = [_gap(pair) for pair in members]
    signed = statistics.mean(s.seconds / m.seconds - 1 for m, s in members)
    shown = statistics.median(gaps), statistics.mean(gaps), max(gaps)
    return f"{len(gaps)} | " + " | ".join(f"{x:.1%}" for x in shown) + f" | {signed:+.1%}"
