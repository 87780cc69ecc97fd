"""`list`: the strategies, patterns and precisions that there are."""

import argparse
import json
import sys
from typing import TypedDict

from rich.console import Console
from rich.table import Table

from harness.commands.arguments import example
from harness.plan import Scope
from harness.problem import Dtype
from harness.strategy import ALIASES
from patterns import PATTERNS, make_pattern
from strategies import EVERY_STRATEGY, STRATEGIES

_PICTURED_TOKENS = 512
_PICTURE_COLUMNS = 16
_WIDE = 130  # columns of a table that goes to a file or pipe


class _StrategyEntry(TypedDict):
    name: str
    aliases: list[str]
    summary: str
    paper: str
    options: list[str]
    scopes: list[str]


class _PatternEntry(TypedDict):
    name: str
    summary: str
    parameters: dict[str, str | None]
    cross: bool
    picture: str | None


class _DtypeEntry(TypedDict):
    name: str
    bytes: int
    accumulator_bytes: int


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "list",
        help="the strategies, patterns and precisions that there are",
        description=__doc__,
        epilog=example(["list", "list patterns", "list strategies --json"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", nargs="?", choices=["strategies", "patterns", "dtypes"], help="default: all"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what there is."""
    wanted = [args.what] if args.what else ["strategies", "patterns", "dtypes"]
    if args.json:
        entries = {"strategies": _strategies, "patterns": _patterns, "dtypes": _dtypes}
        body = {what: entries[what]() for what in wanted}
        sys.stdout.write(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
        return 0
    tables = {
        "strategies": _strategy_table,
        "patterns": _pattern_table,
        "dtypes": _dtype_table,
    }
    console = Console(markup=False, width=None if sys.stdout.isatty() else _WIDE)
    for what in wanted:
        console.print(tables[what]())
    return 0


def _strategies() -> list[_StrategyEntry]:
    return [
        _StrategyEntry(
            name=name,
            aliases=[alias for alias, target in ALIASES.items() if target == name],
            summary=strategy.summary,
            paper=strategy.paper,
            options=sorted(strategy.accepts),
            scopes=[scope for scope in Scope if scope is Scope.LAYER or name in STRATEGIES],
        )
        for name, strategy in EVERY_STRATEGY.items()
    ]


def _patterns() -> list[_PatternEntry]:
    entries = []
    for name, kind in PATTERNS.items():
        parameters = {key: parameter.default for key, parameter in kind.parameters.items()}
        picture = None
        if None not in parameters.values():
            picture = make_pattern(name, _PICTURED_TOKENS).picture(_PICTURE_COLUMNS)
        entries.append(
            _PatternEntry(
                name=name,
                summary=kind.summary,
                parameters=parameters,
                cross=kind.cross,
                picture=picture,
            )
        )
    return entries


def _dtypes() -> list[_DtypeEntry]:
    return [
        _DtypeEntry(name=dtype.value, bytes=dtype.bytes, accumulator_bytes=dtype.accumulator_bytes)
        for dtype in Dtype
    ]


def _strategy_table() -> Table:
    columns = ("strategy", "also called", "what it does", "scope", "options", "paper")
    table = Table(*columns, title="strategies")
    for entry in _strategies():
        table.add_row(
            entry["name"],
            ", ".join(entry["aliases"]),
            entry["summary"],
            ", ".join(entry["scopes"]),
            ", ".join(entry["options"]),
            entry["paper"],
        )
    return table


def _pattern_table() -> Table:
    title = f"patterns, pictured at {_PICTURED_TOKENS} tokens: queries down, keys across"
    table = Table("pattern", "who attends whom", "parameters", "picture", title=title)
    for entry in _patterns():
        parameters = [
            f"{key} (must be given)" if default is None else f"{key}={default}"
            for key, default in entry["parameters"].items()
        ]
        table.add_row(
            entry["name"],
            entry["summary"],
            "\n".join(parameters),
            entry["picture"] or "depends on its parameters",
            end_section=True,
        )
    return table


def _dtype_table() -> Table:
    table = Table("dtype", "bytes", "bytes of partial results", title="dtypes")
    for entry in _dtypes():
        table.add_row(entry["name"], str(entry["bytes"]), str(entry["accumulator_bytes"]))
    return table
