"""Structures written as JSON: exactly the same when read, and nothing else is taken for one."""

import gzip
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.base.cache import write_kept
from harness.cluster.calibration import Calibration, calibration
from harness.cluster.machine import Runtime
from harness.cluster.presets import cluster
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.planning.strategy import Context
from harness.prepare import scalable_plan_cache
from harness.prepare.scalable_plan import Structure, structure
from harness.prepare.scalable_plan_cache import structure_of
from harness.prepare.scalable_plan_json import structure_from, text_of
from harness.proved.plans import proved
from harness.records.config import Config, Where
from harness.schedule.post_late import posted_late
from harness.simulate.jobs import LaunchCounts, Need, Size, UntimedJob
from harness.simulate.tile_calls import TimedCall
from harness.verify.proof import verify
from strategies import strategy
from tests.support import layer_problem, problem

H800 = calibration("h800")
TWO_NODES = replace(H800, hardware=replace(H800.hardware, gpus_per_node=4))
CPU = calibration("local-cpu")
ODD = problem("causal", 643, (12, 6), dims=(24, 40), cp=6)
WINDOW = problem("window:left=97,right=3", 643, (12, 6), dims=(24, 40), batch=1, cp=6)
CASES: dict[str, Problem] = {
    "ring": ODD,
    "zigzag": WINDOW,
    "stripe": ODD,
    "grid:rows=2": problem("full", 643, (12, 6), seqlen_kv=389, cp=6),
    "usp:2x3": ODD,
    "ulysses": WINDOW,
    "allgather": ODD,
    "owner": ODD,
    "ultraattn:seconds=0.05,levels=remap+node+device+kernel+schedule": ODD,
    "upipe": layer_problem("window:left=17,right=2", cp=2),
}
CELL = Config(
    strategy="allgather",
    pattern="causal",
    cp=3,
    seqlen_q=131,
    seqlen_kv=131,
    heads_q=6,
    heads_kv=2,
    head_dim=24,
    batch=2,
    transport=Where.SIMULATED,
    cluster="h800",
    runtime=Runtime.EAGER,
)


def program(text: str, direction: Direction) -> Program:
    return verify(strategy(text).plan(CASES[text], direction, Context(gpus_per_node=4)))


def forms(made: Program, fitted: Calibration) -> Iterator[Structure]:
    """Both runtimes, folded and not."""
    for eager, fold in product((False, True), repeat=2):
        yield structure(made, fitted, eager=eager, fold=fold)


def small() -> Structure:
    """One with every table in it, but few parts."""
    return structure(program("zigzag", Direction.FORWARD), TWO_NODES, eager=True)


def text(content: bytes) -> Any:  # noqa: ANN401  # whatever JSON has
    return json.loads(gzip.decompress(content))


def packed(value: object) -> bytes:
    return gzip.compress(json.dumps(value).encode(), mtime=0)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", CASES)
def test_a_structure_comes_back_from_its_text_to_the_last_bit(
    name: str, direction: Direction
) -> None:
    made = program(name, direction)
    for fitted in (TWO_NODES, CPU):
        for before in forms(made, fitted):
            after = structure_from(text_of(before))
            assert after == before
            assert repr(after) == repr(before)  # True is no 1, and 1.0 is neither


def attending_again(before: Structure) -> Structure:
    """As if a backward plan made anew what was not saved; no strategy's does."""
    parts = tuple(
        part._replace(
            need=part.need._replace(again=True),
            launched=tuple(counts._replace(again=counts.calls) for counts in part.launched),
        )
        for part in before.shape.parts
    )
    return replace(before, shape=replace(before.shape, parts=parts))


def test_every_field_comes_back_with_more_than_one_value() -> None:
    made = [program(name, direction) for name, direction in product(CASES, Direction)]
    made.append(verify(posted_late(made[-3].plan, cluster("h100-1x8"))))
    befores = [before for each in made for before in forms(each, TWO_NODES)]
    befores.append(attending_again(small()))
    parts: set[UntimedJob] = set()
    for before in befores:
        after = structure_from(text_of(before))
        assert after == before
        parts.update(after.shape.parts)
    needs = {part.need for part in parts}
    values: dict[type, set[Any]] = {
        UntimedJob: parts,
        Need: needs,
        Size: {need.size for need in needs},
        TimedCall: {call for need in needs for call in need.calls},
        LaunchCounts: {counts for part in parts for counts in part.launched},
    }
    for kind, seen in values.items():
        for name in kind.__annotations__:
            assert len({getattr(value, name) for value in seen}) > 1, (kind, name)


def test_what_parts_share_is_written_once() -> None:
    even = problem("full", 657, (12, 6), dims=(24, 40), cp=9)
    made = verify(strategy("ring").plan(even, Direction.BACKWARD, Context(gpus_per_node=4)))
    whole = structure(made, TWO_NODES, eager=True, fold=False)
    written, parts = text(text_of(whole)), whole.shape.parts
    assert len(written["needs"]) == len({part.need for part in parts})
    assert len(written["hosts"]) == len({counts for part in parts for counts in part.launched})
    rows = set(map(tuple, written["rows"]))
    assert len(rows) == len(written["rows"])
    assert {part.queues for part in parts} <= rows
    # Ranks wait in step for what came as many parts before.
    assert len(set(written["parts"]["after"])) < len({part.after for part in parts}) / 3


def test_a_file_that_is_cut_is_refused() -> None:
    content = text_of(small())
    assert structure_from(content) is not None
    for length in range(len(content)):
        assert structure_from(content[:length]) is None


def test_a_flipped_bit_is_refused_or_changes_nothing() -> None:
    before = small()
    content = text_of(before)
    refused = 0
    for at, bit in product(range(len(content)), range(8)):
        flipped = content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]
        after = structure_from(flipped)
        assert after in (None, before)
        refused += after is None
    # A few bits pad the stream, or let zlib copy the same characters from another place.
    assert refused > 0.99 * 8 * len(content)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:  # noqa: ANN401  # as above
    """Everything in a JSON text, each behind its path."""
    yield path, value
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], other: object) -> Any:  # noqa: ANN401  # as above
    """A JSON text with something else at a place."""
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], other)
    return copy


def test_any_value_of_another_type_is_refused() -> None:
    whole = text(text_of(small()))
    assert structure_from(packed(whole)) == small()
    seen = set()
    for path, value in places(whole):
        line = 2 if path[:1] == ("parts",) else 1
        like = [whole["needs"][key][0] if path[0] == "needs" else "any" for key in path[line:][:1]]
        kind = (*path[:line], *like, *path[line + 1 :])
        if kind in seen:
            continue  # the other lines of a table are as its first
        seen.add(kind)
        for other in (None, "", "x", 1, 1.5, True, [], [[]], {}, {"0": 0}):
            if type(other) is not type(value):
                assert structure_from(packed(changed(whole, path, other))) is None, (path, other)
    assert len(seen) > 100
    assert {("parts", "after", "any"), ("needs", "tile", 1, 0, 4)} <= seen


def test_a_kind_of_job_that_nothing_prices_is_refused() -> None:
    whole = text(text_of(small()))
    tile = [need[0] for need in whole["needs"]].index("tile")
    for other in ("tiles", "Tile", "", "attend"):
        assert structure_from(packed(changed(whole, ("needs", tile, 0), other))) is None


def test_a_text_that_lacks_anything_is_refused() -> None:
    whole = text(text_of(small()))
    for name in whole:
        assert structure_from(packed({k: v for k, v in whole.items() if k != name})) is None
    for name, column in whole["parts"].items():
        rest = {k: v for k, v in whole["parts"].items() if k != name}
        assert structure_from(packed({**whole, "parts": rest})) is None
        shorter = {**rest, name: column[:-1]}
        assert structure_from(packed({**whole, "parts": shorter})) is None
        longer = {**rest, name: [*column, column[0]]}
        assert structure_from(packed({**whole, "parts": longer})) is None
    for nothing in ({}, ""):
        none = dict.fromkeys(whole["parts"], nothing)
        assert structure_from(packed({**whole, "parts": none})) is None
    for table in ("needs", "hosts", "rows"):
        assert structure_from(packed({**whole, table: whole[table][:-1]})) is None
        first = whole[table][1]
        assert first
        for line in (first[:-1], [*first, 0]):
            if table != "rows":
                lines = [whole[table][0], line, *whole[table][2:]]
                assert structure_from(packed({**whole, table: lines})) is None


def test_lines_that_no_table_has_are_refused() -> None:
    before = small()
    whole = text(text_of(before))
    for name, line in product(whole["parts"], (-1, 10**6)):
        after = structure_from(packed(changed(whole, ("parts", name, 3), line)))
        if name == "task" and line > 0:  # tasks are not in it
            assert after is not None
            assert after.shape.parts[3].task == line
        else:
            assert after is None
    row = len(whole["rows"])
    more = {**whole, "rows": [*whole["rows"], [len(whole["hosts"])]]}
    assert structure_from(packed(more)) == before
    assert structure_from(packed(changed(more, ("parts", "launched", 3), row))) is None


@pytest.mark.parametrize("name", ["after", "latest", "gates"])
def test_a_part_that_waits_for_no_earlier_one_is_refused(name: str) -> None:
    whole = text(text_of(small()))
    row, at = len(whole["rows"]), 11
    for back in (-1, 0, 1, at, at + 1):
        more = {**whole, "rows": [*whole["rows"], [back]]}
        after = structure_from(packed(changed(more, ("parts", name, at), row)))
        if 0 < back <= at:
            assert after is not None
            assert getattr(after.shape.parts[at], name) == (at - back,)
        else:
            assert after is None


@pytest.mark.parametrize(
    "content",
    [b"", b"torn", packed([]), packed({}), packed(None), gzip.compress(b"[" * 10**5)],
    ids=["empty", "torn", "list", "object", "null", "deep"],
)
def test_what_is_no_structure_at_all_is_refused(content: bytes) -> None:
    assert structure_from(content) is None


class Trap:
    """What writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "sprung")


def test_nothing_that_is_read_is_run(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    content = pickle.dumps(Trap(trap))
    for kept in (content, gzip.compress(content)):
        assert structure_from(kept) is None
    assert not trap.exists()
    pickle.loads(content)
    assert trap.exists()


@pytest.mark.parametrize("direction", Direction)
def test_a_damaged_file_is_planned_anew_and_mended(
    direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = []

    def counted(*args: object) -> Program:
        proofs.append(args)
        return proved(*args)

    monkeypatch.setattr(scalable_plan_cache, "proved", counted)
    cell = replace(CELL, direction=direction)
    before = structure_of(cell, H800, tmp_path)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    content = file.read_bytes()
    assert structure_of(cell, H800, tmp_path) == before
    assert len(proofs) == 1
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]
    checksum, _, kept = content.partition(b"\n")
    wrong = {**text(kept), "tokens": 3}
    edited = checksum + b"\n" + packed(wrong)
    write_kept(file, packed({**wrong, "tokens": "3"}))
    of_no_type = file.read_bytes()
    damages = (content[:-1], flipped, edited, of_no_type, packed(wrong), b"")
    for times, damaged in enumerate(damages, start=2):
        file.write_bytes(damaged)
        assert structure_of(cell, H800, tmp_path) == before
        assert len(proofs) == times
        assert file.read_bytes() == content
        assert structure_of(cell, H800, tmp_path) == before
        assert len(proofs) == times
