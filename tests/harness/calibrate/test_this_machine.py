"""Calibrations of this machine: the fit on figures of a known machine, and a run in real ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.calibrate import measure_machine, this_machine
from harness.calibrate.measure_machine import shapes
from harness.cluster.calibration import load
from harness.fit.this_machine import Figures, KernelShape, fit_local, with_overheads
from harness.plan.problem import Direction, Dtype
from harness.prepare import planner_context
from harness.ranks.team import Team
from harness.records.cell import CellRecord, Status
from harness.records.config import Where
from tests.harness.made import record

BANDWIDTH, RATE, LAUNCH = 4e9, 3e10, 7e-5


def seconds(shape: KernelShape, factor: float, passes: float = 0.0) -> float:
    """A machine that takes of a triangle all blocks of 32 x 512 that it touches."""
    area = shape.rows * shape.columns
    if shape.causal:
        area = sum(min(shape.columns, 512 * (row // 512 + 1)) for row in range(shape.rows))
    flops = factor * 4 * area * shape.heads * shape.head_dim
    moved = passes * shape.rows * shape.heads * shape.head_dim * 4
    return LAUNCH + flops / RATE + moved / BANDWIDTH


def figures() -> Figures:
    calls = list(shapes())
    return Figures(
        cpu="of the test",
        cores=3,
        memory_bytes=5 * 2**30,
        forward={s: seconds(s, 1.0) for s in calls},
        backward={s: seconds(s, 2.5, 3.0) for s in calls},
        backward_delta={s: seconds(s, 2.5, 5.0) for s in calls},
        merge={n: 1.75 * n / BANDWIDTH for n in (2**16, 2**18, 2**20)},
        copy={n: 2 * n / BANDWIDTH for n in (2**18, 2**22)},
        linear_flops_per_s=6e10,
        precision={Dtype.FLOAT32: 2e-3, Dtype.BFLOAT16: 3e-3, Dtype.FLOAT64: 5e-3},
        one_way={2**p: 5e-5 + 2**p / 3e9 for p in range(12, 24)},
        both_ways={2**p: 8e-5 + 2**p / 2e9 for p in range(12, 24)},
        exchange={2**p: 9e-5 + 2**p / 1e9 for p in range(12, 24)},
        empty={},
    )


def test_the_parameters_of_a_known_machine_are_found() -> None:
    log: list[str] = []
    value = fit_local(figures(), "2026-01-02", log.append)
    forward, backward = value.kernels.forward, value.kernels.backward
    assert forward.flops_per_s * min(1, 1 / forward.causal) == pytest.approx(RATE, rel=0.05)
    assert forward.launch_s == pytest.approx(LAUNCH, rel=0.1)
    assert backward.flops_per_s == pytest.approx(RATE, rel=0.05)
    # Two passes more with delta than with out.
    assert backward.delta_passes == pytest.approx(-2.0, rel=1e-6)
    assert value.effects.passes == pytest.approx(1.75)
    assert value.links.near.seconds(2**22) == pytest.approx(8e-5 + 2**22 / 2e9, rel=0.02)
    assert value.links.near_collective.seconds(2**22) == pytest.approx(9e-5 + 2**22 / 1e9, rel=0.02)
    assert max(value.errors.values()) < 0.02
    assert (value.range.min_tokens, value.range.max_tokens) == (64, 2048)
    # More ranks than the 3 cores may run: they take turns and share the memory.
    sheet = value.hardware
    assert (sheet.gpus_per_node, sheet.cores, sheet.memory_bytes) == (8, 3, 5 * 2**30 // 8)
    # A precision that takes longer has a lower rate.
    assert sheet.flops_per_s_float32 == pytest.approx(1.5 * sheet.flops_per_s)
    assert sheet.flops_per_s_float32 == pytest.approx(2.5 * sheet.flops_per_s_float64)
    # What a triangle takes beyond its half is its blocks of keys, which are known.
    assert forward.causal == pytest.approx(1.0, rel=0.02)
    assert backward.causal == pytest.approx(1.0, rel=0.02)
    many = fit_local(replace(figures(), cores=11), "2026-01-02", log.append).hardware
    assert (many.gpus_per_node, many.cores) == (11, 11)
    assert any("mean" in line for line in log)


def test_overheads_are_what_is_left_of_plans_without_work() -> None:
    value = fit_local(figures(), "2026-01-02", lambda _: None)
    predicted = {("forward", 1): 1e-4, ("forward", 2): 3e-4}
    measured = {("forward", 1): 4e-4, ("forward", 2): 9e-4}
    more = with_overheads(value, predicted, measured)
    assert more.effects.start_s == pytest.approx(3e-4)
    assert more.effects.near.handshake_s == pytest.approx(3e-4)
    less = with_overheads(value, predicted, dict.fromkeys(measured, 0.0))
    assert less.effects.start_s == less.effects.near.handshake_s == 0.0


def pair(measured_s: float, simulated_s: float, cp: int) -> tuple[CellRecord, CellRecord]:
    cell = replace(measure_machine.empty_cell(cp, Direction.FORWARD), seqlen_q=512)
    there = replace(cell, transport=Where.SIMULATED, cluster="mine.toml")
    return (
        record(cell, Status.OK, {}, time_s=measured_s),
        record(there, Status.OK, {}, time_s=simulated_s, calibration_id="mine/2026-01-02"),
    )


def test_a_check_says_how_far_predictions_are_off() -> None:
    pairs = [pair(1.0, 1.1, 1), pair(1.0, 0.8, 1), pair(2.0, 2.0, 2)]
    lines = this_machine.table(pairs).splitlines()
    assert "mine/2026-01-02" in lines[0]
    assert lines[4] == "| 1 | 512 | forward | 2 | 15.0% | 15.0% | 20.0% | -5.0% |"
    assert lines[6] == "| all | | | 3 | 10.0% | 10.0% | 20.0% | -3.3% |"


@pytest.mark.slow
def test_this_machine_can_be_calibrated_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_machine, "_REPEATS", 1)
    monkeypatch.setattr(measure_machine, "_MESSAGE_REPEATS", 2)
    path = tmp_path / "here.toml"
    path.write_text(this_machine.calibrated("2026-01-02", lambda _: None))
    value = load(path)
    assert not value.on_gpus
    chosen = [
        c
        for c in this_machine.compared_cells()
        if c.seqlen_q == 512 and c.strategy in ("ring", "ulysses")
    ]

    def few() -> Sequence[object]:
        return chosen

    monkeypatch.setattr(this_machine, "cells", few)
    this_machine.check_predictions(path, tmp_path / "out", lambda _: None)
    assert f"| all | | | {len(chosen)} |" in capsys.readouterr().out
    assert (tmp_path / "out" / "records.jsonl").exists()


def test_measurements_run_in_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_machine, "_MESSAGES", (2**12, 2**14))
    with Team(2) as team:
        for way in ("one way", "both ways", "exchange"):
            ranks = team.run(measure_machine._message_times, 60.0, way)
            assert all(value > 0 for rank in ranks for value in rank.values())


def test_what_is_compared_is_what_can_run_here() -> None:
    cells = list(this_machine.compared_cells())
    assert {cell.cp for cell in cells} == {1, 2, 4}
    assert len(set(cells)) == len(cells)
    assert all(replace(c, cp=1).problem.seqlen_q <= 2048 for c in cells)


def test_what_runs_here_is_planned_for_the_cores_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner_context, "cores", lambda: 5)
    for where in (Where.GLOO, Where.LOCAL):
        context = planner_context.context_for(where)
        assert context is not None
        assert context.cluster is not None
        assert context.cluster.fitted is not None
        assert context.cluster.fitted.hardware.cores == 5
    assert planner_context.context_for(Where.NCCL) is None
