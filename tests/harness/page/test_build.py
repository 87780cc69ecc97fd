"""The page: whole, escaped, useful when there is little, and the same numbers as the records."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product

import pytest

from harness.page.answer import answers, headline
from harness.page.bar_charts import time_parts
from harness.page.build import build_page
from harness.page.heat import heat_tables
from harness.page.provenance import commands
from harness.plan.problem import Direction, Dtype
from harness.records.cell import CellRecord, Status
from harness.records.config import Config, Where
from harness.report.labels import legend, pattern_labels
from tests.harness.made import record

VOID = {"meta", "link", "input", "br", "hr", "path", "use", "rect", "circle"}
CELL = Config(
    strategy="ring",
    pattern="causal",
    cp=4,
    seqlen_q=3072,
    seqlen_kv=3072,
    heads_q=6,
    heads_kv=2,
    head_dim=16,
    dtype=Dtype.BFLOAT16,
    transport=Where.SIMULATED,
    cluster="h100-8x8",
)
CONTEXT = {"python": "3.11", "packages": {"torch": "2.13"}}
SPEED = {"ring": 1.0, "zigzag": 0.5, "ulysses": 0.51}


def made(cell: Config, time_s: float | None = 1.0, **values: object) -> CellRecord:
    if time_s is None:
        return record(cell, Status.ILLEGAL, CONTEXT, reason=str(values.get("reason", "no")))
    known = {"bound_s": time_s / 4, "imbalance": 1.5, "exposed_comm_s": time_s / 8}
    return record(cell, Status.OK, CONTEXT, time_s=time_s, **{**known, **values})


def some() -> Iterator[CellRecord]:
    for name, cp, pattern, way in product(SPEED, (2, 4), ("causal", "star"), Direction):
        cell = replace(CELL, strategy=name, cp=cp, pattern=pattern, direction=way)
        yield made(cell, SPEED[name] / cp, peak_bytes=10**9)


class _Tags(HTMLParser):
    """Finds tags that are not closed, identities, and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [value for value in [values.get("id")] if value]
        if tag in ("script", "img", "link", "iframe"):
            self.loads += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(html: str) -> _Tags:
    tags = _Tags()
    tags.feed(html)
    assert not tags.open
    assert len(tags.ids) == len(set(tags.ids))
    assert tags.loads == ["data:,"]
    return tags


def test_a_page_is_whole_loads_nothing_and_names_what_it_shows() -> None:
    page = build_page(list(some()))
    tags = read(page.html)
    assert {"answer", "heat", "charts", "cells", "provenance"} <= set(tags.ids)
    assert len(page.charts) == 6  # degrees, parts and memory, each forward and backward
    for chart in page.charts:
        assert 'role="img" aria-label="' in chart.svg
        assert "currentColor" in chart.svg
        named = set(re.findall(r'\sid="([^"]+)"', chart.svg))
        assert named == set(re.findall(r'(?:href="#|url\(#)([^")]+)', chart.svg))
    assert "zigzag is the fastest in 4 of 4 problems" in page.html


def test_names_from_records_are_text() -> None:
    evil, name = replace(CELL, pattern="</table><b onx=1>"), "<script>alert(1)</script>"
    page = build_page(
        [
            made(evil, resolved=name),
            made(replace(evil, cp=2), resolved=name),
            made(CELL, None, reason="<img src=x>"),
        ],
        title="</title><script>",
        notes=["<i>"],
    )
    read(page.html)
    assert "alert(1)" in page.html
    for raw in ("<script>alert", "<b onx", "<img", "<i>", "</title><script>"):
        assert raw not in page.html


@pytest.mark.parametrize("records", [[], [made(CELL, None, reason="ring: cp (4) is odd here")]])
def test_a_page_of_nothing_or_of_refusals_alone_says_so(records: list[CellRecord]) -> None:
    page = build_page(records)
    read(page.html)
    assert not page.charts
    if records:
        assert "No cell ran" in page.html
        assert "ring: cp (4) is odd here" in page.html
    else:
        assert "There are no results yet" in page.html


def test_a_page_of_two_thousand_cells_is_small() -> None:
    cells = [
        made(replace(CELL, strategy=name, seqlen_q=n, seqlen_kv=n, cp=cp, batch=batch), 1.0 + n)
        for name, n, cp, batch in product(SPEED, range(64, 96), (2, 4, 8), range(1, 8))
    ]
    assert len(cells) > 2000
    assert len(build_page(cells).html) < 3e6


def test_the_answer_names_ties_and_the_next_with_its_distance() -> None:
    rows = answers(list(some()))
    assert {(row.cp, row.pattern) for row in rows} == set(product((2, 4), ("causal", "star")))
    for row in rows:
        assert row.best.names == ("zigzag",)
        assert row.best.near == ("ulysses",)  # 2 % slower, where the error is unknown
        assert (row.second, row.margin) == ("ring", pytest.approx(1.0))
        assert row.best.time_s == pytest.approx(2 * 0.5 / row.cp)  # both directions
    assert "4 of the answers are ties" in headline(rows)


def test_the_headline_names_all_who_win_as_often() -> None:
    first, second, *_ = answers(list(some()))
    other = replace(second, best=replace(second.best, names=("usp:2x2",)))
    assert headline([first, other]).startswith(
        "usp:2x2 and zigzag are each the fastest in 1 of 2 problems"
    )
    assert headline([first, first, other]).startswith("zigzag is the fastest in 2 of 3 problems")


def test_a_strategy_without_one_direction_is_no_answer() -> None:
    records = [e for e in some() if not (e.label == "zigzag" and e.config.direction == "backward")]
    assert {row.best.names[0] for row in answers(records)} == {"ulysses"}


def test_parts_add_up_to_the_time_and_none_is_negative() -> None:
    for exposed in (0.0, 0.3, 5.0):
        entry = made(CELL, 1.0, exposed_comm_s=exposed, imbalance=1.5, bound_s=0.5)
        parts = time_parts(entry)
        assert sum(parts.values()) == pytest.approx(1.0)
        assert min(parts.values()) >= 0.0
        assert parts["imbalance"] == pytest.approx(0.25)
    assert time_parts(made(CELL, None)) == {}
    assert time_parts(made(CELL, 1.0, bound_s=None)) == {}


def test_a_table_shades_by_the_distance_to_the_best_and_gives_one_reason_a_row() -> None:
    refused = [
        made(replace(CELL, strategy="usp", pattern=p), None, reason="no")
        for p in ("causal", "star")
    ]
    forward = [e for e in some() if e.config.direction == "forward" and e.config.cp == 4]
    table = next(heat_tables([*forward, *refused]))
    rows = {row.name: row for row in table.rows}
    assert [c.shade for c in rows["ring"].cells if c] == [pytest.approx(0.5)] * 2
    assert [c.best for c in rows["zigzag"].cells if c] == [True, True]
    assert not any(c.best for c in rows["ulysses"].cells if c)
    assert rows["usp"].refusal == "illegal: no"
    assert not rows["ring"].refusal


def test_long_patterns_get_a_label_and_a_legend() -> None:
    long = "documents:lengths=" + "+".join(["8"] * 384)
    labels = pattern_labels([made(CELL), made(replace(CELL, pattern=long))])
    assert labels == {"causal": "causal", long: "documents #1"}
    assert legend(labels) == {"documents #1": long}
    html = build_page([made(replace(CELL, pattern=long))]).html
    assert html.count(long) == 2  # in the legend, and in the command


def test_measured_and_simulated_records_of_one_cell_make_a_pair() -> None:
    here = replace(CELL, transport=Where.GLOO, cluster=None)
    other = replace(here, cp=2)
    records = [made(CELL, 1.0), made(here, 2.0), made(other, 3.0), made(replace(CELL, cp=2), 3.0)]
    page = build_page(records)
    assert page.charts[-1].key == "predicted"
    assert page.charts[-1].note.startswith("2 cells, off by 25% on average, at worst 50%")
    assert all(chart.key != "predicted" for chart in build_page(records[:3]).charts)


def test_the_command_repeats_the_cells() -> None:
    from harness import cli
    from harness.commands.sweep import _cells

    (command,) = commands(list(some()))
    words = re.sub(r"^python -m harness ", "", command).split()
    found = {cell.hash for cell in _cells(cli.parser().parse_args(words))}
    assert found >= {replace(e.config, runtime="graph").hash for e in some()}
