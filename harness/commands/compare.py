"""`compare`: two result sets, and what changed beyond the spread of their samples."""

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.table import Table

from harness.base.json_fields import json_text
from harness.records.legible import read_cells
from harness.report.compare import THRESHOLD, CellChange, ChangeKind, Comparison, compare
from harness.report.format import known, milliseconds, short
from harness.report.predictions import (
    PredictedPair,
    PredictionErrors,
    predicted_pairs,
    prediction_errors,
)
from harness.report.reading import latest, read_cell
from harness.terminal.arguments import Help, Verbs, example, path, positive_number
from harness.terminal.progress import Output, say

_ALONE = (ChangeKind.MISSING, ChangeKind.EXTRA)
_SHOWN = 5
"""Cells of one set alone that are shown; all are in the JSON."""


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "compare",
        help=summary,
        description="Match the cells of two sweeps and say what changed. A measured time changed "
        "if the medians differ by more than the threshold and the p20-p80 bands of the samples do "
        "not overlap (with 5 to 19 samples: their whole ranges; with fewer it is not judged); the "
        "threshold rises where the cells of one strategy scatter more than that between the runs. "
        "A simulated time, a status, a plan's hash, bytes and memory changed if they differ; a "
        "numerical error grew if it more than doubled. Exit status: 1 if something is worse "
        "(slower, a larger error, a cell that is gone or no longer ok, more bytes or memory), else "
        "0, also where something is faster or new.",
        epilog=example(
            [
                "compare results/monday results/tuesday",
                "compare before/records.jsonl after/records.jsonl --threshold 5 --json",
                "compare --predicted results/simulated --measured results/cluster",
            ]
        ),
        formatter_class=Help,
    )
    parser.add_argument(
        "before", type=path, nargs="?", help="a folder of results, or its records.jsonl"
    )
    parser.add_argument("after", type=path, nargs="?", help="the folder or file to compare it with")
    group = parser.add_argument_group("predictions: how well a simulation foretold a run")
    group.add_argument(
        "--predicted", type=path, metavar="RESULTS", help="simulated cells, of any cluster"
    )
    group.add_argument(
        "--measured", type=path, metavar="RESULTS", help="the same cells, measured on the real one"
    )
    parser.add_argument(
        "--threshold",
        type=positive_number,
        default=100 * THRESHOLD,
        metavar="PERCENT",
        help="smallest change of a median to report (default: %(default)g %%)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare two result sets; 1 if something is worse."""
    foretold, two = (args.predicted, args.measured), (args.before, args.after)
    if any(foretold):
        if any(two) or not all(foretold):
            raise ValueError("give --predicted and --measured together, and nothing else")
        return _foretold(args)
    if not all(two):
        raise ValueError("name two results, or give --predicted and --measured with one each")
    (before, notes), (after, more) = (
        read_cells(path, read_cell) for path in (args.before, args.after)
    )
    say(*notes, *more)
    found = compare(before, after, threshold=args.threshold / 100)
    if not found.matched:
        raise ValueError(
            f"no cell of {args.before} is in {args.after}: compare runs of the same cells"
        )
    if args.json:
        sys.stdout.write(json_text(found.as_json(), indent=2) + "\n")
    else:
        _print(Output(markup=False, highlight=False), found)
    return 1 if any(change.worse for change in found.changes) else 0


def _foretold(args: argparse.Namespace) -> int:
    """Put predictions beside measurements of the same cells."""
    (simulated, notes), (ran, more) = (
        read_cells(place, read_cell) for place in (args.predicted, args.measured)
    )
    say(*notes, *more)
    pairs = predicted_pairs(latest(simulated), latest(ran))
    found = prediction_errors(pairs)
    if args.json:
        cells = [
            {
                "config_hash": pair.measured.config_hash,
                "strategy": pair.measured.config.strategy,
                "predicted_s": pair.predicted.time_s,
                "measured_s": pair.measured.time_s,
                "error": pair.error,
                "expected_error": pair.predicted.expected_error,
            }
            for pair in pairs
        ]
        sys.stdout.write(json_text({**asdict(found), "pairs": cells}, indent=2) + "\n")
        return 0
    console = Output(markup=False, highlight=False)
    console.print(_pairs_table(pairs))
    for line in _foretold_lines(found):
        console.print(line)
    return 0


def _pairs_table(pairs: Sequence[PredictedPair]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("cell", overflow="fold")
    for name in ("predicted", "measured", "error", "expected"):
        table.add_column(name, justify="right", no_wrap=True)
    for pair in pairs:
        cell = pair.measured.config
        expected = known(pair.predicted.expected_error, lambda error: f"±{error:.0%}")
        table.add_row(
            f"{cell.strategy} {cell.pattern} cp={cell.cp} S={short(cell.seqlen_q)} "
            f"{cell.direction.value}",
            f"{milliseconds(pair.predicted.seconds)} ms ",
            f"{milliseconds(pair.measured.seconds)} ms ",
            f"{pair.error:+.1%} ",
            expected,
        )
    return table


def _foretold_lines(found: PredictionErrors) -> Iterator[str]:
    yield (
        f"{found.cells} cells: off by {found.mean:.1%} on average ({found.signed:+.1%} signed), "
        f"p50 {found.p50:.1%}, p90 {found.p90:.1%}, worst {found.worst:.1%}"
    )
    if found.expected:
        yield f"{found.within} of {found.expected} errors are at most what was expected"
    if found.regret_mean is not None:
        yield (
            f"choice: the predicted best is the measured best in {found.hits} of {found.problems} "
            f"problems; taking it costs {found.regret_mean:.1%} on average, at worst "
            f"{found.regret_worst:.1%}"
        )


def _print(console: Output, found: Comparison) -> None:
    if found.changes:
        shown, hidden = _few(found.changes)
        console.print(_table(shown))
        for kind, count in hidden.items():
            console.print(f"and {count} cells more: {kind.value}")
        for line in _by_strategy(found.changes):
            console.print(line)
    for name, (old, new) in found.environment.items():
        console.print(f"note: {name} was {old}, is {new}")
    if found.scatter is not None and found.scatter > found.threshold:
        console.print(
            f"note: cells of one strategy scatter between the runs; only changes of more than "
            f"{found.scatter:.0%} count",
        )
    if found.not_judged:
        console.print(
            f"note: {len(found.not_judged)} measured times have too few samples to be judged",
        )
    changed = found.matched - found.unchanged
    what = "no change"
    if found.changes:
        worse = sum(change.worse for change in found.changes)
        what = f"{changed} of them changed; {worse} of {len(found.changes)} changes for the worse"
    console.print(f"{found.matched} cells in both, {what}")


def _few(changes: Sequence[CellChange]) -> tuple[list[CellChange], Counter[ChangeKind]]:
    """Leave out all but a few of the cells that only one set has; count those left out."""
    shown: list[CellChange] = []
    seen: Counter[ChangeKind] = Counter()
    for change in changes:
        seen[change.kind] += 1
        if change.kind not in _ALONE or seen[change.kind] <= _SHOWN:
            shown.append(change)
    return shown, Counter({kind: seen[kind] - _SHOWN for kind in _ALONE if seen[kind] > _SHOWN})


def _table(changes: Sequence[CellChange]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("change", no_wrap=True)
    table.add_column("cell", overflow="fold")
    for name in ("before", "after", "ratio"):
        table.add_column(name, justify="right", overflow="fold")
    for change in changes:
        ratio = "" if change.ratio is None else f"{change.ratio:.3f}"
        values = [_shown(change.kind, value) for value in (change.before, change.after)]
        kind = change.kind.value
        if change.kind is ChangeKind.ERROR:
            kind += f" ({change.detail})"
        style = "" if change.worse else "dim"
        table.add_row(kind, f"{change.strategy} {change.cell}", *values, ratio, style=style)
    return table


def _shown(kind: ChangeKind, value: object) -> str:
    match value:
        case None:
            return "—"
        case float() if kind in (ChangeKind.SLOWER, ChangeKind.FASTER):
            return f"{value * 1e3:.4g} ms"
        case float():
            return f"{value:.2e}"
        case _:
            return str(value)


def _by_strategy(changes: Sequence[CellChange]) -> list[str]:
    """A line per strategy and kind of change of its times."""
    ratios: dict[tuple[str, ChangeKind], list[float]] = {}
    for change in changes:
        if change.kind in (ChangeKind.SLOWER, ChangeKind.FASTER) and change.ratio is not None:
            ratios.setdefault((change.strategy, change.kind), []).append(change.ratio)
    return [
        f"{strategy}: {len(own)} cells {kind.value}, median ratio {statistics.median(own):.3f}"
        for (strategy, kind), own in ratios.items()
    ]
