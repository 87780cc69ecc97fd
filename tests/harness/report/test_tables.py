"""Tables of a sweep: readable at 80 and at 200 columns, nothing cut, the best marked."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from harness.cluster.machine import Runtime
from harness.plan.problem import Direction
from harness.records.cell import CellRecord, Status
from harness.records.config import Config, Where
from harness.report.format import broken, memory, milliseconds, short
from harness.report.notes import same_plans
from harness.report.tables import print_sweep
from tests.harness.made import changed, record

PATTERNS = ("full", "causal", "strided", "global_local", "star", "streaming")
NAMES = ("ring", "zigzag", "ring-classic", "double_ring", "allgather:placement=zigzag")


def config(strategy: str, pattern: str, where: Where) -> Config:
    return Config(
        strategy=strategy,
        pattern=pattern,
        cp=8,
        seqlen_q=65536,
        seqlen_kv=65536,
        heads_q=32,
        heads_kv=8,
        head_dim=128,
        direction=Direction.BACKWARD,
        transport=where,
        cluster="h100-8x8" if where is Where.SIMULATED else None,
    )


def simulated(strategy: str, pattern: str, time_s: float, **values: object) -> CellRecord:
    place = config(strategy, pattern, Where.SIMULATED)
    known = {"time_s": time_s, "bound_s": 0.5, "calibration": "datasheet", **values}
    return record(place, Status.OK, {}, **known)


def measured(
    strategy: str, pattern: str, time_s: float, spread: float = 0.02, cores: int = 8
) -> CellRecord:
    return record(
        config(strategy, pattern, Where.GLOO),
        Status.OK,
        {"cores": cores},
        time_s=time_s,
        samples_s=[time_s] * 23,
        p20_s=(1 - spread) * time_s,
        p80_s=(1 + 2 * spread) * time_s,
        exposed_comm_s=0.003,
        bytes_sent_per_rank=3 * 2**20,
        imbalance=1.75,
        max_rel_error={"dq": 1.25e-7, "dk": 3.5e-8},
    )


def grid(make: object, names: tuple[str, ...] = NAMES) -> list[CellRecord]:
    assert callable(make)
    return [
        make(name, pattern, 1.234 - 0.1 * row if row < 4 else 1.3)
        for row, name in enumerate(names)
        for pattern in PATTERNS
    ]


def printed(records: list[CellRecord], width: int) -> list[str]:
    out = StringIO()
    print_sweep(Console(file=out, width=width), records)
    return out.getvalue().splitlines()


def row(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(name + " "))


def flat(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [80, 100, 119, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width: int) -> None:
    lines = printed(grid(simulated) + grid(measured), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for name in NAMES[:4]:
        assert f"{name} " in text
    whole, folded = NAMES[4], broken(NAMES[4], 14).split("\n")
    assert whole in text or all(f"{part} " in text for part in folded)
    assert len(re.findall(r"1234\s+2\.5×", text)) == len(PATTERNS)


def test_short_names_leave_room_for_six_patterns_in_80_columns() -> None:
    lines = printed(grid(simulated, NAMES[:4]), 80)
    assert len(re.findall(r"1234 +2\.5×", row(lines, "ring"))) == 6
    assert lines[1].split() == ["strategy", *PATTERNS]


def test_no_name_of_a_strategy_or_pattern_is_broken_in_80_columns() -> None:
    lines = printed(grid(simulated), 80)
    assert sum(line.startswith(f"{NAMES[4]} ") for line in lines) == 2
    assert len(re.findall("2.6×", row(lines, NAMES[4]))) == 4
    heads = [line.split()[1:] for line in lines if line.startswith("strategy")]
    assert heads == [list(PATTERNS[:4]), list(PATTERNS[4:])]


def test_a_long_pattern_has_a_label_and_a_legend() -> None:
    long = "documents:lengths=" + "+".join(["8"] * 384)
    text = flat(printed([simulated("ring", long, 1.0)], 80))
    assert "documents #1" in text
    assert f"documents #1: {long}" in text.replace(" ", "").replace(
        "documents#1:", "documents #1: "
    )


def test_what_a_strategy_chose_is_its_label() -> None:
    lines = printed([simulated("usp", "star", 1.0, resolved="usp:4x2")], 80)
    assert "1000* 2.0×" in row(lines, "usp:4x2")
    refused = record(config("usp", "full", Where.SIMULATED), Status.ILLEGAL, {}, reason="no")
    lines = printed([simulated("usp", "star", 1.0, resolved="usp:4x2"), refused], 80)
    assert "illegal" in row(lines, "usp:4x2")


@pytest.mark.parametrize("width", [80, 200])
def test_the_best_of_each_pattern_is_marked_and_the_bound_beside_it(width: int) -> None:
    line = row(printed(grid(simulated), width), "double_ring")
    assert "934* 1.9×" in line
    assert "*" not in row(printed(grid(simulated), width), "zigzag")


@pytest.mark.parametrize("width", [80, 200])
def test_below_the_strategies_stands_the_time_that_no_plan_beats(width: int) -> None:
    known = [simulated("ring", "full", 1.2, any_plan_bound_s=0.75), simulated("ring", "star", 2.0)]
    lines = printed(known, width)
    assert row(lines, "(any plan)").split() == ["(any", "plan)", "750", "1.5×"]
    assert "no plan takes less" in flat(lines)
    assert "any plan" not in flat(printed(known[1:], width))


def test_equal_times_are_all_best() -> None:
    lines = printed([simulated(name, "star", 0.75) for name in ("ring", "usp")], 80)
    assert "750* 1.5×" in row(lines, "ring")
    assert "750* 1.5×" in row(lines, "usp")


def test_a_large_factor_has_no_decimal() -> None:
    times = {"ring": 0.75, "usp": 49.9, "owner": 52.0}
    lines = printed([simulated(name, "star", time_s) for name, time_s in times.items()], 80)
    assert "49900 99.8×" in row(lines, "usp")
    assert "52000 104×" in row(lines, "owner")


def test_with_room_the_speed_up_over_ring_is_shown() -> None:
    for width in (120, 200):
        lines = printed(grid(simulated), width)
        assert "934* 1.9×  1.32r" in row(lines, "double_ring")
        assert "spread (×), speed-up over ring (r); * best. datasheet" in flat(lines)
    text = flat(printed(grid(simulated), 119))
    assert "1.32" not in text
    assert "spread (×); * best. datasheet" in text


@pytest.mark.parametrize("width", [80, 200])
def test_a_measured_row_has_time_spread_speed_up_error_bytes_wait_and_imbalance(width: int) -> None:
    lines = printed(grid(measured), width)
    shown = [line for line in lines if line.startswith("zigzag ") and "1111-1179" in line]
    assert len(shown) == len(PATTERNS)
    assert row(lines, "strategy").split()[1:] == [
        *("ms", "p20-p80", "vs", "ring", "error", "MiB", "wait", "imbal"),
    ]
    at = next(number for number, line in enumerate(lines) if line.endswith("backward, star"))
    assert row(lines[at:], "zigzag").split() == [
        *("zigzag", "1134", "1111-1179", "1.09×", "1.25e-07", "3.00", "3.00", "1.75"),
    ]
    assert "median of 23 iterations" in flat(lines)
    assert "best: the fastest of each row" in flat(lines)


def test_iterations_are_counted_where_there_are_any() -> None:
    few = changed(measured("usp", "star", 1.0), samples_s=[1.0] * 3)
    failed = changed(few, samples_s=[], time_s=None, status=Status.TIMEOUT)
    assert "median of 3 to 23 iterations" in flat(
        printed([measured("ring", "star", 1.0), few, failed], 80)
    )
    lines = printed([failed], 80)
    assert row(lines, "usp").split() == ["usp", "timeout"]
    assert "iterations" not in flat(lines)


def test_all_that_cannot_be_told_from_the_best_are_marked() -> None:
    entries = [
        measured("ring", "star", 1.30),
        measured("zigzag", "star", 1.04),
        measured("stripe", "star", 1.00),
        measured("usp", "star", 1.07),  # from 1.0486 on; the best ends at 1.04
    ]
    lines = printed(entries, 80)
    marked = {name: "*" in row(lines, name) for name in ("ring", "zigzag", "stripe", "usp")}
    assert marked == {"ring": False, "zigzag": True, "stripe": True, "usp": False}


def test_a_speed_up_within_the_spread_is_said_to_be_so() -> None:
    entries = [measured("ring", "star", 1.0), measured("usp", "star", 0.98)]
    assert "~1.02×" in row(printed(entries, 80), "usp")
    assert " 1.00×" in row(printed(entries, 80), "ring")
    assert "1.25×" in row(printed([entries[0], measured("usp", "star", 0.8)], 80), "usp")


def test_rows_of_one_plan_are_not_told_apart_nor_is_what_differs_by_less() -> None:
    times = {"ring": 6.68, "grid": 4.74, "zigzag": 4.90, "owner": 7.0, "usp": 3.3}
    works = {"ring": "a", "grid": "a", "zigzag": "b", "owner": "b"}
    entries = [
        changed(measured(name, "star", time_s), work_hash=works.get(name))
        for name, time_s in times.items()
    ]
    lines = printed(entries[:3], 80)
    assert {name: row(lines, name).split()[1] for name in ("ring", "grid", "zigzag")} == {
        "ring": "6680*",
        "grid": "4740*",
        "zigzag": "4900*",
    }
    assert "~1.41×" in row(lines, "grid")
    assert "~1.36×" in row(lines, "zigzag")
    said = "rows of one plan differ by up to 41%: what differs by less cannot be told apart here"
    assert f"same plan: ring = grid {said}" in flat(lines)
    best = flat(lines).partition("best, measured here")[2]
    assert "star grid +2 4740" in best
    # The rows that differ most say what can be told: 7.0 against 4.9 is 43 %.
    lines = printed(entries, 80)
    assert "rows of one plan differ by up to 43%" in flat(lines)
    assert "3300*" in row(lines, "usp")
    assert "*" not in row(lines, "grid")  # 4.74 against 3.3 is 44 %
    assert " 2.02×" in row(lines, "usp")


def test_rows_of_one_plan_are_compared_within_a_table_only_and_where_they_ran() -> None:
    one = changed(measured("ring", "star", 1.0), work_hash="one")
    other = changed(measured("grid", "full", 1.5), work_hash="one")
    failed = changed(measured("owner", "star", 2.0), work_hash="one", status=Status.ERROR)
    nameless = [measured(name, "star", time_s) for name, time_s in (("usp", 1.7), ("stripe", 1.9))]
    assert "rows of one plan differ by" not in flat(printed([one, other, failed, *nameless], 80))
    level = changed(measured("owner", "star", 1.002), work_hash="one")
    assert "rows of one plan differ by" not in flat(printed([one, level], 80))
    twins = [simulated(name, "star", at, work_hash="one") for at, name in enumerate(NAMES[:2], 1)]
    lines = printed(twins, 80)
    assert "rows of one plan differ by" not in flat(lines)
    assert "*" not in row(lines, "zigzag")
    assert "star ring 1000" in flat(lines)  # alone in the table of the best, too


def test_what_a_record_does_not_know_is_a_dash() -> None:
    unknown = dict.fromkeys(("max_rel_error", "bytes_sent_per_rank", "imbalance"))
    entry = changed(measured("ring", "star", 1.0), **unknown)
    assert row(printed([entry], 80), "ring").split()[-4:] == ["—", "—", "3.00", "—"]


def test_more_ranks_than_cores_are_told() -> None:
    assert "8 ranks on 7 cores take turns" in flat(printed([measured("ring", "star", 1, 0, 7)], 80))
    assert "take turns" not in flat(printed([measured("ring", "star", 1, 0, 8)], 80))
    both = [changed(measured("ring", "star", 1, 0, 3), cp=cp) for cp in (4, 8)]
    assert flat(printed(both, 80)).count("on 3 cores take turns") == 2


def test_the_same_plan_under_two_names_is_told() -> None:
    entries = [
        simulated(name, pattern, 1.0, work_hash=f"{pattern} {work}", resolved=resolved)
        for pattern in ("full", "star")
        for name, resolved, work in (
            ("ring", "ring", 1),
            ("ring-classic", "ring-classic", 1 if pattern == "full" else 2),
            ("zigzag", "zigzag", 3),
            ("double_ring", "double_ring:inner=8", 3),
        )
    ]
    same = ["ring = ring-classic (full)", "zigzag = double_ring:inner=8"]
    assert same_plans(entries) == same
    assert f"same plan: {same[0]} same plan: {same[1]}" in flat(printed(entries, 80))
    assert same_plans([simulated("ring", "star", 1.0), simulated("usp", "star", 1.0)]) == []
    both = [changed(measured(name, "star", 1.0), work_hash="one") for name in ("ring", "owner")]
    assert "same plan: ring = owner" in flat(printed(both, 80))


def test_a_placement_that_loads_ranks_unevenly_is_told_unless_another_is_there() -> None:
    def entry(name: str, imbalance: float | None) -> CellRecord:
        return simulated(name, "causal", 1.0, imbalance=imbalance)

    uneven = [entry("owner", 1.75), entry("owner", 1.5), entry("ring", 1.75), entry("usp", 1.1)]
    text = flat(printed(uneven, 80))
    assert "owner: with its placement some rank has up to 1.75 times the mean work" in text
    assert "try owner:placement=zigzag, stripe, balanced, documents, ptrr" in text
    assert "ring: with its placement" in text
    assert text.count("; try ") == 2
    both = [*uneven, entry("owner:placement=zigzag", 1.0)]
    assert "try owner" not in flat(printed(both, 80))
    assert "; try " not in flat(printed([entry("owner", None), entry("peer:x/y", 2.0)], 80))


def test_others_code_stands_unbroken_in_80_columns_and_its_dashes_are_explained() -> None:
    longest = measured("peer:ring-flash-attn/zigzag", "star", 1.0)
    text = printed([measured("ring", "star", 1.0), longest], 80)
    assert any(line.startswith("ring-flash-attn/zigzag ") for line in text)
    assert "implementation, peer:NAME/NAME on the command line; —: unknown, because" in flat(text)
    assert "another project's implementation" not in flat(
        printed([measured("ring", "star", 1.0)], 80)
    )


def test_a_heading_says_what_tells_problems_apart() -> None:
    entry = changed(simulated("ring", "star", 1.0), batch=2, seqlen_kv=98304)
    lines = printed([changed(entry, runtime="eager-torch", dtype="float16")], 80)
    said = "cp=8 S=64k eager-torch heads=32/8 D=128 B=2 keys=96k float16 backward"
    assert f"h100-8x8: {said}" in lines


def test_what_looks_like_markup_is_text() -> None:
    for make in (simulated, measured):
        entry = changed(make("ring", "star", 1.0), pattern="[/b]", resolved="[red]x")
        text = flat(printed([entry], 80))
        assert "[/b]" in text
        assert "[red]x" in text


def test_layers_are_told_from_attention() -> None:
    layer = changed(simulated("ring", "star", 1.0), scope="layer", hidden=96, rotary=1e4)
    titles = [
        line
        for line in printed([simulated("ring", "star", 1.0), layer], 200)
        if re.search(r"S=\w+ .*D=", line)
    ]
    assert len(titles) == 2
    assert "layer hidden=96 rotary=10000" in titles[1]
    widest = changed(layer, hidden=None, rotary=None)
    assert "layer hidden=4096 heads=32/8" in " ".join(printed([widest], 200))


def test_what_did_not_run_is_listed_with_its_reason_once() -> None:
    place = config("ulysses", "star", Where.SIMULATED)
    refused = [
        record(place, status, {}, reason=f"ulysses: too few heads\nmore {n}")
        for n, status in enumerate([Status.ILLEGAL, Status.ILLEGAL, Status.OOM])
    ]
    lines = printed([simulated("ring", "star", 1.0), *refused], 80)
    assert "illegal: ulysses: too few heads (2 cells)" in lines
    assert "oom: ulysses: too few heads" in lines
    assert "oom" in row(lines, "ulysses")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234e-4, "0.12"),
        (9.994e-3, "9.99"),
        (9.996e-3, "10.0"),
        (0.09994, "99.9"),
        (0.09996, "100"),
        (12.3456, "12346"),
    ],
)
def test_milliseconds_have_three_digits(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


def test_bytes_have_two_digits() -> None:
    sizes = (700, 18 * 2**10, 600 * 2**10, 3.14 * 2**20, 0.56 * 2**30, 9.96 * 2**30, 71.2 * 2**30)
    texts = [memory(size) for size in sizes]
    assert texts == ["0.68K", "18K", "0.59M", "3.1M", "0.56G", "10G", "71G"]


def test_tokens_are_shortened_where_they_are_round() -> None:
    assert [short(n) for n in (1000, 65536, 3 * 2**20, 2**20 + 1024)] == [
        *("1000", "64k", "3m", "1025k"),
    ]


def test_a_calibration_is_named_once_with_its_errors_and_what_lies_outside() -> None:
    def predicted(name: str, pattern: str, error: float | None, *, inside: bool) -> CellRecord:
        where = "inside" if inside else "OUTSIDE"
        said = f"calibration lab/2026-01-02; {where} its range, expected error {error}"
        values = {"calibration": said, "inside_range": inside, "expected_error": error}
        return simulated(name, pattern, 1.0, **values)

    records = [
        predicted("ring", "star", 0.04, inside=True),
        predicted("zigzag", "star", 0.08, inside=True),
        predicted("stripe", "star", None, inside=False),
        predicted("usp", "full", None, inside=False),
    ]
    text = flat(printed(records, 80))
    said = "calibration lab/2026-01-02; expected error 4% to 8%; error unknown outside its range"
    assert text.count("lab/2026-01-02") == 1
    assert f"{said} (cells: 2 at cp=8 S=64k)" in text
    inside = flat(printed(records[:1], 80))
    assert "lab/2026-01-02; expected error 4%" in inside
    assert "outside" not in inside
    assert "expected error unknown" in flat(printed(records[3:], 80))
    assert "outside" not in flat(printed([simulated("ring", "star", 1.0)], 80))


def test_strategies_that_were_tried_at_some_sizes_alone_are_named() -> None:
    records = [
        *grid(simulated, ("ring", "usp")),
        *(changed(entry, cp=16) for entry in grid(simulated, ("ring",))),
    ]
    assert "note: usp: tried at cp=8 S=64k only" in flat(printed(records, 80))
    elsewhere = changed(measured("zigzag", "star", 1.0), cp=4)
    assert "alone" not in flat(printed([*grid(simulated), elsewhere], 80))


def test_kernel_runtime_and_p90_stand_beside_a_predicted_time() -> None:
    said = "calibration lab/2026-01-02; kernel flash-attn-3; inside its range, expected error 4%"
    values = {"inside_range": True, "expected_error": 0.04, "expected_error_p90": 0.09}
    one = simulated("ring", "star", 1.0, calibration=said, **values)
    one = replace(one, config=replace(one.config, runtime=Runtime.TE))
    text = flat(printed([one], 80))
    wanted = (
        "lab/2026-01-02; kernel flash-attn-3; runtime te; expected error 4% (9 in 10 within 9%)"
    )
    assert wanted in text
