"""How `reproduce` shows published speed-ups beside ours."""

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean, geometric_mean

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.report.format import short
from harness.reproduce.speedups import FigureFilter, Speedup, speedups, timed, timed_configurations
from harness.terminal.progress import Live, wrapped

_SHORT = {"forward": "fwd", "backward": "bwd"}
_RUNTIME = 1.5
"""From here on it is said that the baseline's runtime makes much of a speed-up."""
_LEGEND = (
    "published: method over baseline, as printed (measured by its authors). All else is simulated. "
    "ours: the published kind of plan, merging nothing, over the baseline as it was run: eager "
    "torch, everything sent; off: ours over published, less 1; ok: not further off than the mean "
    "errors of both predictions together. ultraattn: our planner's plan, all merged, over the same "
    "baseline; fair: the same with the baseline in a captured graph as well.",
    "why: r: the authors' script draws this value at random near 1 where the baseline was faster; "
    "the number behind it is the quotient of their logged times, and off is against that; x: the "
    "baseline was not measured but taken as 16/15 of the causal ring; e: the baseline's eager "
    f"runtime alone makes {_RUNTIME} of the speed-up or more.",
    "Also known: the published ring on H100 ran code that is not public; published times are the "
    "best of several measured variants of a plan; between nodes their plans run a node's part as "
    "one block. Dense values come from the authors' A800 logs, though the paper says H100: they "
    "are predicted on a800 unless --cluster names another.",
)


def measured_beside(chosen: FigureFilter, *, jobs: int) -> list[Speedup]:
    """Predict the chosen figures, with progress on stderr."""
    todo = timed_configurations(chosen)
    text = (
        f"reproduce: plans {len(todo)} problems with two planners, about 1 to 40 s each with the "
        "default budget; kept for the next time"
    )
    print(wrapped(text), file=sys.stderr)
    known = {}
    with Live("reproduce", len(todo)) as live:
        for cell, found in timed(todo, chosen, jobs=jobs):
            known[cell] = found
            live.advance()
    return list(speedups(chosen, known))


def show(console: Console, found: Sequence[Speedup]) -> None:
    """Print a table per figure, the means that the paper takes, and what the columns are."""
    for (figure, what, machine), group in groupby(found, lambda s: (s.figure, s.what, s.cluster)):
        console.print(f"{figure}: {what}; simulated on {machine}")
        console.print(_table(list(group)))
        console.print()
    console.print("means over lengths, degrees and directions: arithmetic (geometric)")
    console.print(_means(found))
    console.print()
    for line in _LEGEND:
        console.print(line)
    console.print("Source: UltraAttn (SC'25), figures 6 to 9; logs: the authors' repository.")
    off = [each for each in found if not each.holds]
    console.print(f"{len(found) - len(off)} of {len(found)} speed-ups are as published")


def _plain() -> Table:
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)


def _table(found: Sequence[Speedup]) -> Table:
    table = _plain()
    for name in ("pattern", ""):
        table.add_column(name, no_wrap=True)
    for name in ("heads", "S", "cp", "published", "ours", "off", "", "ultraattn", "fair"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", no_wrap=True)
    before = None
    for each in found:
        group = (each.pattern, each.direction, each.heads, each.seqlen)
        words = (
            each.pattern,
            _SHORT.get(each.direction, each.direction),
            str(each.heads),
            short(each.seqlen),
        )
        table.add_row(
            *(words if group != before else ("", "", "", "")),
            str(each.cp),
            f"{each.published:.2f}",
            f"{each.ours:.2f}",
            f"{each.error:+.0%}",
            "ok" if each.holds else "OFF",
            f"{each.ultraattn:.2f}",
            f"{each.fair:.2f}",
            _why(each),
        )
        before = group
    return table


def _why(each: Speedup) -> str:
    marks = [
        "" if each.logged is None else f"r{each.logged:.2f}",
        "x" if each.extrapolated else "",
        "e" if each.runtime >= _RUNTIME else "",
    ]
    return "".join(marks)


def _means(found: Sequence[Speedup]) -> Table:
    table = _plain()
    table.add_column("figure", no_wrap=True)
    table.add_column("pattern", no_wrap=True)
    table.add_column("heads", justify="right")
    table.add_column("n", justify="right")
    for name in ("published", "ours", "ultraattn", "fair"):
        table.add_column(name, justify="right", no_wrap=True)
    groups: dict[tuple[str, str, int], list[Speedup]] = {}
    for each in found:
        groups.setdefault((each.figure, each.pattern, each.heads), []).append(each)
    for (figure, pattern, heads), own in groups.items():
        columns = (
            [each.published for each in own],
            [each.ours for each in own],
            [each.ultraattn for each in own],
            [each.fair for each in own],
        )
        table.add_row(figure, pattern, str(heads), str(len(own)), *map(_both, columns))
    return table


def _both(values: Iterable[float]) -> str:
    values = list(values)
    return f"{fmean(values):.2f} ({geometric_mean(values):.2f})"
