"""Keep the verdicts of a whole run: the file that `reproduce` lists from, and a page of them all.

    .venv/bin/python -m harness reproduce --all -o results/claims
    .venv/bin/python -m harness reproduce --small -o results/small
    .venv/bin/python scripts/keep_claims.py results/claims --small results/small

Writes `harness/reproduce/published/verdicts.jsonl` and `results/claims.md`. Of a claim with several
records the last counts. Exit status 1 if a claim has none, or one that failed.
"""

import argparse
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.base.json_fields import JsonObject
from harness.measure.small_claims import small_runs_of
from harness.records.cell import CellRecord, Status, from_json
from harness.records.config import Config
from harness.records.store import read_records
from harness.reproduce.claims import (
    ClaimVerdict,
    JudgedClaim,
    published_source,
    source_names,
)
from harness.reproduce.kept_verdicts import counts_of, kept_text, recorded_claim
from harness.reproduce.kinds import KINDS, claims_of

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "harness" / "reproduce" / "published" / "verdicts.jsonl"
PAGE = ROOT / "results" / "claims.md"


def main() -> int:
    """Read records, write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders of `reproduce --all`")
    parser.add_argument("--small", type=Path, help="folder of `reproduce --small`")
    args = parser.parse_args()
    small = [from_json(record) for record in read_records(args.small)] if args.small else []
    records = [record for folder in args.folders for record in read_records(folder)]
    claims = [claim for name in source_names() for claim in claims_of(name)]
    asked = {(claim.key, claim.asked) for claim in claims}
    by_key = {
        str(record["claim"]): record
        for record in records
        if record["status"] == "ok" and (record["claim"], record["asked"]) in asked
    }
    own = [by_key[claim.key] for claim in claims if claim.key in by_key]
    date = max(str(record["recorded_at"]) for record in own)[:10]
    commits = dict.fromkeys(_commit(record) for record in own)
    KEPT.write_text(kept_text(own, date, ", ".join(commits)), encoding="utf-8")
    judged = [recorded_claim(claim, by_key.get(claim.key)) for claim in claims]
    PAGE.write_text(page(judged, date, own, small), encoding="utf-8")
    lacking = [claim.key for claim in claims if claim.key not in by_key]
    for key in lacking:
        print(f"no record: {key}", file=sys.stderr)
    return 1 if lacking else 0


def _commit(record: JsonObject) -> str:
    about: Any = record["environment"]
    return f"{about['commit'] or 'unknown'}"[:7] + ("+" if about["dirty"] else "")


def page(
    judged: Sequence[JudgedClaim],
    date: str,
    records: Sequence[JsonObject],
    small: Sequence[CellRecord],
) -> str:
    """Return the page: counts by source, then every figure."""
    seconds = sum(float(str(record["computed_in_s"])) for record in records)
    lines = [
        "# Published figures beside ours",
        "",
        f"{date}, printed by `scripts/keep_claims.py` from the records of `reproduce --all`. "
        f"{len(records)} figures took {seconds / 60:.0f} min, one process after the other, on a "
        "two-core machine that had much other work.",
        "",
        "| verdict | meaning |",
        "|---|---|",
        "| reproduced | ours is within the tolerance, and an advantage is there on equal ground |",
        "| not reproduced | it is not; ours stands beside it, and why where that is known |",
        "| baseline only | the advantage is there over the authors' own baseline as they ran it, "
        "and not over the fastest other strategy on equal ground |",
        "| not checkable | what is missing is said |",
        "",
        "| source | figures | reproduced | not reproduced | baseline only | not checkable |",
        "|---|---|---|---|---|---|",
    ]
    names = list(dict.fromkeys(each.claim.source for each in judged))
    by_source = {name: [each for each in judged if each.claim.source == name] for name in names}
    lines += [_count_row(name, own) for name, own in by_source.items()]
    lines.append(_count_row("all", judged))
    confirmed = {record.config for record in small if record.status is Status.OK}
    lines += _small_section(small)
    for name in names:
        source = published_source(name)
        lines += ["", f"## {name}", "", source.title + "."]
        if source.handicap:
            lines += ["", f"How its baselines were run: {source.handicap}"]
        own = by_source[name]
        for table in dict.fromkeys(each.claim.table for each in own):
            rows = [each for each in own if each.claim.table == table]
            lines += ["", *_table(table, rows, confirmed)]
    return "\n".join(lines) + "\n"


def _count_row(name: str, judged: Sequence[JudgedClaim]) -> str:
    counts = counts_of(judged)
    cells = [counts["figures"], *(counts[verdict.name.lower()] for verdict in ClaimVerdict)]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def _small_section(small: Sequence[CellRecord]) -> list[str]:
    if not small:
        return []
    lines = [
        "",
        "## Measured in small",
        "",
        "What is counted in plans was run by real processes over gloo on a two-core machine, in "
        "float64: the bytes that left each rank are those that the plan counts, and every result "
        "is the oracle's within its tolerance.",
        "",
        "| strategy | pattern | direction | ranks | bytes sent | imbalance | worst error | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in small:
        config = record.config
        errors = [error for error in (record.max_rel_error or {}).values() if error is not None]
        cells = (
            *(config.strategy, config.pattern, config.direction.value, str(config.cp)),
            str(record.bytes_sent_per_rank),
            f"{record.imbalance or 0:.4f}",
            f"{max(errors):.1e}" if errors else "",
            record.status.value,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table(name: str, rows: Sequence[JudgedClaim], confirmed: Collection[Config]) -> Iterable[str]:
    claim = rows[0].claim
    known = f"; ours is {KINDS[claim.kind].provenance.value}" if claim.kind else ""
    if any(run in confirmed for row in rows for run in small_runs_of(row.claim)):
        known += ", and measured in small"
    yield f"**{name}.** {claim.where}; {claim.read}{known}."
    if claim.reason and not claim.missing:
        yield f"Ours may be off because: {claim.reason}."
    if claim.seen:
        yield f"Not independent: {claim.seen}."
    yield ""
    yield "| figure | published | fair | ours | off | may be | verdict |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield _row(row)


def _row(row: JudgedClaim) -> str:
    ours, claim = row.ours, row.claim
    fair = "" if ours is None or ours.fair is None else f"{_said(ours.fair)} ({ours.rival})"
    value = "" if ours is None else _said(ours.value)
    error = (
        "" if row.error is None else f"{row.error:+.3g}" if claim.absolute else f"{row.error:+.1%}"
    )
    allowed = row.tolerance
    may_be = "" if allowed is None or claim.missing else f"{allowed:g}"
    if may_be and not claim.absolute:
        may_be = f"{allowed:.1%}"
    published = "" if claim.published is None else _said(claim.published)
    waiting = claim.published is None and not claim.missing
    verdict = "predicted" if waiting else row.verdict.value
    if claim.missing:
        verdict += f": {claim.missing}"
    elif claim.why and row.verdict is not ClaimVerdict.REPRODUCED:
        verdict += f": {claim.why}"
    unit = f" {claim.unit}" if claim.unit else ""
    cells = (claim.what, published + unit, fair, value, error, may_be, verdict)
    return f"| {' | '.join(cells)} |"


def _said(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
