"""`report`: results as one page that opens from disk, to read, to show and to print."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.files import write_whole
from harness.records.cell import CellRecord
from harness.records.legible import read_cells
from harness.report.compare import compare
from harness.report.reading import latest, read_cell
from harness.report.summary import markdown_text, sheet_text
from harness.terminal.arguments import Help, Verbs, example, path, written
from harness.terminal.progress import say

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
    parser.add_argument("results", type=path, help="a folder of results, or its records.jsonl")
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and what else is asked for."""
    if not any((args.output, args.svg, args.markdown, args.csv)):
        raise ValueError("report: say where to write, for instance -o page.html")
    from harness.page.build import build_page  # they load what draws
    from harness.page.example_runs import example_runs

    found, notes = read_cells(args.results, read_cell)
    records = latest(found)
    say(*notes)
    page = build_page(
        records,
        title=args.title,
        notes=notes,
        changes=_changes(args, records),
        runs=example_runs(records) if args.timeline else [],
    )
    for target, text in (
        (args.output, page.html),
        (args.markdown, markdown_text(records) if args.markdown else ""),
        (args.csv, sheet_text(records) if args.csv else ""),
    ):
        if target is not None:
            write_whole(target, text)
            sys.stdout.write(f"{target}: written\n")
    if args.svg is not None:
        _write_figures(args.svg, page)
    return 0


def _changes(args: argparse.Namespace, records: list[CellRecord]) -> "Changes | None":
    if args.compare is None:
        return None
    from harness.page.comparison import changes_of

    before, notes = read_cells(args.compare, read_cell)
    say(*notes)
    return changes_of(compare(latest(before), records), str(args.compare), str(args.results))


def _write_figures(folder: Path, page: "Page") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for chart in page.charts:
        text = chart.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        write_whole(folder / f"{chart.key}.svg", text if "xmlns=" not in chart.svg else chart.svg)
    sys.stdout.write(f"{folder}: {len(page.charts)} figures\n")
