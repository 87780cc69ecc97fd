"""Tables of a sweep: readable at 80 and at 200 columns, nothing cut, the best marked."""

import re
from io import StringIO

import pytest
from rich.console import Console

from harness.cell import Status, record
from harness.config import Config, Where
from harness.problem import Direction
from harness.records import Record
from harness.tables import milliseconds, print_sweep, short

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


def simulated(strategy: str, pattern: str, time_s: float) -> Record:
    place = config(strategy, pattern, Where.SIMULATED)
    return record(place, Status.OK, {}, time_s=time_s, bound_s=0.5, calibration="datasheet")


def measured(strategy: str, pattern: str, time_s: float) -> Record:
    return record(
        config(strategy, pattern, Where.GLOO),
        Status.OK,
        {},
        time_s=time_s,
        p20_s=0.9 * time_s,
        p80_s=1.2 * time_s,
        exposed_comm_s=0.003,
        bytes_sent_per_rank=3 * 2**20,
        imbalance=1.75,
        max_rel_error={"dq": 1.25e-7, "dk": 3.5e-8},
    )


def grid(make: object, names: tuple[str, ...] = NAMES) -> list[Record]:
    assert callable(make)
    return [
        make(name, pattern, 1.234 - 0.1 * row if row < 4 else 1.3)
        for row, name in enumerate(names)
        for pattern in PATTERNS
    ]


def printed(records: list[Record], width: int) -> list[str]:
    out = StringIO()
    print_sweep(Console(file=out, width=width), records)
    return out.getvalue().splitlines()


def row(lines: list[str], name: str) -> str:
    return next(line for line in lines if line.startswith(name + " "))


@pytest.mark.parametrize("width", [80, 100, 119, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width: int) -> None:
    lines = printed(grid(simulated) + grid(measured), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for name in NAMES:
        assert f"{name} " in text
    assert len(re.findall(r"1234\s+2\.5×", text)) == len(PATTERNS)


def test_six_patterns_fit_side_by_side_into_80_columns() -> None:
    lines = printed(grid(simulated, NAMES[:4]), 80)
    assert len(re.findall(r"1234 2\.5×", row(lines, "ring"))) == 6
    header = lines[1].split() + lines[2].split()
    assert {"global_", "local", *PATTERNS} - set(header) == {"global_local"}


def test_a_name_that_leaves_no_room_moves_patterns_into_another_table() -> None:
    lines = printed(grid(simulated), 80)
    rows = [line for line in lines if line.startswith("ring ")]
    counts = [len(re.findall("2.5×", line)) for line in rows]
    assert sum(counts) == 6
    assert len(counts) == 2


@pytest.mark.parametrize("width", [80, 200])
def test_the_best_of_each_pattern_is_marked_and_the_bound_beside_it(width: int) -> None:
    line = row(printed(grid(simulated), width), "double_ring")
    assert "934* 1.9×" in line
    assert "*" not in row(printed(grid(simulated), width), "zigzag")


def test_equal_times_are_all_best() -> None:
    lines = printed([simulated(name, "star", 0.75) for name in ("ring", "usp")], 80)
    assert "750* 1.5×" in row(lines, "ring")
    assert "750* 1.5×" in row(lines, "usp")


def test_with_room_the_speed_up_over_ring_is_shown() -> None:
    assert "934* 1.9×  1.32r" in row(printed(grid(simulated), 200), "double_ring")
    assert "1.32" not in "\n".join(printed(grid(simulated), 80))


def test_a_measured_row_has_time_speed_up_error_bytes_wait_and_imbalance() -> None:
    narrow, wide = (
        next(line for line in printed(grid(measured), width) if "star" in line and "zigzag" in line)
        for width in (80, 200)
    )
    assert narrow.split() == [
        *("star", "zigzag", "1134", "1.09×", "1.25e-07", "3.00", "3.00", "1.75"),
    ]
    assert wide.split()[3] == "1021-1361"


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


def test_tokens_are_shortened_where_they_are_round() -> None:
    assert [short(n) for n in (1000, 65536, 3 * 2**20, 2**20 + 1024)] == [
        *("1000", "64k", "3m", "1025k"),
    ]
