"""No change moves a prediction unseen: the thinned surface against its stored figures."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster.calibration import calibration
from harness.cluster.machine import Cluster
from harness.cluster.presets import cluster, measured
from harness.sweep import simulate_cells
from tests.scripts.test_help import loaded

WAY_OUT = "scripts/prediction_gate.py --update keeps the new figures, if that is what was meant"


def test_no_prediction_of_the_thinned_surface_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = loaded("prediction_gate", monkeypatch)
    before = gate.stored(gate.STORED)
    after = gate.figures(list(gate.surface(whole=False)))
    assert len(after) > 500
    assert gate.moved(before, after) == [], WAY_OUT


def test_a_changed_constant_is_seen_and_its_rows_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = loaded("prediction_gate", monkeypatch)
    cells = [
        cell
        for cell in gate.surface(whole=False)
        if (cell.strategy, cell.pattern, cell.cp) == ("zigzag", "causal", 8)
    ]
    before = gate.figures(cells)
    a800 = calibration("a800")
    forward = replace(a800.kernels.forward, flops_per_s=a800.kernels.forward.flops_per_s / 1.05)
    slower = replace(a800, kernels=replace(a800.kernels, forward=forward))

    def changed(name: str) -> Cluster:
        return measured(slower) if name == "a800" else cluster(name)

    monkeypatch.setattr(simulate_cells, "cluster", changed)
    lines = gate.moved(before, gate.figures(cells))
    assert lines
    assert all(line.startswith("a800 ") and " forward: " in line for line in lines)
    assert any("262144 forward" in line and "(+4." in line for line in lines)
    assert gate.moved(before, before) == []


def test_what_comes_goes_or_ends_otherwise_is_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = loaded("prediction_gate", monkeypatch)
    before = {("a",): "100", ("b",): "100", ("c",): "100", ("d",): "illegal"}
    after = {("a",): "101.9", ("b",): "102.1", ("c",): "oom", ("e",): "5", ("d",): "illegal"}
    assert gate.moved(before, after) == [
        "b: 100 -> 102.1 us (+2.1%)",
        "c: 100 -> oom",
        "e: (none) -> 5",
    ]


def test_figures_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = loaded("prediction_gate", monkeypatch)
    row = ("h100", "graph", "usp:4x2", "full", "8", "16384", "forward")
    gate.written({row: "12.5"}, tmp_path / "x.csv")
    assert gate.stored(tmp_path / "x.csv") == {row: "12.5"}
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="first line"):
        gate.stored(tmp_path / "x.csv")
