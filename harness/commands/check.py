"""`check`: prove strategies equal to the float64 oracle, forward and backward."""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from harness import checks
from harness.check import Cell, Status
from harness.commands.arguments import count, dtype, example, heads, length, listed
from harness.config import Config, Scope, Where
from harness.grid import Axes, pairwise, whole
from strategies import strategy


def register(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "check",
        help="numerical equivalence to the float64 oracle, forward and backward",
        description="Run a grid of cells and judge every result by the one tolerance. Without "
        "flags: a covering of all pairs of strategies, patterns, degrees, precisions, heads, "
        "batches, lengths and head dims, all ranks in one process.",
        epilog=example(
            [
                "check",
                "check --transport gloo --cp 2,4",
                "check --strategies zigzag,usp:2x2 --cp 4 --seqlen 97 --dtype bfloat16",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategies", type=listed(str), help="names, with options")
    parser.add_argument("--patterns", type=listed(str), help="names of the grid (see `list`)")
    parser.add_argument("--cp", type=listed(count), help="degrees")
    parser.add_argument("--seqlen", type=listed(length), help="lengths, tokens")
    parser.add_argument("--heads", type=listed(heads), help="query/KV heads, e.g. 6/2,7/1")
    parser.add_argument("--head-dim", type=listed(count), help="widths")
    parser.add_argument("--batch", type=listed(count), help="batch sizes")
    parser.add_argument("--dtype", type=listed(dtype), help="precisions")
    parser.add_argument(
        "--transport",
        type=Where,
        choices=(Where.LOCAL, Where.GLOO),
        default=Where.LOCAL,
        help="gloo: also run real processes and ask for the same bits",
    )
    parser.add_argument(
        "--scope", type=Scope, choices=tuple(Scope), default=Scope.ATTENTION, help="what is run"
    )
    parser.add_argument("--full", action="store_true", help="the whole product, not a covering")
    parser.add_argument("--repeat", type=count, default=1, help="with gloo: runs of each cell")
    parser.add_argument("--jobs", type=count, default=checks.cores(), help="processes at once")
    parser.add_argument("-o", "--output", type=Path, help="append records here and resume from it")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the grid that the flags describe."""
    if args.scope is Scope.LAYER:
        raise ValueError("scope (layer) has no executor yet; use --scope attention")
    configs = _configs(args)
    output = args.output
    if output is None and args.full:
        output = Path("results") / "check-full" / "records.jsonl"
    progress = checks.Progress(output) if output is not None else None
    todo = [c for c in configs if progress is None or not progress.done(c)]
    begin = time.monotonic()
    cells = _judge(args, todo, progress)
    records = _records(configs, cells, progress)
    _report(args, records, time.monotonic() - begin)
    return 1 if any(record["status"] == Status.FAILED for record in records) else 0


def _configs(args: argparse.Namespace) -> list[Config]:
    axes = Axes()
    for text in args.strategies or ():
        strategy(text)  # an unknown name is a wrong call, not a refused cell
    given = {
        "strategies": args.strategies,
        "patterns": args.patterns,
        "cps": args.cp,
        "dtypes": args.dtype,
        "heads": args.heads,
        "batches": args.batch,
        "lengths": args.seqlen,
        "head_dims": args.head_dim,
    }
    axes = replace(axes, **{name: values for name, values in given.items() if values})
    return list(whole(axes) if args.full else pairwise(axes))


def _judge(
    args: argparse.Namespace, configs: Sequence[Config], progress: checks.Progress | None
) -> list[Cell]:
    cells: list[Cell] = []
    pairs = []
    group = args.transport is Where.GLOO
    with _bar() as bar:
        task = bar.add_task("check", total=len(configs))
        for pair in checks.check_all(configs, jobs=min(args.jobs, max(len(configs), 1))):
            bar.advance(task)
            pairs.append(pair)
            if not group:
                _keep(pair, cells, progress)
        if group:
            task = bar.add_task("gloo", total=len(pairs))
            for pair in checks.group_all(pairs, repeat=args.repeat):
                bar.advance(task)
                _keep(pair, cells, progress)
    return cells


def _keep(pair: Iterable[Cell], cells: list[Cell], progress: checks.Progress | None) -> None:
    for cell in pair:
        cells.append(cell)
        if progress is not None:
            progress.add(cell)


def _records(
    configs: Sequence[Config], cells: Sequence[Cell], progress: checks.Progress | None
) -> list[dict[str, object]]:
    records = [cell.record() for cell in cells]
    if progress is not None:
        fresh = {cell.config.hash for cell in cells}
        wanted = {
            checks.hash_of(config, direction)
            for config in configs
            for direction in type(config.direction)
        }
        records += [
            {name: value for name, value in record.items() if name != "config_hash"}
            for key, record in progress.records.items()
            if key in wanted - fresh
        ]
    return records


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )


def _report(args: argparse.Namespace, records: Sequence[dict[str, object]], took_s: float) -> None:
    counts = {status: sum(r["status"] == status for r in records) for status in Status}
    if args.json:
        body = {**{status.value: n for status, n in counts.items()}, "cells": records}
        json.dump(body, sys.stdout)
        print()
        return
    console = Console()
    console.print(_table(records))
    for record in records:
        if record["status"] == Status.FAILED:
            console.print(f"[red]failed[/red] {_name(record)}: {record['reason']}", highlight=False)
    reasons = sorted({str(r["reason"]) for r in records if r["status"] == Status.REFUSED})
    for reason in reasons:
        console.print(f"[yellow]refused[/yellow] {reason}", highlight=False)
    line = ", ".join(f"{n} {status.value}" for status, n in counts.items())
    console.print(f"{line} in {took_s:.0f} s", highlight=False)


def _name(record: dict[str, object]) -> str:
    return (
        f"{record['strategy']} {record['pattern']} cp={record['cp']} S={record['seqlen_q']}"
        f"/{record['seqlen_kv']} heads={record['heads_q']}/{record['heads_kv']} "
        f"D={record['head_dim']} B={record['batch']} {record['dtype']} {record['direction']}"
    )


def _table(records: Sequence[dict[str, object]]) -> Table:
    table = Table(title="largest error / tolerance, by strategy", title_justify="left")
    table.add_column("strategy")
    for name in ("passed", "failed", "refused"):
        table.add_column(name, justify="right")
    for name in ("float64", "float32", "bfloat16"):
        table.add_column(name, justify="right")
    for text in dict.fromkeys(str(record["strategy"]) for record in records):
        own = [record for record in records if record["strategy"] == text]
        cells = [str(sum(r["status"] == status for r in own)) for status in Status]
        cells += [_worst(own, name) for name in ("float64", "float32", "bfloat16")]
        table.add_row(text, *cells)
    return table


def _worst(records: Sequence[dict[str, object]], dtype_name: str) -> str:
    """Largest ratio of error to tolerance, 1.00 being the limit."""
    ratios = [
        error / limit
        for record in records
        if record["dtype"] == dtype_name
        for error, limit in _ratios(record)
    ]
    return f"{max(ratios):.2f}" if ratios else ""


def _ratios(record: dict[str, object]) -> list[tuple[float, float]]:
    found, limits = record["max_rel_error"], record["tolerances"]
    assert isinstance(found, dict) and isinstance(limits, dict)
    return [(float(found[name]), float(limits[name])) for name in found]
