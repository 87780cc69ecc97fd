"""Published figures as data: what was measured, the figure, its source, how far ours may be off.

A file of `published` is one source. Its tables share what was measured and how ours is computed; a
row of a table is a figure. Every value of a table may be given for all its rows, or, as a column,
for each:

    [[table]]
    name = "received by a GPU in a layer, forward"
    kind = "received"                 how ours is computed: a name of `kinds.KINDS`
    what = "{strategy}, {heads} heads"        the figure in words
    unit = "MiB"
    where = "table in the text"       of the source
    read = "as printed"               how exactly it was read
    tolerance = 0                     share by which ours may be off
    reason = "a closed form"          for that tolerance
    columns = ["strategy", "heads", "published"]
    rows = [["ring", "32/32", 1792], ["ulysses", "32/32", 448]]

`why` says of a figure why ours differs, `missing` what there is not to compute it; `seen` which
part was in view when ours was fitted or chosen. `handicap` of a file says what its baselines were
run with. All other values are the setting that `kind` reads.
"""

import hashlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

FOLDER_OF_CLAIMS = files("harness.reproduce") / "published"
_ABOUT = frozenset(
    ("name", "kind", "what", "unit", "where", "read", "tolerance", "absolute", "reason", "why")
) | {"missing", "seen", "published", "columns", "rows"}
"""What a table says of its figures; the rest of it is the setting."""
_ROUNDING = 1e-9
"""Ratios of equal numbers differ by less."""


class ClaimVerdict(StrEnum):
    """How a published figure stands beside ours."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    BASELINE_ONLY = "baseline only"
    NOT_CHECKABLE = "not checkable"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSource:
    """A paper, a repository or an article whose figures are claims.

    Attributes:
        name: As a user types it.
        title: What it is, with where it can be found.
        handicap: What its baselines were run with, said once for all its figures.
    """

    name: str
    title: str
    handicap: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published figure, and what is needed to compute ours.

    Attributes:
        source: Name of its source.
        table: Name of its table.
        what: The figure in words.
        published: The figure; None of a prediction that waits for one.
        unit: Of the figure; empty for a ratio or a count.
        where: In the source.
        read: How exactly it was read.
        tolerance: Share by which ours may be off; None: the predictor's expected error.
        absolute: Whether `tolerance` is a difference and not a share.
        reason: For the tolerance.
        kind: How ours is computed; empty if it is not.
        setting: What `kind` reads.
        missing: Why it cannot be computed; empty if it can.
        why: Why ours differs, where it does.
        seen: The part that was in view when ours was fitted or chosen.
    """

    source: str
    table: str
    what: str
    published: float | None
    unit: str
    where: str
    read: str
    tolerance: float | None
    absolute: bool
    reason: str
    kind: str
    setting: Mapping[str, Any]
    missing: str
    why: str
    seen: str

    @property
    def key(self) -> str:
        """What names it among all claims."""
        return f"{self.source} | {self.table} | {self.what}"

    @property
    def asked(self) -> str:
        """Hash of all that decides its verdict: the figure, the tolerance and the setting."""
        setting = sorted(self.setting.items())
        decides = (self.published, self.tolerance, self.absolute, self.kind, setting)
        return hashlib.sha256(repr(decides).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """What was computed for a claim.

    Attributes:
        value: In the claim's unit, with the baseline as its authors ran it.
        fair: The same on equal ground, against the fastest other strategy; None where nothing is
            compared with a baseline.
        rival: That strategy.
        expected_error: Of the prediction; None where nothing is predicted, or it is unknown.
        note: What else is to be said.
    """

    value: float
    fair: float | None = None
    rival: str = ""
    expected_error: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedClaim:
    """A claim and its verdict.

    Attributes:
        claim: The claim.
        ours: None where nothing was computed.
    """

    claim: Claim
    ours: Ours | None

    @property
    def error(self) -> float | None:
        """Ours over published, less 1; a difference where the tolerance is one."""
        published = self.claim.published
        if self.ours is None or published is None:
            return None
        if self.claim.absolute:
            return self.ours.value - published
        return self.ours.value / published - 1

    @property
    def tolerance(self) -> float | None:
        """How far ours may be off; None where that is unknown."""
        if self.claim.tolerance is not None:
            return self.claim.tolerance
        return None if self.ours is None else self.ours.expected_error

    @property
    def verdict(self) -> ClaimVerdict:
        """How the figure stands."""
        published, error, allowed = self.claim.published, self.error, self.tolerance
        if self.ours is None or published is None or error is None or allowed is None:
            return ClaimVerdict.NOT_CHECKABLE
        if abs(error) > allowed + _ROUNDING:
            return ClaimVerdict.NOT_REPRODUCED
        fair = self.ours.fair
        if fair is not None and fair < published * (1 - allowed):
            return ClaimVerdict.BASELINE_ONLY
        return ClaimVerdict.REPRODUCED


@cache
def source_names() -> tuple[str, ...]:
    """Return the names of all sources, in alphabetical order."""
    names = (entry.name for entry in FOLDER_OF_CLAIMS.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


@cache
def published_file(name: str) -> Mapping[str, Any]:
    """Return the file of a source as it is.

    Raises:
        ValueError: There is no such source.
    """
    if name not in source_names():
        raise ValueError(f"source ({name}) is unknown; choose from {', '.join(source_names())}")
    text = (FOLDER_OF_CLAIMS / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def published_source(name: str) -> PublishedSource:
    """Return what is said of a source as a whole.

    Raises:
        ValueError: There is no such source.
    """
    file = published_file(name)
    return PublishedSource(name=name, title=file["title"], handicap=file.get("handicap", ""))


def claims_in(name: str) -> Iterator[Claim]:
    """Yield the figures of a file's tables, in its order.

    Raises:
        ValueError: There is no such source.
    """
    for table in published_file(name).get("table", ()):
        columns = table["columns"]
        for row in table["rows"]:
            if len(row) != len(columns):
                raise ValueError(f"{name}, {table['name']}: row {row} has not columns {columns}")
            yield _claim(name, {**table, **dict(zip(columns, row, strict=True))})


def _claim(source: str, said: Mapping[str, Any]) -> Claim:
    setting = {key: value for key, value in said.items() if key not in _ABOUT}
    words = {key: _spoken(value) for key, value in setting.items()}
    tolerance = said["tolerance"] if not said.get("missing") else 0.0
    return Claim(
        source=source,
        table=said["name"],
        what=said["what"].format(**words),
        published=said.get("published"),
        unit=said.get("unit", ""),
        where=said["where"],
        read=said["read"],
        tolerance=None if tolerance == "expected" else float(tolerance),
        absolute=said.get("absolute", False),
        reason=said.get("reason", ""),
        kind="" if said.get("missing") else said["kind"],
        setting=setting,
        missing=said.get("missing", ""),
        why=said.get("why", ""),
        seen=said.get("seen", ""),
    )


def _spoken(value: object) -> object:
    """A value in a sentence: a list as text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return value
