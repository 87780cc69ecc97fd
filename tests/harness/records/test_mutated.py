"""Records that anything may have been done to, through everything that reads records.

Whatever a line holds, comparing and summing up end in an answer or in a refusal in words: never in
another exception, and never with a control character, NaN or infinity in what is printed or kept.
"""

import argparse
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import cli
from harness.commands.sweep import _summarise
from harness.errors import HarnessError
from harness.plan.problem import Direction
from harness.records.cell import Status
from harness.records.legible import ResultFolder
from harness.records.store import FILE
from harness.report.reading import read_cell
from tests.harness.made import record
from tests.harness.records.test_cell import MEASURED, SIMULATED

CONTEXT = {"python": "3.12", "cores": 3, "packages": {"torch": "2"}, "variables": {}}
RECORDS = [
    record(
        replace(MEASURED, strategy=name, direction=way),
        Status.OK,
        CONTEXT,
        time_s=1.5,
        samples_s=[1.0 + 0.1 * at for at in range(11)],
        p20_s=1.2,
        p80_s=1.8,
        bytes_sent_per_rank=77,
        peak_bytes=99,
        imbalance=1.5,
        max_rel_error={"out": 1e-7},
        plan_hash="aa",
        work_hash="bb",
    )
    for name in ("ring", "peer:yunchang/ulysses")
    for way in Direction
] + [
    record(
        replace(SIMULATED, strategy=name),
        Status.OK,
        CONTEXT,
        time_s=0.5,
        bound_s=0.25,
        calibration="calibration h800/2026-01-02; inside its range, expected error 4%",
        inside_range=True,
        expected_error=0.04,
        work_hash="cc",
        link_bytes={"nvlink": 3},
    )
    for name in ("ring", "usp:2x3")
]
FAILED = record(
    replace(SIMULATED, strategy="zigzag"), Status.ERROR, CONTEXT, reason="it\x1b[31m broke"
)
LINES: list[dict[str, Any]] = [
    json.loads(json.dumps(each.as_json())) for each in [*RECORDS, FAILED]
]

TEXTS = st.sampled_from(["", "\x1b[2J", "a\x07b", "\ud800", "[/b]", "[b]x", "|\n|", "no", "ring"])
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 7, 2**63, -(2**70), 10**400, 0.0, 5e-324, 1e-12, 1e12, 1.8e308]),
    st.floats(allow_nan=True, allow_infinity=True),
)
OTHERS = st.one_of(
    st.none(),
    st.booleans(),
    st.lists(NUMBERS, max_size=3),
    st.dictionaries(TEXTS, NUMBERS | TEXTS, max_size=3),
)


def odd(value: object) -> st.SearchStrategy[object]:
    """Values in the place of one: mostly of its own kind, so that more than its type is wrong."""
    if isinstance(value, str):
        return TEXTS | TEXTS | NUMBERS | OTHERS
    if isinstance(value, int | float):
        return NUMBERS | NUMBERS | TEXTS | OTHERS
    return TEXTS | NUMBERS | OTHERS


NAMES = st.sampled_from([*LINES[0], "another"])


@st.composite
def files(draw: st.DrawFn) -> str:
    """Lines of records, of which some have other values, lack some, or are no records at all."""
    lines = deepcopy(draw(st.permutations(LINES)))
    for _ in range(draw(st.integers(2, 9))):
        line = draw(st.sampled_from(lines))
        name, how = draw(NAMES), draw(st.sampled_from(["set", "set", "into", "drop"]))
        old = line.get(name)
        if how == "drop":
            line.pop(name, None)
        elif how == "into" and isinstance(old, dict):
            inner = draw(st.sampled_from([*old, "more"]))
            old[inner] = draw(odd(old.get(inner)))
        elif how == "into" and isinstance(old, list):
            old.append(draw(odd(1.0)))
        else:
            line[name] = draw(odd(old))
    return "".join(json.dumps(line) + "\n" for line in lines)


def strictly(text: str) -> object:
    """Parse JSON as other tools do: a NaN is none."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} in JSON")

    return json.loads(text, parse_constant=refuse)


def clean(text: str) -> None:
    assert not {sign for sign in text if not sign.isprintable()} - {"\n", "\t"}, text


@cache
def parser() -> argparse.ArgumentParser:
    return cli.parser()


def call(*words: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    args = parser().parse_args(words)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status: int = args.run(args)
        except (ValueError, HarnessError) as error:  # as the command line has it
            status = 2
            err.write(str(error))
    clean(out.getvalue())
    clean(err.getvalue())
    return status, out.getvalue()


def through_everything(text: str) -> None:
    """Compare, tables and summaries of a file, against the records that it was made of."""
    with TemporaryDirectory() as place:
        whole, other = (Path(place) / name for name in ("whole", "other"))
        for folder, content in (
            (whole, "".join(json.dumps(line) + "\n" for line in LINES)),
            (other, text),
        ):
            folder.mkdir()
            (folder / FILE).write_text(content)
        status, out = call("compare", str(other), str(whole), "--json")
        assert status in (0, 1, 2)
        if status < 2:
            strictly(out)
        assert call("compare", str(whole), str(other))[0] in (0, 1, 2)
        summed_up(other)


def summed_up(folder: Path) -> None:
    """What a sweep prints and writes at its end."""
    try:
        results = ResultFolder(folder, read_cell)
    except ValueError as error:
        clean(str(error))
        return
    with results:
        for note in results.aside:
            clean(note)
        records = _summarise(results, [each.config for each in RECORDS])
        strictly(json.dumps([each.as_json() for each in results.records]))
    assert len(records) <= len(RECORDS)
    for name in ("summary.csv", "summary.md"):
        clean((folder / name).read_text().replace("\r\n", "\n"))


QUIET = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@given(files())
@settings(QUIET, max_examples=80)
def test_mutated_records_end_in_an_answer_or_a_refusal(text: str) -> None:
    through_everything(text)


@pytest.mark.slow
@given(files())
@settings(QUIET, max_examples=8000, derandomize=False)
def test_very_many_mutated_records_end_in_an_answer_or_a_refusal(text: str) -> None:
    through_everything(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": "nosuch"}, "strategy (nosuch) is unknown"),
        ({"strategy": "ring:rows=2"}, "rows"),
        ({"time_s": 0}, "time_s (0) must be a number"),
        ({"time_s": float("nan")}, "time_s (nan) must be a number"),
        ({"time_s": "fast"}, "time_s ('fast') must be a number"),
        ({"samples_s": None}, "samples_s (None) must be a list"),
        ({"peak_bytes": []}, "peak_bytes ([]) must be a whole number"),
        ({"environment": 1}, "environment (1) must be an object"),
    ],
)
def test_one_record_that_cannot_be_read_blocks_no_folder(
    change: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, first in (("whole", LINES[0]), ("other", {**LINES[0], **change})):
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in (first, *LINES[1:]))
        (tmp_path / name / FILE).write_text(text)
    assert cli.main(["compare", str(tmp_path / "whole"), str(tmp_path / "other")]) == 1
    out, err = capsys.readouterr()
    assert "missing" in out  # and not faster
    assert "faster" not in out
    assert said in " ".join(err.split())
    assert "set aside" in " ".join(err.split())
    summed_up(tmp_path / "other")
    assert len((tmp_path / "other" / "summary.csv").read_text().splitlines()) == len(LINES)


if __name__ == "__main__":
    count = int(sys.argv[1])
    settings(QUIET, max_examples=count, derandomize=False)(given(files())(through_everything))()
    sys.stdout.write(f"{count} files of mutated records: each ended in an answer or a refusal\n")
