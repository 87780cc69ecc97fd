"""Compute claims side by side, a record each, as a sweep's: what ends a run is no loss."""

import time
import traceback
from collections.abc import Generator, Iterable, Sequence
from functools import partial

from harness.base.cache import code_hash
from harness.base.environment import environment
from harness.base.json_fields import JsonObject
from harness.base.workers import spread
from harness.errors import told
from harness.records.cell import Status, utc_now
from harness.reproduce.claims import Claim, JudgedClaim
from harness.reproduce.kept_verdicts import claim_fields
from harness.reproduce.kinds import KINDS, judged_claim

_SCHEMA_OF_CLAIMS = 1


def pending_claims(claims: Sequence[Claim], records: Iterable[JsonObject]) -> list[Claim]:
    """Return the claims that no record of this code has computed as they are now."""
    done = {
        (record["claim"], record["asked"])
        for record in records
        if record["status"] == Status.OK and record["code"] == code_hash()
    }
    return [claim for claim in claims if (claim.key, claim.asked) not in done]


def run_claims(
    claims: Sequence[Claim], *, jobs: int
) -> Generator[list[dict[str, object]], None, None]:
    """Compute claims; what goes wrong in one becomes its record.

    Args:
        claims: In any order; those that share a plan are one piece of work.
        jobs: Processes side by side; 1 stays in this one.

    Yields:
        Records of a piece, as pieces are done.
    """
    pieces: dict[object, list[Claim]] = {}
    for claim in claims:
        shared = claim.setting.get("cell", claim.table)
        pieces.setdefault((claim.source, shared), []).append(claim)
    work = partial(_piece, context=environment())
    if jobs == 1:
        yield from map(work, pieces.values())
        return
    # The dearest first, so that no long one is left alone at the end.
    ordered = sorted(pieces.values(), key=lambda piece: -_dear(piece[0]))
    yield from spread(work, ordered, jobs=jobs, lost=partial(_lost_piece, context=environment()))


def _dear(claim: Claim) -> int:
    cell = claim.setting.get("cell")
    if cell is not None:
        return int(cell.cp)
    return int(bool(claim.kind) and not KINDS[claim.kind].quick)


def _piece(claims: Sequence[Claim], context: JsonObject) -> list[dict[str, object]]:
    return [_record(claim, context) for claim in claims]


def _record(claim: Claim, context: JsonObject) -> dict[str, object]:
    start = time.perf_counter()
    try:
        judged = judged_claim(claim)
        ended = {"status": Status.OK.value, "reason": "", "traceback": ""}
    except Exception as error:  # the boundary of a claim: the others go on
        judged = JudgedClaim(claim=claim, ours=None)
        detail = traceback.format_exc()
        ended = {"status": Status.ERROR.value, "reason": told(error), "traceback": detail}
    return {**_fields(judged, context, time.perf_counter() - start), **ended}


def _lost_piece(claims: Sequence[Claim], context: JsonObject) -> list[dict[str, object]]:
    ended = {
        "status": Status.ERROR.value,
        "reason": "the process that computed it died",
        "traceback": "",
    }
    judged = [JudgedClaim(claim=claim, ours=None) for claim in claims]
    return [{**_fields(each, context, 0.0), **ended} for each in judged]


def _fields(judged: JudgedClaim, context: JsonObject, seconds: float) -> dict[str, object]:
    claim = judged.claim
    return {
        "schema_version": _SCHEMA_OF_CLAIMS,
        "source": claim.source,
        **claim_fields(judged),
        "provenance": KINDS[claim.kind].provenance.value if claim.kind else None,
        "computed_in_s": seconds,
        "code": code_hash(),
        "environment": context,
        "recorded_at": utc_now(),
    }
