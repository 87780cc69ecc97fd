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

_RUNTIME = 1.5
"""From here on it is said that the baseline's runtime makes much of a speed-up."""
_LEGEND = (
    "published: method over baseline, as printed (measured by its authors). All else is simulated. "
    "fair: our planner's plan over the same baseline, both in a captured graph; best: over the "
    "fastest other strategy, which is named, likewise. as run: the published kind of plan, merging "
    "nothing, over the baseline as it was run, in eager torch with everything sent; off: as run "
    "over published, less 1; may be: the mean errors of both predictions together. reproduced: as "
    "run is not further off, and best is not below published by more.",
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
    kinds = groupby(found, lambda s: (s.figure, s.what, s.cluster, s.pattern, s.direction, s.heads))
    for (figure, what, machine, pattern, direction, heads), group in kinds:
        rows = list(group)
        words = f"{heads} head{'s' if heads > 1 else ''}"
        title = f"{figure}: {what}; {pattern}, {direction}, {words}; simulated on {machine}"
        console.print(wrapped(title))
        console.print(_table(rows))
        for sentence in _sentences(rows):
            console.print(wrapped(sentence))
        console.print()
    console.print("means over lengths, degrees and directions: arithmetic (geometric)")
    console.print(_means(found))
    console.print()
    for line in _LEGEND:
        console.print(wrapped(line))
    console.print("Source: UltraAttn (SC'25), figures 6 to 9; logs: the authors' repository.")
    off = [each for each in found if not each.holds]
    console.print(f"{len(found) - len(off)} of {len(found)} speed-ups are as published")


def _plain() -> Table:
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _table(found: Sequence[Speedup]) -> Table:
    table = _plain()
    for name in ("S", "cp", "published", "fair", "best"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("against", no_wrap=True)
    for name in ("as run", "off", "may be"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in found:
        table.add_row(
            short(each.seqlen),
            str(each.cp),
            f"{each.published:.2f}",
            f"{each.fair:.2f}",
            f"{each.best:.2f}",
            each.rival,
            f"{each.ours:.2f}",
            f"{each.error:+.0%}",
            f"{each.tolerance:.0%}",
            each.verdict.value,
        )
    return table


def _sentences(found: Sequence[Speedup]) -> Iterable[str]:
    """What is known of single figures."""
    for each in found:
        if each.logged is not None:
            yield (
                f"S={short(each.seqlen)} cp={each.cp}: the authors' script draws this value at "
                "random near 1, where the baseline was faster; the quotient of their logged times "
                f"is {each.logged:.2f}, and off is against that."
            )
    guessed = [each for each in found if each.extrapolated]
    if guessed:
        names = ", ".join(dict.fromkeys(f"cp={each.cp}" for each in guessed))
        yield (
            f"{names}: the baseline was not measured, but taken as 16/15 of the causal ring's time."
        )
    eager = [each for each in found if each.runtime >= _RUNTIME]
    if eager:
        names = "; ".join(f"S={short(each.seqlen)} cp={each.cp}" for each in eager)
        yield (
            f"{names}: the baseline's eager runtime alone makes {_RUNTIME} of the speed-up or more."
        )


def _means(found: Sequence[Speedup]) -> Table:
    table = _plain()
    table.add_column("figure", no_wrap=True)
    table.add_column("pattern", no_wrap=True)
    table.add_column("heads", justify="right")
    table.add_column("n", justify="right")
    for name in ("published", "fair", "best", "as run"):
        table.add_column(name, justify="right", no_wrap=True)
    groups: dict[tuple[str, str, int], list[Speedup]] = {}
    for each in found:
        groups.setdefault((each.figure, each.pattern, each.heads), []).append(each)
    for (figure, pattern, heads), own in groups.items():
        columns = (
            [each.published for each in own],
            [each.fair for each in own],
            [each.best for each in own],
            [each.ours for each in own],
        )
        table.add_row(figure, pattern, str(heads), str(len(own)), *map(_both, columns))
    return table


def _both(values: Iterable[float]) -> str:
    values = list(values)
    return f"{fmean(values):.2f} ({geometric_mean(values):.2f})"
