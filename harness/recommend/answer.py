"""The answer to one question, whole: kept between runs, so that it is found again at once."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from harness.base.cache import cache_folder, keep, kept_by_this_code
from harness.base.json_fields import json_text, parsed
from harness.base.judged import fields_of
from harness.recommend.choose import Choice, choose_among
from harness.recommend.confirm import confirming
from harness.recommend.flips import Flip, flips_of
from harness.recommend.frameworks import FRAMEWORKS, framework_runs
from harness.recommend.price import Advance, RefusedCandidate, price
from harness.recommend.question import Asked
from harness.records.cell import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A strategy and its time, seconds."""

    strategy: str
    time_s: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A strategy that cannot be told apart from the answer: its time, and what it holds."""

    strategy: str
    time_s: Share
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """The answer; fields are null where nothing runs.

    Attributes:
        strategy: As it is typed.
        time_s: Of one layer (a mean where layers differ), summed over the directions; at model
            scope, of a training step.
        expected_error: Share by which the time may be off; null where unknown.
        peak_bytes: Most bytes that a rank holds.
        bound_s: No plan of the problem takes less; null where unknown.
        second: The fastest of the others.
        ties: Those that cannot be told apart from the answer, fastest first.
        refused: Those that cannot run.
        flips: Where another strategy is better.
        confirm: Commands that repeat the answer's rows.
    """

    strategy: str | None = None
    time_s: Share | None = None
    expected_error: Share | None = None
    peak_bytes: int | None = None
    bound_s: Share | None = None
    second: Timed | None = None
    ties: tuple[Tied, ...] = ()
    refused: tuple[RefusedCandidate, ...] = ()
    flips: tuple[Flip, ...] = ()
    confirm: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the fields of `recommend --json`."""
        return asdict(self)


def recommend(
    question: Asked,
    *,
    elsewhere: bool = True,
    keep_in: str = "recommendations",
    advance: Advance | None = None,
) -> Recommendation:
    """Answer a question, or find the answer that this code gave to it before.

    Args:
        question: The problem.
        elsewhere: Whether to look where the answer flips.
        keep_in: Folder of the cache.
        advance: Called as cells are done.
    """
    names = question.candidates()
    name = f"{_key(question, names, elsewhere)}.json"
    folder = cache_folder() / keep_in
    known = kept_by_this_code(folder, name, _read)
    if known is not None:
        return known
    made = _made(question, names, elsewhere, advance)
    keep(folder, name, json_text(made.as_json(), compact=True).encode())
    return made


def _read(content: bytes) -> Recommendation:
    return Recommendation(**fields_of(Recommendation, parsed(content)))


def _key(question: Asked, names: Sequence[str], elsewhere: bool) -> str:
    """Of all that decides an answer, with the contents of files that it names."""
    cells = [cell.hash for name in names[:1] for cell, _ in question.cells(name)]
    return hashlib.sha256(repr((question, names, cells, elsewhere)).encode()).hexdigest()[:24]


def _made(
    question: Asked, names: Sequence[str], elsewhere: bool, advance: Advance | None
) -> Recommendation:
    legal, barred = _of_framework(question, names)
    priced, refused = price(question, legal, advance=advance)
    found = choose_among(priced, question.memory_bytes)
    reasons = (*barred, *refused)
    if found is None:
        return Recommendation(refused=reasons)
    best, second = found.best, found.second
    return Recommendation(
        strategy=best.strategy,
        time_s=best.time_s,
        expected_error=best.error,
        peak_bytes=best.peak_bytes,
        bound_s=best.bound_s,
        second=None if second is None else Timed(strategy=second.strategy, time_s=second.time_s),
        ties=tuple(
            Tied(strategy=one.strategy, time_s=one.time_s, peak_bytes=one.peak_bytes)
            for one in found.ties
        ),
        refused=reasons,
        flips=tuple(flips_of(question, found, priced)) if elsewhere else (),
        confirm=tuple(confirming(question, _rows(found))),
    )


def _of_framework(
    question: Asked, names: Sequence[str]
) -> tuple[list[str], list[RefusedCandidate]]:
    """Split candidates into those that the framework runs, and the others with its reasons."""
    if question.framework is None:
        return list(names), []
    framework = FRAMEWORKS[question.framework]
    legal, barred = [], []
    for name in names:
        verdict = framework_runs(framework, name, question)
        if verdict.refusal:
            barred.append(RefusedCandidate(strategy=name, reason=verdict.refusal))
        else:
            legal.append(name)
    return legal, barred


def _rows(found: Choice) -> list[str]:
    """The strategies that a confirmation compares: the answer, the second, and all ties."""
    others = [one.strategy for one in (*((found.second,) if found.second else ()), *found.ties)]
    return list(dict.fromkeys([found.best.strategy, *others]))
