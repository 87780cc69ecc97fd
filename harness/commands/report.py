"""`report`: results as one page that opens from disk, to read, to show and to print."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.files import write_whole
from harness.base.json_fields import json_text
from harness.records.cell import CellRecord
from harness.records.legible import read_cells
from harness.records.store import records_file
from harness.report.compare import compare
from harness.report.reading import latest, read_cell
from harness.report.summary import markdown_text, sheet_text
from harness.terminal.arguments import Help, Verbs, example, path, written
from harness.terminal.progress import say
from harness.terminal.targets import require_apart

if TYPE_CHECKING:
    from harness.page.build import Page
    from harness.page.comparison import Changes


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "report",
        help=summary,
        description="Write one self-contained HTML file: it opens from disk, asks no network, and "
        "prints. On top stands which strategy is the fastest of each problem, by how much, and "
        "what cannot be told apart; then tables of strategies by patterns with the reasons of "
        "refusals, charts over length and degree, where time goes, memory beside the card's, "
        "predictions beside measurements, every cell in a table that sorts and filters, and the "
        "commands that repeat the run.",
        epilog=example(
            [
                "report results/latest -o page.html",
                "report results/tuesday -o page.html --compare results/monday",
                "report results/latest -o page.html --svg figures --csv cells.csv",
            ]
        ),
        formatter_class=Help,
    )
    parser.add_argument(
        "results", type=path, nargs="+", help="a folder of results, or its records.jsonl"
    )
    parser.add_argument("-o", "--output", type=written, metavar="PAGE.html", help="the page")
    parser.add_argument(
        "--compare", type=path, metavar="BEFORE", help="other results, to compare these with"
    )
    parser.add_argument("--title", default="Context-parallel attention", help="of the page")
    parser.add_argument(
        "--timeline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw a run of the fastest simulated strategy of the largest problem",
    )
    parser.add_argument("--svg", type=Path, metavar="DIR", help="each figure as a file as well")
    parser.add_argument("--markdown", type=written, metavar="FILE", help="tables as Markdown")
    parser.add_argument("--csv", type=written, metavar="FILE", help="every cell as CSV")
    parser.add_argument(
        "--parquet", type=written, metavar="FILE", help="every cell as Parquet (the extra `frame`)"
    )
    parser.add_argument(
        "--json", action="store_true", help="say what was written, and the answer, as JSON"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and what else is asked for."""
    if not any((args.output, args.svg, args.markdown, args.csv, args.parquet)):
        raise ValueError("say where to write, for instance -o page.html")
    require_apart(
        {
            "--output": args.output,
            "--markdown": args.markdown,
            "--csv": args.csv,
            "--parquet": args.parquet,
        },
        map(records_file, [*args.results, *([args.compare] if args.compare else [])]),
    )
    from harness.page.build import build_page  # they load what draws
    from harness.page.example_runs import example_runs

    records, notes = _read(args.results)
    page = build_page(
        records,
        title=args.title,
        notes=notes,
        changes=_changes(args, records),
        runs=example_runs(records) if args.timeline else [],
    )
    files = {}
    for name, target, text in (
        ("page", args.output, page.html),
        ("markdown", args.markdown, markdown_text(records) if args.markdown else ""),
        ("csv", args.csv, sheet_text(records) if args.csv else ""),
    ):
        if target is not None:
            write_whole(target, text)
            files[name] = str(target)
    if args.parquet is not None:
        _write_parquet(args.parquet, records)
        files["parquet"] = str(args.parquet)
    if args.svg is not None:
        _write_figures(args.svg, page)
        files["svg"] = str(args.svg)
    if args.json:
        body = {"records": len(records), "files": files, "answers": _answers(records)}
        sys.stdout.write(json_text(body, indent=2) + "\n")
    else:
        for target in files.values():
            sys.stdout.write(f"{target}: written\n")
    return 0


def _answers(records: Sequence[CellRecord]) -> list[dict[str, object]]:
    """The fastest of each problem, as plain values."""
    from harness.page.answer import answers

    return [
        {
            "where": row.where,
            "cp": row.cp,
            "seqlen": row.seqlen,
            "pattern": row.pattern,
            "strategy": row.best.names[0],
            "time_s": row.best.time_s,
            "ties": [*row.best.names[1:], *row.best.near],
            "second": row.second,
            "slower_by": row.margin,
            "source": row.source.value,
        }
        for row in answers(records)
    ]


def _read(places: Sequence[Path]) -> tuple[list[CellRecord], list[str]]:
    """The newest record of each cell of some results, and what could not be read."""
    found: list[CellRecord] = []
    notes: list[str] = []
    for place in places:
        records, said = read_cells(place, read_cell)
        found += records
        notes += said
    say(*notes)
    return latest(found), notes


def _changes(args: argparse.Namespace, records: list[CellRecord]) -> "Changes | None":
    if args.compare is None:
        return None
    from harness.page.comparison import changes_of

    before, _ = _read([args.compare])
    after = ", ".join(map(str, args.results))
    return changes_of(compare(before, records), str(args.compare), after)


def _write_parquet(target: Path, records: Sequence[CellRecord]) -> None:
    """Write a file whole or not at all.

    Raises:
        ValueError: A package that writes it is not installed.
    """
    from harness.report.frame import frame_of

    try:
        content = frame_of(records).to_parquet(index=False)
    except ImportError as error:
        raise ValueError(
            f"--parquet ({target}) needs pandas and pyarrow, and {error.name} is not installed; "
            "pip install pandas pyarrow, or use --csv"
        ) from None
    write_whole(target, content)


def _write_figures(folder: Path, page: "Page") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for chart in page.charts:
        write_whole(folder / f"{chart.key}.svg", chart.svg)
