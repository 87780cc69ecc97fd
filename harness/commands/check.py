"""`check`: prove strategies equal to the float64 oracle, forward and backward."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from harness.base.json_fields import json_text
from harness.base.workers import cores
from harness.check.axes import Axes, pairwise, size, spelled_pattern, whole_product
from harness.plan.problem import Dtype
from harness.plan.tasks import Scope
from harness.planning.peers import expanded, is_peer
from harness.records.check_record import CheckRecord, Outcome, from_line
from harness.records.config import Config, Where
from harness.records.legible import Aside, one_by_one, told_unreadable
from harness.records.store import ResultFile
from harness.terminal.arguments import (
    Help,
    Verbs,
    add_heads,
    count,
    dtype,
    example,
    flag_of,
    heads,
    heads_axis,
    length,
    listed,
    model_named,
    written,
)
from harness.terminal.progress import Live, Output, say
from patterns import make_pattern
from strategies import strategy

if TYPE_CHECKING:
    from harness.check.cell import JudgedCell

_MOST_RANKS = 512
_MOST_TOKENS = 16384


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "check",
        help=summary,
        description="Run every cell of a grid and compare its results with a dense float64 oracle. "
        "Without flags the grid covers every pair of strategy, pattern, degree, precision, heads, "
        "batch, length and head width at least once, with all ranks in one process.",
        epilog=example(
            [
                "check",
                "check --transport gloo --cp 2,4",
                "check --scope layer --strategies upipe:ring=2,usp --cp 4",
                "check --model llama3-8b --strategies upipe,fpdt --cp 8 --dtype float32",
                "check --strategies zigzag,usp:2x2 --cp 4 --seqlen 97 --dtype bfloat16",
            ]
        ),
        formatter_class=Help,
    )
    parser.add_argument(
        "--strategies",
        type=listed(str),
        help="names with options, e.g. ring,usp:2x2; 'peer:*': other projects' implementations",
    )
    parser.add_argument(
        "--patterns", type=listed(str), help="masks of the default grid, e.g. causal,window"
    )
    parser.add_argument("--cp", type=listed(count), help="context-parallel degrees, e.g. 1,2,4")
    parser.add_argument("--seqlen", type=listed(length), help="tokens over all ranks, e.g. 97,1020")
    add_heads(parser, listed(heads))
    parser.add_argument("--head-dim", type=listed(count), help="widths of a head, e.g. 64")
    parser.add_argument("--batch", type=listed(count), help="sequences per batch, e.g. 1,2")
    parser.add_argument("--dtype", type=listed(dtype), help="precisions, e.g. float64,bfloat16")
    parser.add_argument(
        "--transport",
        **flag_of((Where.LOCAL, Where.GLOO)),
        default=Where.LOCAL,
        help="gloo: also run each cell in real processes and require the same bits",
    )
    parser.add_argument(
        "--scope",
        **flag_of(Scope),
        default=Scope.ATTENTION,
        help="attention alone, or the whole layer: from x and the weights to y and all gradients",
    )
    parser.add_argument(
        "--model",
        type=model_named,
        help="check layers with a model's heads, head width and rotary base (hidden stays small)",
    )
    parser.add_argument(
        "--full", action="store_true", help="run the whole product of the grid's values"
    )
    parser.add_argument(
        "--repeat", type=count, default=1, help="how often each cell runs with gloo"
    )
    parser.add_argument("--jobs", type=count, default=cores(), help="cells to run at once")
    parser.add_argument(
        "-o",
        "--output",
        type=written,
        help="append records to this file, and skip cells that passed in it",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(needs=lambda _: ("harness.check.run",), run=run)


def run(args: argparse.Namespace) -> int:
    """Check the grid that the flags describe."""
    if args.repeat > 1 and args.transport is not Where.GLOO:
        raise ValueError(
            f"--repeat ({args.repeat}) only applies to real processes; add --transport gloo"
        )
    axes = _axes(args)
    begin = time.monotonic()
    output = args.output
    if output is None and args.full:
        output = Path("results") / "check-full" / "records.jsonl"
    if output is None:
        records = [cell.record() for pair in _judge(args, axes, set()) for cell in pair]
        return _report(args, lambda: iter(records), begin)
    with ResultFile(output) as file:
        done = _done(file)
        for pair in _judge(args, axes, done):
            file.append(*(cell.record().as_line() for cell in pair))
        file.confirm()
    return _report(args, lambda: _kept(args, axes, file), begin)


def _axes(args: argparse.Namespace) -> Axes:
    """The axes that the flags describe; what they name wrongly is a wrong call, no refused cell."""
    given = {
        "strategies": args.strategies,
        "patterns": args.patterns,
        "cps": args.cp,
        "dtypes": args.dtype,
        "heads": heads_axis(args),
        "batches": args.batch,
        "lengths": args.seqlen,
        "head_dims": args.head_dim,
    }
    axes = Axes.of(args.scope if args.model is None else Scope.LAYER)
    if args.model is not None:
        shape = args.model
        axes = replace(
            axes,
            heads=((shape.heads_q, shape.heads_kv),),
            head_dims=(shape.head_dim,),
            rotaries=(shape.rotary,),
        )
    axes = replace(axes, **{name: values for name, values in given.items() if values})
    axes = replace(axes, strategies=expanded(axes.strategies, _known))
    for text in axes.patterns:
        for seqlen in axes.lengths:
            spelling, seqlen_kv = spelled_pattern(text, seqlen)
            make_pattern(spelling, seqlen, seqlen_kv, cross=seqlen != seqlen_kv)
    if max(axes.cps) > _MOST_RANKS:
        raise ValueError(f"cp ({max(axes.cps)}) must be at most {_MOST_RANKS} in a check")
    if max(axes.lengths) > _MOST_TOKENS:
        raise ValueError(
            f"seqlen ({max(axes.lengths)}) must be at most {_MOST_TOKENS} in a check: the dense "
            "oracle holds matrices of its square"
        )
    return axes


def _known(text: str) -> tuple[str]:
    """The spelling of a strategy that there is, as the user gave it."""
    strategy(text)
    return (text,)


def _configs(args: argparse.Namespace, axes: Axes) -> Iterator[Config]:
    """The cells, in the order in which they are judged."""
    if args.transport is Where.GLOO:  # one team of processes at a time
        parts = [replace(axes, cps=(cp,)) for cp in dict.fromkeys(axes.cps)]
    else:
        parts = [axes]
    if args.full:
        for part in parts:
            yield from whole_product(part)
    else:
        from harness.check.run import dearest_first

        configs = dearest_first(pairwise(axes))
        for part in parts:
            yield from (config for config in configs if config.cp in part.cps)


def _judge(
    args: argparse.Namespace, axes: Axes, done: set[str]
) -> "Iterator[tuple[JudgedCell, JudgedCell]]":
    """Judge the cells that are not done yet."""
    from harness.check.run import check_all, check_group, check_peers

    total = size(axes) if args.full else sum(1 for _ in pairwise(axes))
    with Live("check", total) as live:

        def todo(*, peers: bool) -> Iterator[Config]:
            for config in _configs(args, axes):
                if is_peer(config.strategy) is not peers:
                    continue
                if done.issuperset(_hashes(args, config)):
                    live.skip()
                else:
                    yield config

        jobs = min(args.jobs, total)
        if args.transport is Where.GLOO:
            pairs = check_group(todo(peers=False), jobs=jobs, repeat=args.repeat)
        else:
            pairs = check_all(todo(peers=False), jobs=jobs)
        of_peers = sorted(todo(peers=True), key=lambda config: config.cp)
        for pair in chain(pairs, check_peers(of_peers)):
            yield pair
            live.advance()


def _hashes(args: argparse.Namespace, config: Config) -> tuple[str, ...]:
    """Hashes of a cell's records; peers run in processes whatever the transport of the others."""
    where = Where.GLOO if is_peer(config.strategy) else args.transport
    from harness.check.run import hashes_of

    return hashes_of(config, where)


def _done(file: ResultFile) -> set[str]:
    """Hashes of the cells that need no other try."""
    done: set[str] = set()
    aside: list[Aside] = []
    found = 0
    for record in one_by_one(file.scan(), from_line, aside):
        found += 1
        ended = record.status in (Outcome.PASSED, Outcome.REFUSED)
        (done.add if ended else done.discard)(record.config_hash)
    say(*told_unreadable(aside, file.path, found))
    return done


def _kept(args: argparse.Namespace, axes: Axes, file: ResultFile) -> Iterator[CheckRecord]:
    """The newest record of each cell of this grid."""
    wanted = {digest for config in _configs(args, axes) for digest in _hashes(args, config)}
    newest = {record.config_hash: at for at, record in enumerate(_read(file))}
    for at, record in enumerate(_read(file)):
        if record.config_hash in wanted and newest[record.config_hash] == at:
            yield record


def _read(file: ResultFile) -> Iterator[CheckRecord]:
    """The records of a file; those set aside were named when it was opened."""
    return one_by_one(file.scan(), from_line, [])


class _Tally:
    """Counts and worst errors over any number of records."""

    def __init__(self, records: Iterable[CheckRecord]) -> None:
        self.counts = dict.fromkeys(Outcome, 0)
        self.rows: dict[str, dict[Outcome, int]] = {}
        self.worst: dict[tuple[str, Dtype], float] = {}
        self.refused: dict[str, int] = {}
        self.failed: list[str] = []
        for record in records:
            self._add(record)

    def _add(self, record: CheckRecord) -> None:
        status, name = record.status, record.config.strategy
        self.counts[status] += 1
        row = self.rows.setdefault(name, dict.fromkeys(Outcome, 0))
        row[status] += 1
        for tensor, error in record.max_rel_error.items():
            key = (name, record.config.dtype)
            share = math.inf if error is None else error / record.tolerances[tensor]
            self.worst[key] = max(self.worst.get(key, 0.0), share)
        if status is Outcome.REFUSED:
            self.refused[record.reason] = self.refused.get(record.reason, 0) + 1
        if status is Outcome.FAILED:
            self.failed.append(f"{_name(record.config)}: {record.reason}")


def _report(
    args: argparse.Namespace, records: Callable[[], Iterator[CheckRecord]], begin: float
) -> int:
    """Print the result; return the exit status: 1 if a cell failed, or none could be checked."""
    tally = _Tally(records())
    if args.json:
        # Piece by piece: a whole product does not fit into memory.
        counts = "".join(f'"{status.value}": {n}, ' for status, n in tally.counts.items())
        sys.stdout.write("{" + counts + '"cells": [')
        for number, record in enumerate(records()):
            sys.stdout.write((", " if number else "") + json_text(record.as_json()))
        sys.stdout.write("]}\n")
        return _status(tally)
    console = Output()
    console.print(_table(tally))
    for text in tally.failed:
        console.print(f"failed {text}", highlight=False, markup=False, soft_wrap=True)
    for reason, times in sorted(tally.refused.items()):
        text = f"refused ({times} cells) {reason}"
        console.print(text, highlight=False, markup=False)
    line = ", ".join(f"{n} {status.value}" for status, n in tally.counts.items())
    console.print(f"{line} in {time.monotonic() - begin:.0f} s", highlight=False)
    return _status(tally)


def _status(tally: _Tally) -> int:
    judged = tally.counts[Outcome.PASSED] + tally.counts[Outcome.FAILED]
    if tally.counts[Outcome.REFUSED] and not judged:
        print("check: nothing was checked: every cell was refused", file=sys.stderr)
        return 1
    return 1 if tally.counts[Outcome.FAILED] else 0


def _name(cell: Config) -> str:
    layer = "layer " if cell.scope is Scope.LAYER else ""
    turned = " rotary" if cell.rotary else ""
    return (
        f"{layer}{cell.strategy} {cell.pattern} cp={cell.cp} S={cell.seqlen_q}"
        f"/{cell.seqlen_kv} heads={cell.heads_q}/{cell.heads_kv} "
        f"D={cell.head_dim} B={cell.batch}{turned} {cell.dtype} {cell.direction}"
    )


def _table(tally: _Tally) -> Table:
    dtypes = [name for name in Dtype if any(key[1] == name for key in tally.worst)]
    table = Table(
        title="largest error / tolerance, by strategy",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("strategy", overflow="fold")
    for name in (*Outcome, *dtypes):
        table.add_column(name.value, justify="right", no_wrap=True)
    for text, row in tally.rows.items():
        ratios = [tally.worst.get((text, name)) for name in dtypes]
        cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        table.add_row(text, *(str(n) for n in row.values()), *cells)
    return table
