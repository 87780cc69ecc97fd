#!/usr/bin/env python
"""Show which predictions a change moves: the default surface before and after it.

.venv/bin/python scripts/prediction_gate.py                      # a thinned surface, as CI has it
.venv/bin/python scripts/prediction_gate.py --update             # keep its figures as they are now
.venv/bin/python scripts/prediction_gate.py --whole -o before.csv
.venv/bin/python scripts/prediction_gate.py --whole --against before.csv

The thinned surface has strategies that follow a rule, on patterns that scale; its figures lie in
tests/golden/predictions.csv. The whole one has all of them, on all patterns of the default sweep,
and takes minutes. Every row that moved by more than 2 % is listed, with what it was; then the
status is 1. Nothing here says which figure is right: see scripts/validate_predictor.py.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.base.workers import spread
from harness.cluster.machine import Runtime
from harness.cluster.presets import CLUSTERS, require
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Dtype
from harness.records.config import Config, Where
from harness.sweep.simulate_cells import Structures, simulate_cell
from harness.terminal.arguments import count
from strategies import DIRECT

STORED = Path(__file__).parents[1] / "tests" / "golden" / "predictions.csv"
MOVED = 0.02
_COLUMNS = ("cluster", "runtime", "strategy", "pattern", "cp", "seqlen", "direction")
_THIN = ("ring", "zigzag", "stripe", "allgather", "ulysses", "usp:4x2", "owner", "grid:rows=2")
_THIN_PATTERNS = ("full", "causal", "strided")
_PATTERNS = (*_THIN_PATTERNS, "global_local", "star", "streaming")
_SHEET = "h100-8x8"
Row = tuple[str, ...]
Figures = dict[Row, str]
"""By the columns of a row, microseconds; or how its cell ended instead."""


def main() -> int:
    """Compare, or keep; 1 if some prediction moved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--whole", action="store_true", help="all strategies, patterns, clusters")
    parser.add_argument("--update", action="store_true", help="keep the thinned surface's figures")
    parser.add_argument("-o", "--out", type=Path, help="write the figures to a file")
    parser.add_argument("--against", type=Path, default=STORED, help="figures before the change")
    parser.add_argument("--jobs", type=count, default=1, help="processes")
    args = parser.parse_args()
    if args.update and args.whole:
        parser.error("--update keeps the thinned surface; --whole -o FILE writes the whole one")
    if args.whole and args.out is None and args.against == STORED:
        parser.error("--whole needs -o FILE, or --against FILE with figures of the whole surface")
    found = figures(list(surface(whole=args.whole)), args.jobs)
    if args.update or args.out is not None:
        written(found, args.out or STORED)
        return 0
    try:
        before = stored(args.against)
    except (OSError, ValueError) as error:
        parser.error(f"--against ({args.against}) must be a file that this script wrote: {error}")
    lines = moved(before, found)
    print("\n".join([*lines, f"{len(lines)} of {len(found)} predictions moved by more than 2 %"]))
    return 1 if lines else 0


def surface(*, whole: bool) -> Iterator[Config]:
    """Cells of the thinned or the whole surface."""
    names: tuple[str, ...] = _THIN
    patterns, degrees, lengths = _THIN_PATTERNS, (8, 16), (2**14, 2**18)
    clusters: tuple[str, ...] = ("h100", "h100-hamming", "a800", _SHEET)
    runtimes: tuple[Runtime, ...] = (Runtime.GRAPH, Runtime.EAGER)
    if whole:
        names, patterns = (*DIRECT, "allgather:placement=zigzag"), _PATTERNS
        degrees, lengths = (8, 16, 32, 64), (2**14, 2**16, 2**18, 2**20)
        clusters, runtimes = tuple(CLUSTERS), tuple(Runtime)
    for name, pattern, cp, direction in product(names, patterns, degrees, Direction):
        for place, runtime, seqlen in product(clusters, runtimes, lengths):
            if not whole and cp > 8 and (place == _SHEET or runtime is Runtime.EAGER):
                continue
            if not whole and place == _SHEET and seqlen > lengths[0]:
                continue  # datasheet clusters are planned at every length
            try:
                require(CLUSTERS[place], cp)
            except UnsupportedError:
                continue
            yield Config(
                strategy=name,
                pattern=pattern,
                cp=cp,
                seqlen_q=seqlen,
                seqlen_kv=seqlen,
                heads_q=32,
                heads_kv=8,
                head_dim=128,
                dtype=Dtype.BFLOAT16,
                direction=direction,
                transport=Where.SIMULATED,
                cluster=place,
                runtime=runtime,
            )


def figures(cells: list[Config], jobs: int = 1) -> Figures:
    """Predict all cells; what cannot be planned has its status for a figure."""
    groups: dict[tuple[object, ...], list[Config]] = {}
    for cell in cells:
        key = cell.strategy, cell.pattern, cell.cp, cell.direction
        groups.setdefault(key, []).append(cell)
    found: Figures = {}
    if jobs == 1:
        for group in groups.values():
            found.update(_group(group))
        return found
    for part in spread(_group, list(groups.values()), jobs=jobs, lost=_lost):
        found.update(part)
    return found


def _group(cells: list[Config]) -> Figures:
    known: Structures = {}
    found: Figures = {}
    with TemporaryDirectory() as folder:  # nothing that an earlier run kept
        for cell in cells:
            record = simulate_cell(cell, {}, known, Path(folder))
            text = str(record.status)
            if record.time_s is not None:
                text = f"{record.time_s * 1e6:.6g}"
            found[_row(cell)] = text
    return found


def _lost(cells: list[Config]) -> Figures:
    return {_row(cell): "the process died" for cell in cells}


def _row(cell: Config) -> Row:
    plain = (cell.cluster, cell.runtime, cell.strategy, cell.pattern, cell.cp, cell.seqlen_q)
    return (*map(str, plain), str(cell.direction))


def moved(before: Mapping[Row, str], after: Mapping[Row, str]) -> list[str]:
    """A line for each figure that moved by more than 2 %, came or went."""
    lines = []
    for row in dict.fromkeys((*before, *after)):
        old, new = before.get(row, "(none)"), after.get(row, "(none)")
        if old == new:
            continue
        try:
            share = float(new) / float(old) - 1
        except (ValueError, ZeroDivisionError):
            lines.append(f"{' '.join(row)}: {old} -> {new}")
            continue
        if abs(share) > MOVED:
            lines.append(f"{' '.join(row)}: {old} -> {new} us ({share:+.1%})")
    return lines


def stored(path: Path) -> Figures:
    """Read figures.

    Raises:
        OSError, ValueError: There are none.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or tuple(rows[0]) != (*_COLUMNS, "us"):
        raise ValueError(f"its first line must be {','.join((*_COLUMNS, 'us'))}")
    return {tuple(row[:-1]): row[-1] for row in rows[1:] if row}


def written(found: Figures, path: Path) -> None:
    """Write figures."""
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow((*_COLUMNS, "us"))
        lines.writerows([(*row, text) for row, text in sorted(found.items())])
    print(f"{len(found)} predictions in {path}")


if __name__ == "__main__":
    sys.exit(main())
