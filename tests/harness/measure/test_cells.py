"""Sweeps: every cell becomes one record, whatever happens to it or to the sweep."""

import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from harness import cli
from harness.base.json_fields import json_text
from harness.measure import cell as measured_cell
from harness.measure.cell import RankSample
from harness.measure.cells import Crews, measure_cells, quantile
from harness.oracle import tolerance
from harness.plan.plan import to_json
from harness.plan.problem import Dtype
from harness.plan.residency import Program
from harness.planning.chosen import Chosen
from harness.prepare.verified_plans import planned_for
from harness.ranks.team import Failure, WorkerError
from harness.records.cell import Status, from_json
from harness.records.config import Config, Where
from harness.records.legible import ResultFolder
from harness.records.store import FILE, ResultFile, read_records
from harness.report.format import worst_error
from harness.report.reading import pending, records_in_order
from harness.sweep import simulate_cells
from harness.sweep.limits import Limits
from tests.harness import sweeps
from tests.harness.made import record

CELL = Config(
    strategy="ring",
    pattern="causal",
    cp=2,
    seqlen_q=29,
    seqlen_kv=29,
    heads_q=6,
    heads_kv=2,
    head_dim=8,
    dtype=Dtype.FLOAT64,
    transport=Where.GLOO,
)
FEW = Limits(warmup=1, iterations=3)


def plans_of(config: Config) -> str:
    """What rank 0 says that all ran."""
    both = planned_for(config)
    return json_text({"plans": [to_json(each.plan) for each in (both.forward, both.backward)]})


class Broken:
    """A crew of which some jobs go wrong."""

    def __init__(self, answers: Sequence[object]) -> None:
        self.answers = list(answers)
        self.alive = True

    def run(self, *_: object, **__: object) -> list[Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            self.alive = False
            raise answer
        return [answer]

    def close(self) -> None:
        self.alive = False


def test_a_measured_cell_has_times_errors_bytes_and_memory() -> None:
    zigzag = replace(CELL, strategy="zigzag")
    ring, other = measure_cells([CELL, zigzag], FEW)
    for entry in (ring, other):
        assert (entry.status, entry.source) == (Status.OK, "measured")
        assert len(entry.samples_s) == 3
        assert 0 < entry.p20_s <= entry.time_s <= entry.p80_s
        assert 0 < entry.max_rel_error["out"] < 1e-12
        assert entry.bytes_sent_per_rank > 0
        assert entry.peak_bytes > 0
    assert ring.plan_hash != other.plan_hash
    json_text([ring.as_json(), other.as_json()])


def test_a_refused_cell_is_illegal_with_the_reason_and_the_next_one_runs() -> None:
    few_heads = replace(CELL, strategy="ulysses", heads_q=1, heads_kv=1)
    refused, ran = measure_cells([few_heads, CELL], FEW)
    assert (refused.status, ran.status) == (Status.ILLEGAL, Status.OK)
    assert "heads" in refused.reason


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (Failure.ERROR, Status.ERROR),
        (Failure.TIMEOUT, Status.TIMEOUT),
        (Failure.OOM, Status.OOM),
    ],
)
def test_a_failed_cell_keeps_reason_and_traceback_and_the_next_gets_a_new_crew(
    kind: Failure, status: Status
) -> None:
    failure = WorkerError(kind, 1, "went wrong", "Traceback: in the worker")
    crews = iter([Broken([failure]), Broken([measured_cell.Refusal("second")])])
    first, second = measure_cells([CELL, replace(CELL, batch=3)], FEW, Crews(lambda _: next(crews)))
    assert first.status == status
    assert first.reason == "rank 1: went wrong"
    assert first.traceback == "Traceback: in the worker"
    assert first.time_s is None
    assert second.reason == "second"


def test_ranks_that_do_not_start_fail_their_cells_once_and_other_degrees_run() -> None:
    starts = []

    def start(cp: int) -> Broken:
        starts.append(cp)
        if cp == 2:
            raise WorkerError(Failure.TIMEOUT, 0, "no answer")
        return Broken([measured_cell.Refusal("ran")])

    cells = [CELL, replace(CELL, batch=3), replace(CELL, cp=3)]
    records = list(measure_cells(cells, FEW, Crews(start)))
    assert starts == [2, 3]
    assert [r.reason for r in records[:2]] == ["2 ranks did not start: rank 0: no answer"] * 2
    assert records[2].reason == "ran"


def test_one_worker_that_dies_at_the_start_costs_no_cell() -> None:
    """It may have been killed from outside: a start that fails at once is tried once more."""
    starts: list[int] = []

    def start(cp: int) -> Broken:
        starts.append(cp)
        if len(starts) == 1:
            raise WorkerError(Failure.ERROR, 1, "was killed (signal 9)")
        return Broken([measured_cell.Refusal("ran"), measured_cell.Refusal("ran")])

    records = list(measure_cells([CELL, replace(CELL, batch=3)], FEW, Crews(start)))
    assert [record.reason for record in records] == ["ran", "ran"]
    assert starts == [2, 2]


def test_degrees_that_cannot_run_here_are_skipped_with_the_reason() -> None:
    (found,) = measure_cells([replace(CELL, cp=7)], FEW, Crews(lambda _: Broken([]), most=4))
    assert (found.status, found.reason) == (
        Status.SKIPPED,
        "7 ranks are more than the 4 that can run here",
    )


def test_a_wrong_result_is_an_error_that_says_how_far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tolerance, "limit", lambda *_, **__: 0.0)
    (found,) = measure_cells([CELL], FEW)
    assert found.status == Status.ERROR
    assert "the result is off" in found.reason
    assert found.max_rel_error["out"] > 0


def test_a_result_that_is_not_finite_is_an_error_with_the_reason_and_the_next_cell_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the record held an infinity, which ended the whole sweep."""
    lone = replace(CELL, cp=1)
    out = torch.full((1, 6, 29, 8), math.nan, dtype=torch.float64)
    monkeypatch.setattr(measured_cell, "collect", lambda *_: out)
    ran = RankSample((0.5, 0.25), 0.1, 0, {}, plans=plans_of(lone))
    crew = Broken([ran, measured_cell.Refusal("second")])
    found, second = measure_cells([lone, replace(lone, batch=2)], FEW, Crews(lambda _: crew))
    assert (found.status, found.max_rel_error) == (Status.ERROR, {"out": None})
    assert found.reason == "the result is off: out is not finite"
    assert second.reason == "second"
    with ResultFolder(tmp_path, from_json) as results:
        results.append(found)
    with ResultFolder(tmp_path, from_json) as results:
        assert results.records == [found]
    assert worst_error(found) == "not finite"


def test_bytes_that_differ_from_the_plan_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_cell, "planned_traffic", lambda _: ({0: 7}, {}))
    (found,) = measure_cells([CELL], FEW)
    assert found.status == Status.ERROR
    assert "the plan says (7, 0)" in found.reason, found
    assert "Traceback" in found.traceback


def test_a_cell_too_large_for_the_oracle_says_that_it_was_not_judged() -> None:
    limits = replace(FEW, memory_bytes=2 * 2**30)
    size = 33 * 29 * 29
    assert measured_cell.oracle_bytes(CELL) == size
    lone = replace(CELL, cp=1, seqlen_q=2**13, seqlen_kv=2**13)
    ranks = [RankSample((0.5, 0.25), 0.1, 0, {}, plans=plans_of(lone))]
    (found,) = measure_cells([lone], limits, Crews(lambda _: Broken(ranks)))
    assert found.status == Status.OK
    assert found.max_rel_error is None
    assert "not judged" in found.reason


def test_a_simulated_cell_that_raises_is_an_error_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path))  # where nothing is known of it

    def fail(*_: object) -> None:
        raise ZeroDivisionError("no bandwidth")

    cell = replace(CELL, transport=Where.SIMULATED, cluster="h100-1x8")
    monkeypatch.setattr(simulate_cells, "ledger", fail)
    (found,) = simulate_cells.simulate_cells([cell], jobs=1)
    assert (found.status, found.reason) == (
        Status.ERROR,
        "internal error, ZeroDivisionError: no bandwidth",
    )
    assert "in fail" in found.traceback


def test_simulated_cells_that_never_end_are_timeouts_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path))  # where nothing is known of them
    cell = replace(CELL, transport=Where.SIMULATED, cluster="h100-1x8")
    proved = simulate_cells.proved

    def endless(chosen: Chosen, *rest: object) -> Program:
        while chosen.text == "zigzag":
            time.sleep(0.01)
        return proved(chosen, *rest)  # type: ignore[arg-type]  # passed on as they come

    monkeypatch.setattr(simulate_cells, "proved", endless)
    cells = [replace(cell, strategy="zigzag"), cell, replace(cell, strategy="zigzag", batch=3)]
    records = simulate_cells.simulate_cells(cells, jobs=1, timeout_s=1.0)
    ends = {record.config_hash: record for record in records}

    assert [ends[each.hash].status for each in cells] == ["timeout", "ok", "timeout"]
    assert "not done after 1 s" in ends[cells[0].hash].reason


def test_more_ranks_than_the_cluster_has_are_illegal_with_the_reason() -> None:
    cell = replace(CELL, cp=9, transport=Where.SIMULATED, cluster="h100-1x8")
    (found,) = simulate_cells.simulate_cells([cell], jobs=1)
    assert found.status == Status.ILLEGAL
    assert "9" in found.reason


def test_resuming_skips_what_is_done_and_retries_what_failed() -> None:
    cells = [replace(CELL, batch=b) for b in range(1, 8)]
    records = [
        record(cell, status, {}, time_s=1.0) for cell, status in zip(cells, Status, strict=False)
    ]
    left = pending(cells, records)
    again = {Status.OOM, Status.TIMEOUT, Status.ERROR, Status.SKIPPED}
    assert left == [
        cell
        for cell, status in zip(cells, [*Status, None], strict=False)
        if status is None or status in again
    ]


def test_the_newest_record_of_a_cell_counts() -> None:
    other = replace(CELL, batch=3)
    old, new = (record(CELL, status, {}, time_s=1.0) for status in (Status.ERROR, Status.OK))
    third = record(other, Status.OK, {}, time_s=1.0)
    assert records_in_order([other, CELL], [old, third, new]) == [third, new]


@pytest.mark.parametrize(
    ("samples", "share", "value"),
    [((3.0,), 0.2, 3.0), ((0.0, 10.0), 0.2, 2.0), ((0.0, 1.0, 2.0, 3.0, 4.0), 0.8, 3.2)],
)
def test_quantiles_lie_between_the_samples(
    samples: tuple[float, ...], share: float, value: float
) -> None:
    assert quantile(samples, share) == pytest.approx(value)


# Whole sweeps, killed and interrupted -------------------------------------------------------


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The cells of the small sweep."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    done = sweeps.run("sweep", *sweeps.SIMULATED, "-o", str(folder))
    assert done.returncode == 0, done.stderr
    return sorted(sweeps.kept(folder))


def killed_then_resumed(folder: Path, wait_s: float) -> int:
    """Kill a sweep after a while, go on with it, and return how many records the kill left."""
    process = sweeps.start("sweep", *sweeps.SIMULATED, "-o", str(folder), "--jobs", "2")
    time.sleep(wait_s)
    children = psutil.Process(process.pid).children(recursive=True)
    sweeps.kill(process)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    before = sweeps.kept(folder)
    done = sweeps.run("sweep", *sweeps.SIMULATED, "-o", str(folder), "--jobs", "2", "--resume")
    assert done.returncode == 0, done.stderr
    assert sweeps.kept(folder)[: len(before)] == before
    return len(before)


def moments(times: int) -> Iterator[float]:
    """Random moments of a sweep, from before its first record to after its last."""
    chance = random.Random()
    for _ in range(times):
        yield chance.uniform(0.2, 4.0)


def test_a_sweep_killed_at_any_moment_loses_doubles_and_tears_nothing(
    tmp_path: Path, expected: list[str]
) -> None:
    for number, wait_s in enumerate(moments(3)):
        folder = tmp_path / str(number)
        killed_then_resumed(folder, wait_s)
        assert sorted(sweeps.kept(folder)) == expected, wait_s


@pytest.mark.slow
def test_a_sweep_killed_at_thirty_moments_loses_doubles_and_tears_nothing(
    tmp_path: Path, expected: list[str]
) -> None:
    left = set()
    for number, wait_s in enumerate(moments(30)):
        folder = tmp_path / str(number)
        left.add(killed_then_resumed(folder, wait_s))
        assert sorted(sweeps.kept(folder)) == expected, wait_s
    assert len(left) > 3  # the moments did differ


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_ctrl_c_and_sigterm_keep_what_is_done_and_leave_no_process(
    number: int, status: int, said: str, tmp_path: Path, expected: list[str]
) -> None:
    folder = tmp_path / "out"
    slow = (*sweeps.SIMULATED, "--seqlen", "96,160,1m", "--cp", "2,3,40")
    process = sweeps.start("sweep", *slow, "-o", str(folder), "--jobs", "2")
    deadline = time.monotonic() + 60
    while sweeps.lines(folder) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    if number == signal.SIGTERM:  # as `timeout` does: to the command, then to its whole group
        os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (
        status,
        f"sweep: {said}; what was done is kept",
    )
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert len(sweeps.kept(folder)) >= 2
    assert (folder / "summary.csv").exists()
    done = sweeps.run("sweep", *sweeps.SIMULATED, "-o", str(folder), "--resume")
    assert done.returncode == 0, done.stderr
    assert set(expected) <= set(sweeps.kept(folder))
    assert len(set(sweeps.kept(folder))) == len(sweeps.kept(folder))


def test_a_hang_up_amid_measuring_keeps_what_is_done_and_its_summary(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    cells = ("--strategies", "ring,zigzag,ulysses", "--seqlen", "96,160,224", "--cp", "2")
    shape = ("--patterns", "full,causal,star", "--heads", "6/2", "--head-dim", "16")
    slow = ("--iterations", "400")  # so that it is not done before it is told to stop
    process = sweeps.start("sweep", "--mode", "measure", *cells, *shape, *slow, "-o", str(folder))
    deadline = time.monotonic() + 120
    while sweeps.lines(folder) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (
        128 + signal.SIGHUP,
        "sweep: terminated; what was done is kept",
    )
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert len((folder / "summary.csv").read_text().splitlines()) > 2


def test_a_second_sweep_into_a_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ResultFile(tmp_path / FILE):
        assert cli.main(["sweep", *sweeps.SIMULATED, "-o", str(tmp_path), "--resume"]) == 1
    assert "another run" in capsys.readouterr().err
    assert read_records(tmp_path) == []
