"""The answer of a sweep: what is best of each row, what ties, what it holds and how well known."""

from io import StringIO

from rich.console import Console

from harness.plan.problem import Direction
from harness.records.cell import CellRecord, Status
from harness.records.config import Config, Where
from harness.report.best import best_of, best_tables
from tests.harness.made import record


def cell(
    strategy: str,
    direction: Direction,
    time_s: float | None,
    *,
    pattern: str = "causal",
    cp: int = 6,
    band: float = 0.0,
    where: Where = Where.GLOO,
    status: Status = Status.OK,
    **values: object,
) -> CellRecord:
    simulated = where is Where.SIMULATED
    config = Config(
        strategy=strategy,
        pattern=pattern,
        cp=cp,
        seqlen_q=3072,
        seqlen_kv=3072,
        heads_q=6,
        heads_kv=2,
        head_dim=16,
        direction=direction,
        transport=where,
        cluster="h100-8x8" if simulated else None,
    )
    if time_s is not None:
        values |= {"time_s": time_s}
        if not simulated:
            values |= {"p20_s": time_s - band, "p80_s": time_s + band}
    return record(config, status, {}, **values)


F, B = Direction.FORWARD, Direction.BACKWARD


def lines(records: list[CellRecord], width: int = 80) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width)
    for title, table in best_tables(records, width):
        console.print(title)
        console.print(table)
    return out.getvalue().splitlines()


def test_the_fastest_of_each_direction_and_of_both_are_found() -> None:
    text = lines(
        [
            *(cell("ring", F, 1.0, peak_bytes=2**30), cell("ring", B, 3.5, peak_bytes=5 * 2**30)),
            *(cell("usp", F, 1.6, peak_bytes=2**30), cell("usp", B, 2.2, peak_bytes=3 * 2**30)),
            *(cell("owner", F, 1.7), cell("owner", B, 2.0)),
            cell("grid", F, 1.5),  # its backward did not run: no candidate for both
            cell("grid", B, None, status=Status.ERROR),
            cell("stripe", F, 1.9),  # nor was its backward asked for
        ]
    )
    assert text[1].split() == [*("forward", "ms", "backward", "ms", "both", "ms", "peak", "error")]
    assert text[3].split() == ["cp=6", "S=3k"]
    assert text[4].split() == [
        *("causal", "ring", "1000", "owner", "2000", "owner", "3700", "—", "—")
    ]


def test_memory_is_the_most_of_both_directions_and_errors_the_largest() -> None:
    text = lines(
        [
            cell("ring", F, 1.0, peak_bytes=2**30, max_rel_error={"out": 2e-7}),
            cell("ring", B, 3.0, peak_bytes=5 * 2**30, max_rel_error={"dq": 1e-8, "dk": 3e-7}),
        ]
    )
    assert text[4].split()[-2:] == ["5.0G", "3.0e-07"]


def test_what_is_within_the_spread_of_the_fastest_is_counted() -> None:
    names = {"ring": 1.00, "usp": 1.05, "grid": 1.15}
    entries = [cell(name, F, time_s, band=0.03) for name, time_s in names.items()]
    best = best_of([[entry] for entry in entries])
    assert best is not None
    assert best.names == ("ring", "usp")
    assert "ring +1" in lines(entries)[4]


def test_what_differs_by_no_more_than_rows_of_one_plan_is_counted() -> None:
    def both(name: str, forward_s: float, backward_s: float, work: str) -> list[CellRecord]:
        times = ((F, forward_s), (B, backward_s))
        return [cell(name, way, time_s, work_hash=f"{work} {way}") for way, time_s in times]

    # Twins differ by 30 % forward, by 10 % backward; each direction is judged by its own.
    groups = [
        both("ring", 1.3, 2.2, "a"),
        both("grid", 1.0, 2.0, "a"),
        both("usp", 1.2, 2.1, "b"),
        both("owner", 1.2, 2.3, "c"),
    ]
    best = best_of(groups)
    assert best is not None
    assert best.names == ("grid", "ring", "usp")
    assert best.time_s == 3.0
    forward = best_of([group[:1] for group in groups])
    assert forward is not None
    assert forward.names == ("grid", "ring", "usp", "owner")
    alone = best_of(groups[1:])  # without its twin nothing is known but spreads
    assert alone is not None
    assert alone.names == ("grid",)


def test_one_direction_alone_has_no_column_for_both() -> None:
    assert "both" not in lines([cell("ring", F, 1.0)])[1]


def test_a_simulated_row_says_how_far_its_times_may_be_off() -> None:
    entries = [
        cell(
            "ring",
            way,
            1.0,
            where=Where.SIMULATED,
            inside_range=True,
            expected_error=0.04 + 0.03 * (way is B),
        )
        for way in Direction
    ]
    text = lines(entries)
    assert text[1].split()[-1] == "±"
    assert text[4].split()[-1] == "7%"
    unknown = [cell("ring", way, 1.0, where=Where.SIMULATED) for way in Direction]
    assert lines(unknown)[4].split()[-1] == "—"


def test_what_was_chosen_is_named_where_both_directions_chose_it() -> None:
    entries = [
        cell("grid", F, 1.0, resolved="grid:rows=3"),
        cell("grid", B, 1.0, resolved="grid:rows=2"),
    ]
    words = lines(entries, 120)[4].split()
    assert words[1::2][:3] == ["grid:rows=3", "grid:rows=2", "grid"]


def test_a_row_in_which_nothing_ran_is_dashes_and_a_problem_without_any_is_left_out() -> None:
    refused = cell("ring", F, None, pattern="star", status=Status.ILLEGAL)
    text = lines([cell("ring", F, 1.0), refused])
    assert text[-1].split() == ["star", "—", "—", "—"]
    assert lines([refused]) == []


def test_rows_are_by_degree_length_and_pattern_and_fit_the_terminal() -> None:
    entries = [
        cell(name, way, 1.0 + at, pattern=pattern, cp=cp)
        for cp in (2, 6)
        for pattern in ("causal", "documents:lengths=1000+2072")
        for at, name in enumerate(("double_ring:placement=contiguous,inner=2", "usp:2x3"))
        for way in Direction
    ]
    for width in (80, 120, 200):
        text = lines(entries, width)
        assert max(map(len, text)) <= width
        assert "…" not in "".join(text)
        degrees = [line.split()[0] for line in text if line.startswith("cp=")]
        tables = 1 if width > 120 else 3  # one for each direction, so that no name is broken
        assert degrees == ["cp=2", "cp=6"] * tables
        whole = sum(" double_ring:placement=contiguous,inner=2 " in line for line in text)
        assert whole == {80: 0, 120: 12, 200: 4}[width]  # 28 and 39 signs do not fit 80


def test_simulated_times_that_may_be_in_another_order_are_counted_as_near() -> None:
    times = {"ring": 1.0, "usp": 1.0, "grid": 1.06, "owner": 1.2}
    unknown = [cell(name, F, time_s, where=Where.SIMULATED) for name, time_s in times.items()]
    best = best_of([[entry] for entry in unknown])
    assert best is not None
    assert (best.names, best.near) == (("ring", "usp"), ("grid",))  # 6 % of the 10 allowed
    assert "ring +1 ~1" in lines(unknown)[4]
    known = [
        cell(name, F, time_s, where=Where.SIMULATED, inside_range=True, expected_error=0.05)
        for name, time_s in times.items()
    ]
    best = best_of([[entry] for entry in known])
    assert best is not None
    assert best.near == ()


def test_measured_times_are_judged_by_their_spread_alone() -> None:
    best = best_of([[cell("ring", F, 1.0)], [cell("usp", F, 1.05)]])
    assert best is not None
    assert best.near == ()


def test_the_error_of_an_extrapolated_time_is_unknown_and_the_worst_known_error_decides() -> None:
    def one(name: str, time_s: float, error: float, *, inside: bool) -> list[CellRecord]:
        values = {"expected_error": error if inside else None, "inside_range": inside}
        return [cell(name, F, time_s, where=Where.SIMULATED, **values)]

    found = best_of([one("ring", 1.0, 0.02, inside=False), one("zigzag", 1.09, 0.02, inside=True)])
    assert found is not None
    assert (found.error, found.near) == (None, ("zigzag",))
    # The fastest is known to 2 %, the others to 7 % and not at all, which counts as 10 %.
    known = one("ring", 1.0, 0.02, inside=True), one("owner", 1.03, 0.02, inside=True)
    found = best_of(
        [*known, one("zigzag", 1.06, 0.07, inside=True), one("usp", 1.09, 0.01, inside=False)]
    )
    assert found is not None
    assert (found.error, found.near) == (0.02, ("zigzag", "usp"))
