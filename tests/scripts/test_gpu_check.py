"""The GPU check without a GPU: that it says so, what it would measure, and what it writes."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from itertools import combinations, count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.check.cell import JudgedCell
from harness.execute import kernels_cuda
from harness.execute.kernels_cuda import Flash, math_backward, math_forward
from harness.plan.problem import Direction, Dtype
from harness.records.check_record import Outcome
from harness.records.config import Config

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
CPU = torch.device("cpu")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


gpu_check = load()


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two flash kernels made of matrix products, on a CPU that calls itself CUDA."""
    flash = Flash(
        forward=lambda q, k, v, causal, scale: math_forward(
            q, k, v, None, causal=causal, scale=scale
        ),
        backward=lambda six, causal, scale: math_backward(six, None, causal=causal, scale=scale),
    )
    names = ["flash_a", "flash_b"]
    monkeypatch.setattr(kernels_cuda, "_found", lambda: {**dict.fromkeys(names, flash), "c": "no"})
    monkeypatch.setattr(kernels_cuda.torch.cuda, "is_available", lambda: True)
    return names


def sampler(call: Callable[[], object]) -> list[float]:
    call()
    return [0.001 * n for n in range(1, gpu_check.ITERATIONS + 1)]


def examined(path: Path, **settings: object) -> Any:  # noqa: ANN401  # of a script that no package has
    return gpu_check.Examination({"name": "Card"}, CPU, path, sampler=sampler, **settings)


def small(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(gpu_check, "COPIES", (1024, 4096))
    return [
        gpu_check.Shape(direction, causal, 64, 64, 2)
        for direction in Direction
        for causal in (False, True)
    ]


def test_without_a_card_it_says_so_and_exits_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 0
    captured = capsys.readouterr()

    assert "no CUDA card" in captured.err
    assert captured.out == ""


def test_every_call_that_was_asked_for_is_planned_once_and_the_cheapest_comes_first() -> None:
    shapes = gpu_check.shapes()
    squares = {(s.direction, s.causal, s.rows, s.heads) for s in shapes if s.rows == s.columns}
    wanted = {
        (direction, causal, rows, heads)
        for direction in Direction
        for causal in (False, True)
        for rows in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
        for heads in (1, 32)
    }

    assert squares == wanted
    ratios = {s.columns / s.rows for s in shapes if s.rows != s.columns}
    assert ratios == {4.0, 2.0, 0.5, 0.25}
    assert not any(s.causal for s in shapes if s.rows != s.columns)
    assert len(set(shapes)) == len(shapes)
    assert [s.flops for s in shapes] == sorted(s.flops for s in shapes)


def test_flops_are_those_of_the_mask() -> None:
    shape = gpu_check.Shape
    forward, backward = Direction.FORWARD, Direction.BACKWARD

    # Two products of 100 x 200 pairs, 3 heads of 128, two flops per multiply-add.
    assert shape(forward, False, 100, 200, 3).flops == 2 * 2 * 100 * 200 * 3 * 128
    assert shape(forward, True, 100, 100, 1).flops == 2 * 2 * 5050 * 128
    assert shape(backward, False, 8, 8, 1).flops == 2.5 * shape(forward, False, 8, 8, 1).flops


def test_the_check_grid_covers_all_pairs_of_its_axes() -> None:
    cells, axes = gpu_check.cells(), gpu_check.AXES
    fields = ("strategy", "cp", "dtype", "batch", "seqlen_q", "head_dim")
    values = (
        *(axes.strategies, axes.cps, axes.dtypes, axes.batches, axes.lengths, axes.head_dims),
    )
    for (a, firsts), (b, seconds) in combinations(zip(fields, values, strict=True), 2):
        pairs = {(getattr(cell, a), getattr(cell, b)) for cell in cells}
        assert pairs == {(x, y) for x in firsts for y in seconds}, (a, b)
    assert {cell.dtype for cell in cells} == {Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT32}


def test_a_run_writes_the_documented_file(
    tmp_path: Path, fake_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu" / "card.json"
    run = examined(path)
    calls = small(monkeypatch)
    short = [c for c in gpu_check.cells() if c.seqlen_q == 5]
    configs = [c for c in short if c.dtype is Dtype.FLOAT32][:2]
    configs += [c for c in short if c.dtype is not Dtype.FLOAT32][:4]
    assert run.run(configs, calls) is True
    body = json.loads(path.read_text())

    documented = re.findall(r"^    (\w+)  ", gpu_check.__doc__, flags=re.MULTILINE)
    assert list(body) == documented
    assert body["capabilities"] == {"flash_a": "ok", "flash_b": "ok", "c": "no"}
    assert body["left_out"] == []
    half = {Dtype.BFLOAT16.value, Dtype.FLOAT16.value}
    for entry in body["checks"]:
        assert entry["status"] in ("passed", "refused")
        assert (entry["kernel"] in fake_kernels) == (entry["dtype"] in half)
    assert len(body["checks"]) == 2 * (2 + 2 * 4)  # two directions; two kernels where they fit

    assert len(body["kernels"]) == 2 * len(calls)
    entry = body["kernels"][0]
    assert (entry["kernel"], entry["status"], entry["dtype"]) == ("flash_a", "ok", "bfloat16")
    times = (entry["p20_s"], entry["time_s"], entry["p80_s"])
    assert times == pytest.approx((0.0048, 0.0105, 0.0162))
    assert entry["iterations"] == 20
    documented = re.findall(r"\w+", gpu_check.__doc__.partition("    kernels ")[2])
    assert set(entry) <= set(documented)
    assert {(c["source"], c["target"]) for c in body["copies"]} == {
        ("device", "device"),
        ("host", "device"),
        ("device", "host"),
    }
    assert {c["size_bytes"] for c in body["copies"]} == {1024, 4096}
    assert [p.name for p in path.parent.iterdir()] == ["card.json"]


def test_each_kernel_is_timed_by_itself(
    fake_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    own = {
        name: Flash(
            forward=lambda q, k, v, causal, scale, name=name: (
                called.append(name),
                math_forward(q, k, v, None, causal=causal, scale=scale),
            )[1],
            backward=lambda *_: pytest.fail("not asked for"),
        )
        for name in fake_kernels
    }
    monkeypatch.setattr(kernels_cuda, "_found", lambda: own)
    shape = gpu_check.Shape(Direction.FORWARD, True, 32, 32, 1)
    for name in fake_kernels:
        assert gpu_check.time_kernel(name, shape, CPU, sampler)["status"] == "ok"

    assert called == fake_kernels


def test_what_a_kernel_cannot_do_is_told(fake_kernels: list[str]) -> None:
    shape = gpu_check.Shape(Direction.FORWARD, False, 32, 32, 1)

    def fails(error: Exception) -> dict[str, object]:
        def fail(_: object) -> list[float]:
            raise error

        found: dict[str, object] = gpu_check.time_kernel(fake_kernels[0], shape, CPU, fail)
        return found

    memory = fails(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"))
    assert (memory["status"], memory["reason"]) == ("oom", "CUDA out of memory. Tried")
    assert "time_s" not in memory
    assert fails(RuntimeError("no engine"))["status"] == "error"
    absent = gpu_check.time_kernel("c", shape, CPU, sampler)
    assert (absent["status"], "kernel c: no" in str(absent["reason"])) == ("error", True)


@pytest.mark.usefixtures("fake_kernels")
def test_a_wrong_kernel_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: Config, **_: object) -> tuple[JudgedCell, JudgedCell]:
        if kernels_cuda._ONLY.get() == "flash_b":
            raise RuntimeError("no kernel image\nfor this card")
        return JudgedCell(config, Outcome.PASSED), JudgedCell(config, Outcome.REFUSED)

    monkeypatch.setattr(gpu_check, "check", check)
    monkeypatch.setattr(gpu_check, "COPIES", ())
    run = examined(tmp_path / "card.json")
    configs = [c for c in gpu_check.cells() if c.dtype is Dtype.BFLOAT16][:1]
    assert run.run(configs, []) is False

    found = [(c["kernel"], c["status"], c["reason"]) for c in run.checks]
    assert found == [
        ("flash_a", "passed", ""),
        ("flash_a", "refused", ""),
        ("flash_b", "failed", "RuntimeError: no kernel image"),
    ]


@pytest.mark.usefixtures("fake_kernels")
def test_the_budget_cuts_off_the_rest_and_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = small(monkeypatch)
    ticks = count(step=10)  # each look at the clock is ten seconds later
    run = examined(tmp_path / "card.json", budget_s=120.0, clock=lambda: float(next(ticks)))
    configs = [c for c in gpu_check.cells() if c.dtype is Dtype.FLOAT32 and c.seqlen_q < 100]
    assert len(configs) > 6
    run.run(configs, calls)

    # 40 % of 100 s: looks at 10, 20, 30 and 40 s let a check run.
    assert len(run.checks) == 2 * 4
    assert len(run.kernels) + len(run.checks) // 2 + len(run.left_out) == len(configs) + 8
    assert run.left_out[0].startswith("check math ")
    assert run.left_out[-1] == "time flash_b backward causal 64 x 64, 2 heads"
    assert len(run.copies) == 6
    assert json.loads((tmp_path / "card.json").read_text())["left_out"] == run.left_out


def test_the_file_has_the_name_of_the_card() -> None:
    path = gpu_check.results_path("NVIDIA H100 80GB HBM3")

    assert path.parts[-3:] == ("results", "gpu", "nvidia-h100-80gb-hbm3.json")


def test_only_one_kernel_is_taken_inside_and_any_after(fake_kernels: list[str]) -> None:
    q = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16)
    found = kernels_cuda._found()
    with kernels_cuda.only("flash_b"):
        assert kernels_cuda._flash_for(q, None) is found["flash_b"]
    assert kernels_cuda._flash_for(q, None) is found["flash_a"]
    assert fake_kernels
