"""The spread over seeds of packs that were drawn: what is joined, what is tied."""

from io import StringIO

import pytest
from rich.console import Console

from harness.plan.problem import Direction
from harness.records.cell import CellRecord, Status
from harness.report.seeds import seed_spreads, seed_tables
from patterns.lengths import over_seeds, without_seed
from tests.harness.report.test_best import cell

F = Direction.FORWARD
PACK = "documents:preset=pile"


def drawn(strategy: str, *times_s: float | None) -> list[CellRecord]:
    return [
        cell(
            strategy,
            F,
            time_s,
            pattern=f"{PACK},seed={seed}",
            status=Status.OK if time_s is not None else Status.ILLEGAL,
        )
        for seed, time_s in enumerate(times_s)
    ]


def test_draws_are_joined_and_those_that_did_not_run_are_counted() -> None:
    records = [*drawn("ring", 1.0, 4.0, 1.0), *drawn("owner", 3.0, None), *drawn("usp", 5.0)]
    found = seed_spreads([*records, cell("grid", F, 9.0)])

    assert [each.config.strategy for each in found] == ["ring", "owner"]
    assert {each.config.pattern for each in found} == {PACK}
    assert [(each.mean_s, each.band, each.draws) for each in found] == [
        (2.0, (1.0, 4.0), 3),
        (3.0, (3.0, 3.0), 2),
    ]


def test_who_reaches_into_the_band_of_the_fastest_is_tied_with_it() -> None:
    out = StringIO()
    console = Console(file=out, width=90)
    records = [*drawn("owner", 3.0, 7.0), *drawn("ring", 1.0, 4.0), *drawn("grid", 4.5, 5.0)]
    for title, table in seed_tables(records):
        console.print(title, table)
    text = [line.split() for line in out.getvalue().splitlines()]

    assert f"cp=6 S=3k {PACK} forward" in out.getvalue()
    assert text[-3:] == [
        ["ring", "2500*", "1000", "4000", "2", "of", "2"],
        ["grid", "4750", "4500", "5000", "2", "of", "2"],
        ["owner", "5000~", "3000", "7000", "2", "of", "2"],
    ]


@pytest.mark.parametrize(
    ("text", "packs"),
    [
        (PACK, (f"{PACK},seed=0", f"{PACK},seed=1")),
        (f"{PACK},seed=7", (f"{PACK},seed=7",)),
        ("documents:lengths=3+4", ("documents:lengths=3+4",)),
        ("causal", ("causal",)),
    ],
)
def test_a_pack_without_a_seed_is_drawn_several_times(text: str, packs: tuple[str, ...]) -> None:
    assert over_seeds(text, 2) == packs
    assert {without_seed(each) for each in packs} == {
        text.partition(",seed")[0] if "preset" in text else None
    }
