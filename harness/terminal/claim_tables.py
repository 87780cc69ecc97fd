"""How `reproduce` shows claims: all sources with their counts, and the tables of one."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.records.cell import CellRecord
from harness.reproduce.claims import ClaimVerdict, JudgedClaim, PublishedSource
from harness.reproduce.kept_verdicts import LastRun
from harness.terminal.progress import wrapped

_LARGE = 100
"""From here on a figure is shown with fewer digits."""


def _table_without_edges() -> Table:
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def show_sources(
    console: Console, counts: Sequence[Mapping[str, object]], run: LastRun, stale: int
) -> None:
    """Print every source with its counts, and what the verdicts are from."""
    table = _table_without_edges()
    table.add_column("source", no_wrap=True)
    names = ("figures", *(verdict.name.lower() for verdict in ClaimVerdict))
    for name in names:
        table.add_column(name.replace("_", "\n"), justify="right")
    for row in counts:
        table.add_row(str(row["source"]), *(str(row[name] or "") for name in names))
    sums = [sum(int(str(row[name])) for row in counts) for name in names]
    table.add_section()
    table.add_row(f"all {len(counts)}", *map(str, sums))
    console.print(table)
    text = (
        "reproduced: ours is within the tolerance of the published figure, and where it compares "
        "with a baseline, the advantage is there on equal ground too. baseline only: it is there "
        "against the authors' own baseline as they ran it, and not against the fastest other "
        "strategy on equal ground. not checkable: the source's table says what is missing.\n"
        f"Verdicts are those of the whole run of {run.date}, at commit {run.commit}; `reproduce "
        "--all -o FOLDER` repeats it, `reproduce SOURCE` computes one source."
    )
    if stale:
        text += f" {stale} figures are new or were changed since, and count as not checkable."
    console.print(wrapped(text))


def show_claims(console: Console, source: PublishedSource, judged: Sequence[JudgedClaim]) -> None:
    """Print the tables of a source, with a sentence for each figure that needs one."""
    console.print(wrapped(source.title))
    if source.handicap:
        console.print(wrapped(f"How its baselines were run: {source.handicap}"))
    for name, group in groupby(judged, key=lambda each: each.claim.table):
        console.print()
        _show_table(console, name, list(group))
    console.print()


def show_small(console: Console, records: Sequence[CellRecord]) -> None:
    """Print what small runs of real processes confirmed."""
    table = _table_without_edges()
    for name in ("strategy", "pattern", "direction"):
        table.add_column(name)
    for name in ("cp", "bytes sent", "imbalance", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for record in records:
        config, errors = record.config, record.max_rel_error or {}
        known = [error for error in errors.values() if error is not None]
        table.add_row(
            config.strategy,
            config.pattern,
            config.direction.value,
            str(config.cp),
            str(record.bytes_sent_per_rank or ""),
            f"{record.imbalance:.4f}" if record.imbalance else "",
            f"{max(known):.1e}" if known else "",
            record.status.value,
        )
    console.print(table)
    for record in records:
        if record.reason:
            console.print(wrapped(f"{record.config.strategy}: {record.reason}"))
    console.print(
        wrapped(
            "Measured in small: real processes over gloo, few tokens, float64. ok: the bytes that "
            "left each rank are those that the plan counts, and every result is the oracle's "
            "within its tolerance."
        )
    )


def _show_table(console: Console, name: str, rows: Sequence[JudgedClaim]) -> None:
    claim = rows[0].claim
    units = {row.claim.unit for row in rows}
    unit = claim.unit if len(units) == 1 else ""
    console.print(wrapped(f"{name}{f' ({unit})' if unit else ''}"))
    fair = any(row.ours is not None and row.ours.fair is not None for row in rows)
    table = _table_without_edges()
    table.add_column("")
    names = ["published", *(["fair", "against"] if fair else []), "ours", "off", "may be"]
    for column in names:
        table.add_column(column, justify="right", no_wrap=column != "against")
    table.add_column("", no_wrap=True)
    for row in rows:
        cells = [_number(row.claim.published)]
        if fair:
            cells += [_number(row.ours.fair), row.ours.rival] if row.ours else ["", ""]
        cells += [_number(row.ours.value if row.ours else None), _off(row), _may_be(row)]
        table.add_row(row.claim.what, *cells, _verdict_words(row))
    console.print(table)
    for sentence in _sentences(rows):
        console.print(wrapped(sentence))


def _sentences(rows: Sequence[JudgedClaim]) -> list[str]:
    """What a table cannot say: where it is from, and why a figure stands as it does."""
    claim = rows[0].claim
    found = [f"Source: {claim.where}; {claim.read}."]
    if claim.missing and all(row.claim.missing == claim.missing for row in rows):
        found.append(f"Missing: {claim.missing}.")
    else:
        found += [f"{r.claim.what}: missing: {r.claim.missing}." for r in rows if r.claim.missing]
    if claim.reason and not claim.missing:
        found.append(f"Ours may be off because: {claim.reason}.")
    if claim.seen:
        found.append(f"Not independent: {claim.seen}.")
    explained = [row for row in rows if _explained(row)]
    if len(explained) > 1 and len({row.claim.why for row in explained}) == 1:
        found.append(f"Where ours differs: {explained[0].claim.why}.")
    else:
        found += [f"{row.claim.what}: {row.claim.why}." for row in explained]
    found += [f"{row.claim.what}: {row.ours.note}." for row in rows if row.ours and row.ours.note]
    return found


def _explained(row: JudgedClaim) -> bool:
    return bool(row.claim.why) and row.verdict is not ClaimVerdict.REPRODUCED


def _verdict_words(row: JudgedClaim) -> str:
    if row.claim.published is None and not row.claim.missing:
        return "predicted"
    return row.verdict.value


def _off(row: JudgedClaim) -> str:
    if row.error is None:
        return ""
    return f"{row.error:+.3g}" if row.claim.absolute else f"{row.error:+.1%}"


def _may_be(row: JudgedClaim) -> str:
    if row.tolerance is None or row.claim.missing:
        return ""
    if row.claim.absolute:
        return f"{row.tolerance:.3g}"
    return f"{row.tolerance:.2g}" if 0 < row.tolerance < 1e-3 else f"{row.tolerance:.1%}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= _LARGE else f"{value:.3g}" if value < 1 else f"{value:.2f}"
