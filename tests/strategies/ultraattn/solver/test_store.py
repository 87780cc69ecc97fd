"""The cache of assignments: what it keeps, and that nothing can break it."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from harness.base.cache import write_kept
from harness.schedule.scip import SolverStatus
from strategies.ultraattn.solver import store as module
from strategies.ultraattn.solver.assign import Assigned, assign
from strategies.ultraattn.solver.instance import Instance, account, all_received, most
from strategies.ultraattn.solver.store import Cache, assign_cached, instance_key
from tests.strategies.ultraattn.examples import case

_EASY = case("star", 4, 4)
_HARD = case("causal", 16, 8)


def _never(*_: object, **__: object) -> Assigned:
    raise AssertionError("solved again")


def test_a_proved_answer_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "new" / "folder")
    assert cache.get(_EASY) is None
    first = assign_cached(_EASY, cache, prove=True)
    monkeypatch.setattr(module, "assign", _never)
    assert assign_cached(_EASY, cache, prove=True) == first


def test_the_key_knows_every_field() -> None:
    work = tuple(tuple(w and 2 for w in row) for row in _EASY.work)
    others = [
        replace(_EASY, cap=5),
        replace(_EASY, work=work),
        replace(_EASY, row_owner=(0, 0, 1, 1)),
        replace(_EASY, column_owner=(3, 2, 1, 0)),
        replace(_EASY, devices=5),
        replace(_EASY, fixed=((0, 0, 0),)),
        replace(_EASY, inside=_EASY.work),
        replace(_EASY, weights=replace(_EASY.weights, row_in=2)),
    ]
    assert len({instance_key(instance) for instance in [_EASY, *others]}) == 1 + len(others)


def test_an_answer_is_never_worsened(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    best = assign(_EASY, prove=True)
    turned = tuple(
        tuple(None if d is None else (d + 1) % _EASY.devices for d in row) for row in best.cells
    )
    lines = account(_EASY, turned)
    worse = replace(
        best,
        cells=turned,
        value=most(lines),
        volume=all_received(lines),
        status=SolverStatus.FEASIBLE,
    )
    assert worse.value > best.value
    cache.put(_EASY, best)
    cache.put(_EASY, worse)
    assert cache.get(_EASY) == best


def test_an_unproved_answer_is_kept_and_improved_where_asked(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    good = assign(_HARD, seconds=0.5)
    cache.put(_HARD, good)
    assert assign_cached(_HARD, cache, seconds=0.5) == good
    assert assign_cached(_HARD, cache, seconds=0.3) == good
    longer = assign_cached(_HARD, cache, seconds=good.seconds + 0.5)
    assert longer.seconds >= good.seconds + 0.5
    assert (longer.value, -longer.bound) <= (good.value, -good.bound)
    assert cache.get(_HARD) == longer


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "",
        lambda _: "[1, 2]",
        lambda text: text.replace('"bound"', '"band"'),
        lambda text: json.dumps({**json.loads(text), "cells": [[0]]}),
        lambda text: json.dumps({**json.loads(text), "value": 1}),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_a_spoiled_file_is_a_miss_and_is_replaced(
    tmp_path: Path, checked: bool, spoil: object
) -> None:
    cache = Cache(tmp_path)
    first = assign_cached(_EASY, cache, prove=True)
    path = cache.path(_EASY)
    assert callable(spoil)
    checksum, _, kept = path.read_text().partition("\n")
    if checked:
        write_kept(path, spoil(kept).encode())
    else:
        path.write_text(checksum + "\n" + spoil(kept))
    assert cache.get(_EASY) is None
    assert assign_cached(_EASY, cache, prove=True).value == first.value
    assert cache.get(_EASY) is not None


def test_ctrl_c_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    found = assign(_EASY)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            cache.put(_EASY, found)
    assert list(tmp_path.iterdir()) == []
    cache.put(_EASY, found)
    assert cache.get(_EASY) == found


def test_an_edited_file_is_a_miss_even_where_it_could_be_right(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put(_HARD, assign(_HARD, seconds=0.2))
    path = cache.path(_HARD)
    edited = path.read_text().replace('"status": "feasible"', '"status": "optimal"')
    assert edited != path.read_text()
    path.write_text(edited)
    assert cache.get(_HARD) is None


def _hammer(folder: Path, instance: Instance, found: Assigned, times: int) -> None:
    cache = Cache(folder)
    for k in range(times):
        cache.path(instance).unlink(missing_ok=True)
        cache.put(instance, found)
        kept = cache.get(instance)
        assert kept is None or kept == found, k


def test_many_processes_share_a_folder(tmp_path: Path) -> None:
    found = assign(_EASY, prove=True)
    assert found.status is SolverStatus.OPTIMAL
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_hammer, args=(tmp_path, _EASY, found, 50)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert not list(tmp_path.glob("*.part"))
