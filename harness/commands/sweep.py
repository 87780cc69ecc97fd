"""`sweep`: compare strategies over degrees, lengths, patterns and clusters."""

import argparse
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.base.files import write_whole
from harness.base.json_fields import json_text
from harness.base.workers import cores
from harness.cluster.machine import Runtime
from harness.cluster.presets import CLUSTERS, cluster
from harness.plan.problem import Direction
from harness.plan.tasks import Scope
from harness.ranks.launch import Launch
from harness.recommend.automatic import settled
from harness.records.cell import CellRecord, Status
from harness.records.config import Config, Where
from harness.records.legible import ResultFolder
from harness.report.reading import latest, pending, read_cell, records_in_order
from harness.report.summary import write_summaries
from harness.report.tables import print_sweep
from harness.sweep import suite
from harness.sweep.limits import Limits
from harness.sweep.simulate_cells import simulate_cells
from harness.sweep.suite import Mode, Part
from harness.terminal.arguments import (
    Help,
    Verbs,
    add_heads,
    choice_of,
    count,
    degree,
    dtype,
    example,
    flag_of,
    heads,
    heads_axis,
    length,
    listed,
    model_named,
    path,
    positive_number,
)
from harness.terminal.progress import Live, Output, say
from harness.training.models import Model
from harness.training.named_models import MODELS
from patterns import make_pattern
from patterns.lengths import over_seeds

_AXES = {
    "strategies": str,
    "patterns": str,
    "cp": degree,
    "seqlen": length,
    "heads": heads,
    "head_dim": count,
    "batch": count,
    "dtype": dtype,
    "direction": choice_of(Direction),
    "cluster": str,
    "runtime": choice_of(Runtime),
    "scope": choice_of(Scope),
    "hidden": count,
    "rotary": positive_number,
}
_GIB = 2**30
PAGE = "page.html"


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "sweep",
        help=summary,
        description="Run the product of strategies x patterns x cp x seqlen x direction x heads x "
        "dtype x cluster. Without flags: the suite `quick`, which simulates an 8 x 8 H100 cluster "
        "and measures a small part in real processes here, with the numerical error of each.",
        epilog=example(
            [
                "sweep",
                "sweep --mode measure --strategies ring,zigzag,usp:2x2 --cp 4 --seqlen 4k",
                "sweep --mode simulate --patterns causal --cp 64 --seqlen 128k,1m -o results/long",
                "sweep --mode simulate --cluster h800 --runtime eager-torch --cp 8",
                "sweep --scope layer --strategies upipe,ulysses --patterns causal --cp 8",
                "sweep --mode simulate --model llama3-8b --cp 8 --seqlen 1m --pattern causal",
                "sweep -o results/long --resume --suite mine.toml",
            ]
        ),
        formatter_class=Help,
    )
    parser.add_argument(
        "--suite", default="quick", help="a suite's name (quick, layer) or a TOML file"
    )
    parser.add_argument(
        "--mode",
        **flag_of(Mode),
        help="run only the simulated or only the measured parts of the suite",
    )
    axes = parser.add_argument_group("axes (comma-separated; each replaces the suite's)")
    axes.add_argument(
        "--strategies",
        type=listed(str),
        help="names with options, e.g. ring,usp:4x2; '*': all, also with the options and meshes "
        "worth comparing; 'auto': what is recommended; 'direct': all without a search, with their "
        "defaults; 'peer:*': other projects' implementations",
    )
    axes.add_argument(
        "--patterns", "--pattern", type=listed(str), help="masks, e.g. causal,star (see `list`)"
    )
    axes.add_argument(
        "--seeds",
        type=count,
        default=5,
        help="draws of each pattern that has a preset= and no seed= (%(default)s); tables show the "
        "spread",
    )
    axes.add_argument("--cp", type=listed(degree), help="context-parallel degrees, e.g. 2,4,8")
    axes.add_argument("--seqlen", type=listed(length), help="tokens over all ranks, e.g. 4k,1m")
    add_heads(axes, listed(heads))
    axes.add_argument("--head-dim", type=listed(count), help="widths of a head, e.g. 128")
    axes.add_argument("--batch", type=listed(count), help="sequences per batch, e.g. 1,2")
    axes.add_argument("--dtype", type=listed(dtype), help="precisions, e.g. bfloat16,float32")
    axes.add_argument(
        "--direction",
        type=listed(choice_of(Direction)),
        help="forward, backward or both: forward,backward",
    )
    known = f"clusters to simulate: {', '.join(CLUSTERS)}, or files that `calibrate` wrote"
    axes.add_argument("--cluster", type=listed(str), help=known)
    axes.add_argument(
        "--runtime",
        type=listed(choice_of(Runtime)),
        help="how simulated work is launched: graph, eager-torch or both",
    )
    axes.add_argument(
        "--scope",
        type=listed(choice_of(Scope)),
        help="attention alone, or the whole layer with its projections: attention,layer",
    )
    axes.add_argument("--hidden", type=listed(count), help="model widths of layers, e.g. 4096")
    axes.add_argument(
        "--rotary", type=listed(positive_number), help="rotary bases of layers, e.g. 500000"
    )
    shapes = f"take the shapes of a model's layers: {', '.join(MODELS)}, or key=value pairs"
    axes.add_argument("--model", type=model_named, help=shapes)
    runs = parser.add_argument_group("measured cells (defaults in parentheses)")
    runs.add_argument(
        "--iterations",
        type=count,
        default=Limits().iterations,
        help="timed iterations per cell (%(default)s)",
    )
    runs.add_argument(
        "--warmup",
        type=count,
        default=Limits().warmup,
        help="untimed warm-up iterations per cell (%(default)s)",
    )
    runs.add_argument("--threads", type=count, default=1, help="CPU threads per rank (%(default)s)")
    runs.add_argument(
        "--timeout",
        type=positive_number,
        default=Limits().timeout_s,
        help="time limit per cell, also of simulated ones, seconds (%(default)g)",
    )
    runs.add_argument(
        "--memory",
        type=positive_number,
        default=Limits().memory_bytes / _GIB,
        help="memory limit per rank, GiB (%(default)g)",
    )
    runs.add_argument(
        "--transport",
        choices=(Where.NCCL.value, Where.GLOO.value),
        help="of ranks that a launcher started (default: nccl where each has a CUDA card)",
    )
    out = parser.add_argument_group("results")
    out.add_argument(
        "-o",
        "--output",
        type=path,
        help="folder for the records and tables (default: results/<time>)",
    )
    out.add_argument(
        "--resume",
        action="store_true",
        help="continue the sweep in the folder; repeat the flags that started it",
    )
    out.add_argument("--dry-run", action="store_true", help="list the cells without running them")
    out.add_argument("--jobs", type=count, default=cores(), help="simulated cells to run at once")
    out.add_argument("--json", action="store_true", help="print the records as JSON on stdout")
    parser.set_defaults(
        run=run,
        launch=None,
        measures=_measures,
        needs=lambda args: ("harness.measure.cells",) if _measures(args) else (),
    )


def _measures(args: argparse.Namespace) -> bool:
    """Whether ranks of a launch are needed."""
    return args.mode is not Mode.SIMULATE and not args.dry_run


def run(args: argparse.Namespace) -> int:
    """Run a sweep."""
    if args.transport and args.launch is None:
        raise ValueError(
            f"--transport ({args.transport}) only applies under a launcher such as torchrun; ranks "
            "that a sweep starts itself use gloo"
        )
    cells = [_placed(cell, args.launch) for cell in _cells(args)]
    if args.dry_run:
        return _dry_run(args, cells)
    asked = {cell.hash for cell in cells}
    folder = args.output or Path("results") / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    with ResultFolder(folder, read_cell) as results:
        say(*results.aside)
        if results.records and not args.resume:
            raise ValueError(
                f"results folder ({folder}) has {len(results.records)} records; "
                "give --resume to go on from them, or name another"
            )
        _say_if_other(asked, results.records, folder)
        try:
            _run(args, pending(cells, results.records), results)
        except BaseException:  # finished cells are written even if Ctrl-C ends it here
            with suppress(OSError):  # a full disk: what ended it says more
                _summarise(results, cells)
            raise
        records = _summarise(results, cells)
        results.confirm()
    from harness.page.build import build_page  # it loads what draws

    write_whole(folder / PAGE, build_page(records).html)
    if args.json:
        print(json_text([entry.as_json() for entry in records]))
    else:
        print_sweep(Output(), records)
        say(f"records, summary.csv and these tables (summary.md): {folder}")
    say(f"the page, with charts and every cell: {folder / PAGE}")
    found = {entry.status for entry in records}
    if records and Status.OK not in found:
        text = f"sweep: none of the {len(records)} cells ran; the reasons are above"
        print(text, file=sys.stderr)
        return 1
    return 1 if found & {Status.ERROR, Status.TIMEOUT} else 0


def _summarise(results: ResultFolder, cells: Sequence[Config]) -> list[CellRecord]:
    """Write the tables of a folder; returns the records of the cells that were asked for."""
    asked = {cell.hash for cell in cells}
    records = records_in_order(cells, results.records)
    others = [each for each in latest(results.records) if each.config_hash not in asked]
    write_summaries(results.folder, [*records, *others])
    return records


def _say_if_other(asked: set[str], records: Sequence[CellRecord], folder: Path) -> None:
    """Warn if a folder has none of the cells: the flags of its own sweep may be missing."""
    if records and not any(entry.config_hash in asked for entry in records):
        print(
            f"note: none of the {len(records)} records in {folder} belongs to this sweep's "
            f"{len(asked)} cells; to continue the sweep in that folder, repeat its flags",
            file=sys.stderr,
        )


def _cells(args: argparse.Namespace) -> list[Config]:
    parts: Sequence[Part] = suite.load_suite(args.suite, _AXES)
    if args.mode in (Mode.SIMULATE, Mode.MEASURE):
        parts = [part for part in parts if part.mode is args.mode] or [Part(mode=args.mode)]
    args.heads = heads_axis(args)
    given = {name: getattr(args, name) for name in _AXES if getattr(args, name)}
    drawn = [each for text in args.patterns or () for each in over_seeds(text, args.seeds)]
    given |= {"patterns": drawn} if drawn else {}
    if args.model is not None:
        given = {**_of_model(args.model), **given}
    cells = [cell for part in parts for cell in suite.override(part, given).cells()]
    _refuse_idle(args, cells)
    for pattern, tokens in {(cell.pattern, cell.seqlen_q) for cell in cells}:
        make_pattern(pattern, tokens)  # an unknown pattern is a wrong call, not an illegal cell
    for name in {cell.cluster for cell in cells if cell.cluster is not None}:
        cluster(name)  # so is an unknown cluster
    return list(dict.fromkeys(map(settled, cells)))


def _refuse_idle(args: argparse.Namespace, cells: Sequence[Config]) -> None:
    """Refuse flags that no cell would heed.

    Raises:
        ValueError: There is one.
    """
    layers = any(cell.scope is Scope.LAYER for cell in cells)
    if (args.hidden or args.rotary) and not layers:
        raise ValueError("--hidden and --rotary require --scope layer")
    simulated = any(cell.transport is Where.SIMULATED for cell in cells)
    if (args.cluster or args.runtime) and not simulated:
        raise ValueError(
            "--cluster and --runtime only apply to simulated cells, and these are all measured; "
            "add --mode simulate, or drop them"
        )


def _of_model(shape: Model) -> dict[str, tuple[object, ...]]:
    """The axes that a model decides; its layers, with their projections.

    Raises:
        UnsupportedError: Its layers have other parts than ours.
    """
    shape.require_layers()
    return {
        "heads": ((shape.heads_q, shape.heads_kv),),
        "head_dim": (shape.head_dim,),
        "hidden": (shape.hidden,),
        "rotary": (shape.rotary,),
        "scope": (Scope.LAYER,),
    }


def _placed(cell: Config, ranks: Launch | None) -> Config:
    """Put a measured cell on GPUs where the launched ranks have them."""
    if ranks is None or ranks.backend != "nccl" or cell.transport is not Where.GLOO:
        return cell
    return replace(cell, transport=Where.NCCL)


def _dry_run(args: argparse.Namespace, cells: Sequence[Config]) -> int:
    if args.json:
        print(json_text([{"config_hash": cell.hash, **asdict(cell)} for cell in cells]))
        return 0
    for cell in cells:
        where = cell.cluster or cell.transport.value
        print(
            f"{cell.hash} {where} {cell.strategy} {cell.pattern} cp={cell.cp} S={cell.seqlen_q} "
            f"heads={cell.heads_q}/{cell.heads_kv} {cell.dtype.value} {cell.direction.value}"
        )
    print(f"{len(cells)} cells", file=sys.stderr)
    return 0


def _measured(
    cells: Sequence[Config], limits: Limits, ranks: Launch | None
) -> Generator[CellRecord, None, None]:
    """Measure cells, in the processes of a launch where there is one."""
    from harness.measure.cells import Crews, measure_cells  # torch takes seconds

    crews = None
    if ranks is not None:
        crews = Crews(lambda cp: ranks.crew(cp, limits.threads), ranks.world)
    return measure_cells(cells, limits, crews)


def _run(args: argparse.Namespace, cells: Sequence[Config], results: ResultFolder) -> None:
    limits = Limits(
        timeout_s=args.timeout,
        memory_bytes=round(args.memory * _GIB),
        threads=args.threads,
        warmup=args.warmup,
        iterations=args.iterations,
    )
    simulate = [cell for cell in cells if cell.transport is Where.SIMULATED]
    measure = [cell for cell in cells if cell.transport is not Where.SIMULATED]
    # Measured first: nothing else may run beside them.
    parts: list[tuple[str, Sequence[Config], Generator[CellRecord, None, None]]] = [
        ("simulate", simulate, simulate_cells(simulate, jobs=args.jobs, timeout_s=args.timeout)),
    ]
    if measure:
        parts.insert(0, ("measure", measure, _measured(measure, limits, args.launch)))
    for name, own, records in parts:
        with Live(name, len(own)) as live, closing(records):
            for entry in records:
                results.append(entry)
                live.advance()
