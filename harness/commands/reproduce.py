"""Published figures of this field beside ours, each with a verdict.

Without a source: all sources, with how many of their figures were reproduced, from the last whole
run. With one: its figures, computed anew.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from harness.base.json_fields import json_text
from harness.base.workers import cores
from harness.commands.speedups import measured_beside, show
from harness.records.cell import Status
from harness.records.store import FILE, ResultFile
from harness.reproduce.claim_runs import pending_claims, run_claims
from harness.reproduce.claims import (
    Claim,
    ClaimVerdict,
    JudgedClaim,
    claims_in,
    published_file,
    published_source,
    source_names,
)
from harness.reproduce.kept_verdicts import claim_fields, counts_of, kept_claim, last_run
from harness.reproduce.kinds import claims_of, judged_claim
from harness.reproduce.speedups import FigureFilter, speedup_tables
from harness.sweep.limits import Limits
from harness.terminal.arguments import (
    Help,
    Verbs,
    count,
    degree,
    example,
    listed,
    path,
    positive_number,
)
from harness.terminal.claim_tables import show_claims, show_small, show_sources
from harness.terminal.progress import Live, Output, say

_SPEEDUPS = "speedups"
"""Of a file: figures whose tables have a form of their own, and flags."""


def register(verbs: Verbs, summary: str | None = None) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "reproduce",
        help=summary,
        description=__doc__,
        epilog=example(
            [
                "reproduce",
                "reproduce upipe --table memory --json",
                "reproduce ultraattn --figure fig7 --cp 8",
                "reproduce ultraattn --figure fig8 --cluster h100-hamming",
                "reproduce --all -o results/claims",
            ]
        ),
        formatter_class=Help,
    )
    parser.add_argument(
        "source",
        nargs="?",
        choices=source_names(),
        metavar="SOURCE",
        help="whose figures to compute (default: list)",
    )
    parser.add_argument(
        "--table",
        "--figure",
        default="",
        help="only tables whose name or place in the source contains this, e.g. memory, fig7",
    )
    parser.add_argument(
        "--kept", action="store_true", help="show the verdicts of the last whole run instead"
    )
    whole = parser.add_argument_group("everything")
    whole.add_argument("--all", action="store_true", help="compute all figures of all sources")
    whole.add_argument("-o", "--output", type=path, help="folder for the records")
    whole.add_argument(
        "--resume", action="store_true", help="go on from the records in the folder of --all"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="confirm what is counted in plans by small runs of real processes here instead",
    )
    group = parser.add_argument_group(
        "ultraattn",
        "speed-ups, predicted twice: with each side's runtime as it was run, and on equal ground",
    )
    group.add_argument(
        "--cp", type=listed(degree), default=(), help="only these context-parallel degrees"
    )
    group.add_argument(
        "--cluster",
        default="",
        help="one calibrated cluster for all figures (default: the cluster of each figure)",
    )
    group.add_argument(
        "--seconds",
        type=positive_number,
        help="planner's search time per tiling, seconds (default: the planner's own)",
    )
    parser.add_argument("--jobs", type=count, help=f"figures to compute at once ({cores()})")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List, or compute and judge; 1 if a figure of a source is not as published."""
    console = Output(markup=False, highlight=False)
    _refuse_idle(args)
    if args.all:
        return _everything(args, console)
    if args.small:
        return _small(args, console)
    if args.source is None:
        return _list(args, console)
    speedups = _SPEEDUPS in published_file(args.source)
    claims = [] if _only_speedups(args) else _chosen(args, list(claims_in(args.source)))
    if args.kept:
        claims = _chosen(args, list(claims_of(args.source)))
        judged = [kept_claim(c) or JudgedClaim(claim=c, ours=None) for c in claims]
        return _print(args, console, judged)
    wanted = speedups and _has_speedups(args)
    if not claims and not wanted:
        names = "; ".join(dict.fromkeys(claim.table for claim in claims_of(args.source)))
        raise ValueError(f"--table ({args.table}) matches no table; choose from {names}")
    status = 0
    if claims:
        with Live("reproduce", len(claims)) as live:
            judged = [_counted(claim, live) for claim in claims]
        status = _print(args, console, judged)
    return max(status, _speedups(args, console)) if wanted else status


def _refuse_idle(args: argparse.Namespace) -> None:
    """Refuse flags that nothing would heed.

    Raises:
        ValueError: There is one.
    """
    own = args.source is not None and _SPEEDUPS in published_file(args.source)
    if (args.cp or args.cluster or args.seconds) and not own:
        named = ", ".join(name for name in source_names() if _SPEEDUPS in published_file(name))
        raise ValueError(f"--cp, --cluster and --seconds only apply to {named}; drop them")
    if args.all and (args.source or args.table or args.kept):
        raise ValueError("--all computes everything; drop the source, --table and --kept")
    if args.small and (args.all or args.table or args.kept):
        raise ValueError("--small runs plans; drop --all, --table and --kept")
    if (args.output and not (args.all or args.small)) or (args.resume and not args.all):
        raise ValueError("-o only applies with --all or --small, and --resume with --all")
    if args.all and not args.output:
        raise ValueError("--all writes records; name their folder with -o")
    if (args.table or args.kept) and not args.source:
        raise ValueError(f"name a source: {', '.join(source_names())}")


def _counted(claim: Claim, live: Live) -> JudgedClaim:
    found = judged_claim(claim)
    live.advance()
    return found


def _only_speedups(args: argparse.Namespace) -> bool:
    return bool(args.cp or args.cluster or args.seconds)


def _chosen(args: argparse.Namespace, claims: Sequence[Claim]) -> list[Claim]:
    text = _plain_name(args.table)
    return [c for c in claims if text in _plain_name(c.table) or text in _plain_name(c.where)]


def _plain_name(text: str) -> str:
    """A name as it is looked for: `Figure 5` as `fig5`."""
    return re.sub(r"\s+", "", re.sub(r"figures?", "fig", text.lower()))


def _has_speedups(args: argparse.Namespace) -> bool:
    text = args.table
    return _only_speedups(args) or any(
        text in f"{table['figure']} {table['what']}" for table in speedup_tables()
    )


# One source ---------------------------------------------------------------------------------


def _print(args: argparse.Namespace, console: Console, judged: Sequence[JudgedClaim]) -> int:
    off = [each for each in judged if each.verdict is ClaimVerdict.NOT_REPRODUCED]
    if args.json:
        sys.stdout.write(json_text([_fields(each) for each in judged], indent=2) + "\n")
    else:
        show_claims(console, published_source(args.source), judged)
        counts = counts_of(judged)
        text = ", ".join(f"{counts[v.name.lower()]} {v.value}" for v in ClaimVerdict)
        console.print(f"{counts['figures']} figures: {text}")
    return 1 if off else 0


def _fields(judged: JudgedClaim) -> dict[str, object]:
    claim = judged.claim
    return {
        "source": claim.source,
        "table": claim.table,
        "what": claim.what,
        "unit": claim.unit,
        "where": claim.where,
        "read": claim.read,
        **claim_fields(judged),
        "tolerance": judged.tolerance,
        "error": judged.error,
        "reason": claim.reason,
        "missing": claim.missing,
        "why": claim.why,
        "seen": claim.seen,
    }


def _speedups(args: argparse.Namespace, console: Console) -> int:
    chosen = FigureFilter(figure=args.table, cp=args.cp, cluster=args.cluster, seconds=args.seconds)
    found = measured_beside(chosen, jobs=args.jobs or cores())
    if args.json:
        fields = [{**asdict(each), "error": each.error, "holds": each.holds} for each in found]
        sys.stdout.write(json_text(fields, indent=2) + "\n")
    else:
        show(console, found)
    return 0 if all(each.holds for each in found) else 1


# All sources --------------------------------------------------------------------------------


def _list(args: argparse.Namespace, console: Console) -> int:
    counts, stale = [], 0
    for name in source_names():
        claims = list(claims_of(name))
        judged = [kept_claim(claim) or JudgedClaim(claim=claim, ours=None) for claim in claims]
        stale += sum(bool(c.kind) and kept_claim(c) is None for c in claims)
        counts.append({"source": name, **counts_of(judged)})
    if args.json:
        sys.stdout.write(json_text(counts, indent=2) + "\n")
    else:
        show_sources(console, counts, last_run(), stale)
    return 0


def _everything(args: argparse.Namespace, console: Console) -> int:
    claims = [claim for name in source_names() for claim in claims_of(name)]
    folder: Path = args.output
    with ResultFile(folder / FILE) as results:
        if results.count and not args.resume:
            raise ValueError(
                f"results folder ({folder}) has {results.count} records; give --resume to go on "
                "from them, or name another"
            )
        todo = pending_claims(claims, results.scan())
        say(f"reproduce: {len(todo)} of {len(claims)} figures are to be computed")
        records = run_claims(todo, jobs=args.jobs or cores())
        with Live("reproduce", len(todo)) as live, closing(records):
            for piece in records:
                results.append(*piece)
                for _ in piece:
                    live.advance()
        found = {str(record["claim"]): record for record in results.scan()}
    failed = [record for record in found.values() if record["status"] != "ok"]
    if args.json:
        sys.stdout.write(json_text(list(found.values()), indent=2) + "\n")
    verdicts = [str(record["verdict"]) for record in found.values()]
    for verdict in ClaimVerdict:
        console.print(f"{verdicts.count(verdict.value)} {verdict.value}")
    for record in failed:
        say(f"{record['claim']}: {record['reason']}")
    return 1 if failed else 0


def _small(args: argparse.Namespace, console: Console) -> int:
    """Run what claims count, on real ranks of few tokens."""
    from harness.measure.cells import measure_cells  # torch, which nothing else here needs
    from harness.measure.small_claims import small_configs

    names = [args.source] if args.source else source_names()
    configs = small_configs(claim for name in names for claim in claims_of(name))
    limits = Limits(warmup=0, iterations=1)
    with Live("reproduce", len(configs)) as live, closing(measure_cells(configs, limits)) as cells:
        records = []
        for record in cells:
            records.append(record)
            live.advance()
    if args.output:
        with ResultFile(args.output / FILE) as results:
            results.append(*(record.as_json() for record in records))
    if args.json:
        sys.stdout.write(json_text([record.as_json() for record in records], indent=2) + "\n")
    else:
        show_small(console, records)
    return 0 if all(record.status is Status.OK for record in records) else 1
