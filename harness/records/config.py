"""One cell of a grid: everything that names a run, as plain values that go into records."""

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from harness.base.json_fields import json_text
from harness.base.judged import counts, reals
from harness.cluster.machine import Runtime
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Scope
from patterns import file_of, make_pattern, outside
from patterns.files import read_regular

Count = Annotated[int, counts(1)]


class Where(StrEnum):
    """How the ranks of a cell come to be."""

    LOCAL = "local"
    GLOO = "gloo"
    NCCL = "nccl"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Names of one cell; the fields are those of `Problem`, spelled as a user would type them.

    `cluster` is what a simulated cell runs on, and `runtime` how its work reaches the GPUs; other
    cells run on this machine. `hidden` and
    `rotary` are those of a layer: at layer scope `hidden` is heads_q x head_dim unless it is given.
    """

    strategy: str
    pattern: str
    cp: Count
    seqlen_q: Count
    seqlen_kv: Count
    heads_q: Count
    heads_kv: Count
    head_dim: Count
    batch: Count = 1
    dtype: Dtype = Dtype.FLOAT32
    direction: Direction = Direction.FORWARD
    transport: Where = Where.LOCAL
    scope: Scope = Scope.ATTENTION
    cluster: str | None = None
    hidden: Count | None = None
    rotary: Annotated[float, reals(1e-12, 1e12)] | None = None
    runtime: Runtime | None = None

    @property
    def problem(self) -> Problem:
        """The problem of this cell.

        Raises:
            ValueError: The values contradict one another.
        """
        layer = self.scope is Scope.LAYER
        if not layer and (self.hidden or self.rotary):
            raise ValueError("hidden and rotary require scope layer")
        cross = self.seqlen_q != self.seqlen_kv
        return Problem(
            pattern=make_pattern(self.pattern, self.seqlen_q, self.seqlen_kv, cross=cross),
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            batch=self.batch,
            dtype=self.dtype,
            cp=self.cp,
            hidden=(self.hidden or self.heads_q * self.head_dim) if layer else None,
            rotary=self.rotary,
        )

    @property
    def hash(self) -> str:
        """SHA-256 of the values, and of what is in the files that they name; 16 hex digits.

        A table, a cluster or a package from outside that was edited under its old name makes
        another cell: neither records nor caches of the old one answer for it.
        """
        values = {**asdict(self), **_contents(self)}
        text = json_text(values, compact=True, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _outside(config: Config) -> dict[str, str]:
    """Digests of the packages from outside that a cell's strategy and pattern come from."""
    named = (
        ("strategy", config.strategy, outside.STRATEGY_GROUP),
        ("pattern", config.pattern, outside.PATTERN_GROUP),
    )
    found = {f"{what} in code": _digest(text, group) for what, text, group in named}
    return {what: digest for what, digest in found.items() if digest}


@lru_cache(maxsize=256)  # what is imported stays as it is, too
def _digest(text: str, group: str) -> str:
    files = outside.sources(outside.split_name(text, {}, group)[0], group)
    if not files:
        return ""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _contents(config: Config) -> dict[str, str]:
    """Digests of files and code from outside that decide a cell, where they can be read."""
    paths = {}
    with suppress(ValueError):  # it is refused where it is read
        table = file_of(config.pattern)
        if table is not None:
            paths["table"] = Path(table)
    if config.cluster is not None and config.cluster.endswith(".toml"):
        paths["calibration"] = Path(config.cluster)
    found = _outside(config)
    for what, path in paths.items():
        with suppress(OSError):  # it is refused where it is read
            found[f"{what} in file"] = hashlib.sha256(read_regular(path)).hexdigest()
    return found
