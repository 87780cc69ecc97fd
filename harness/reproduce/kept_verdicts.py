"""Verdicts of the last whole run, kept beside the figures: what is listed without computing anew.

`verdicts.jsonl` has a line about the run, then one for each claim. A line counts only while its
claim is as it was: the same figure, tolerance and setting.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness.base.json_fields import JsonObject, json_text
from harness.reproduce.claims import FOLDER_OF_CLAIMS, Claim, ClaimVerdict, JudgedClaim, Ours

_FILE = "verdicts.jsonl"
_KEPT = ("claim", "asked", "ours", "fair", "rival", "expected_error", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRun:
    """The last whole run.

    Attributes:
        date: When it ended, UTC.
        commit: Of the code.
        by_key: Its claims.
    """

    date: str
    commit: str
    by_key: Mapping[str, JsonObject]


@cache
def last_run() -> LastRun:
    """Read what the last whole run found."""
    lines = (FOLDER_OF_CLAIMS / _FILE).read_text(encoding="utf-8").splitlines()
    about, *rows = (json.loads(line) for line in lines)
    return LastRun(
        date=about["date"], commit=about["commit"], by_key={row["claim"]: row for row in rows}
    )


def kept_claim(claim: Claim) -> JudgedClaim | None:
    """Return a claim as the last run judged it; None if it was another then, or is new."""
    row = last_run().by_key.get(claim.key)
    if row is None or row["asked"] != claim.asked:
        return None
    return recorded_claim(claim, row)


def recorded_claim(claim: Claim, record: Mapping[str, Any] | None) -> JudgedClaim:
    """Judge a claim by what a record, or a line of the file, has of it; None knows nothing."""
    if record is None or record["ours"] is None:
        return JudgedClaim(claim=claim, ours=None)
    ours = Ours(
        value=record["ours"],
        fair=record["fair"],
        rival=record["rival"],
        expected_error=record["expected_error"],
        note=record["note"],
    )
    return JudgedClaim(claim=claim, ours=ours)


def claim_fields(judged: JudgedClaim) -> dict[str, object]:
    """Return the line of a claim, and what a record has of it."""
    claim, ours = judged.claim, judged.ours
    return {
        "claim": claim.key,
        "asked": claim.asked,
        "published": claim.published,
        "tolerance": claim.tolerance,
        "ours": ours and ours.value,
        "fair": ours and ours.fair,
        "rival": ours.rival if ours else "",
        "expected_error": ours and ours.expected_error,
        "note": ours.note if ours else "",
        "verdict": judged.verdict.value,
    }


def kept_text(records: Iterable[JsonObject], date: str, commit: str) -> str:
    """Return the file of verdicts of a run's records."""
    lines = [json_text({"date": date, "commit": commit})]
    lines += [json_text({name: record[name] for name in _KEPT}) for record in records]
    return "\n".join(lines) + "\n"


def counts_of(judged: Sequence[JudgedClaim]) -> dict[str, int]:
    """Count figures and their verdicts; predictions that wait for a figure are none."""
    own = [each for each in judged if each.claim.published is not None or each.claim.missing]
    found = Counter(each.verdict for each in own)
    return {
        "figures": len(own),
        **{verdict.name.lower(): found[verdict] for verdict in ClaimVerdict},
    }
