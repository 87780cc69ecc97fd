"""Packs that were drawn several times: the spread of times over seeds, not one draw's luck."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from harness.records.cell import CellRecord
from harness.records.config import Config
from harness.report.format import broken, milliseconds, short
from patterns.lengths import without_seed

_NAME = 34  # columns of a strategy's name


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedSpread:
    """One strategy over several draws of one distribution.

    Attributes:
        config: The cell, its pattern without the seed.
        times_s: Of the draws that ran.
        draws: How many were asked for.
    """

    config: Config
    times_s: tuple[float, ...]
    draws: int

    @property
    def mean_s(self) -> float:
        """Mean over the draws."""
        return fmean(self.times_s)

    @property
    def band(self) -> tuple[float, float]:
        """The least and the largest time."""
        return min(self.times_s), max(self.times_s)


def seed_spreads(records: Sequence[CellRecord]) -> list[SeedSpread]:
    """Join cells that differ in their seed alone; those with a single draw are left out."""
    groups: dict[Config, list[CellRecord]] = {}
    for entry in records:
        bare = without_seed(entry.config.pattern)
        if bare is not None:
            groups.setdefault(replace(entry.config, pattern=bare), []).append(entry)
    return [
        SeedSpread(
            config=config,
            times_s=tuple(entry.seconds for entry in group if entry.ok),
            draws=len(group),
        )
        for config, group in groups.items()
        if len(group) > 1 and any(entry.ok for entry in group)
    ]


def seed_tables(records: Sequence[CellRecord]) -> Iterator[tuple[str, Table]]:
    """A title and a table for each problem that was drawn several times: mean, least, most.

    Strategies are tied where the band of one reaches into that of the fastest.
    """
    rows: dict[Config, list[SeedSpread]] = {}
    for each in seed_spreads(records):
        rows.setdefault(replace(each.config, strategy=""), []).append(each)
    for config, spreads in rows.items():
        where = config.cluster or config.transport.value
        title = (
            f"over seeds, {where}: cp={config.cp} S={short(config.seqlen_q)} {config.pattern} "
            f"{config.direction.value}"
        )
        yield title, _table(sorted(spreads, key=lambda each: each.mean_s))


def _table(spreads: Sequence[SeedSpread]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("strategy", no_wrap=True)
    for head in ("mean ms", "least", "most", "packs"):
        table.add_column(head, justify="right", no_wrap=True, min_width=len(head) + 2)
    reach = spreads[0].band[1]
    for at, each in enumerate(spreads):
        least, most = each.band
        mark = "*" if not at else "~" if least <= reach else ""
        table.add_row(
            broken(each.config.strategy, _NAME),
            milliseconds(each.mean_s) + mark,
            milliseconds(least),
            milliseconds(most),
            f"{len(each.times_s)} of {each.draws}",
        )
    return table
