"""What the doctor finds, and that nothing that is missing or broken stops it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from harness.commands.parts import machine_facts
from harness.commands.parts.machine_facts import Finding, State, examine
from harness.ranks.team import Failure, Team, WorkerError


def no_team(cp: int) -> Team:
    raise WorkerError(Failure.ERROR, 1, f"exited with status 7 of {cp}")


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_everything_is_looked_for_and_what_is_missing_has_a_remedy() -> None:
    facts, findings = examine(no_team)
    found = by_name(findings)

    assert set(found) >= {"torch", "numpy", "matplotlib", "flash-attn", "ring-flash-attn"}
    assert set(found) >= {"yunchang", "kernel torch_cpu", "kernel torch_flash", "gloo", "CUDA"}
    assert found["torch"] == Finding(
        "torch", State.OK, torch.__version__, "check, measured sweeps, attention on tensors"
    )
    assert found["kernel torch_cpu"].state is State.OK
    for finding in findings:
        assert finding.serves
        assert (finding.remedy == "") == (finding.state is State.OK)
    memory, free = facts["memory_bytes"], facts["memory_available_bytes"]
    assert isinstance(memory, int)
    assert isinstance(free, int)
    assert memory > free > 0


def test_processes_that_do_not_start_are_a_finding() -> None:
    gloo = by_name(examine(no_team)[1])["gloo"]

    assert gloo.state is State.BROKEN
    assert gloo.value == "rank 1: exited with status 7 of 2"


def test_two_gloo_processes_add_their_numbers() -> None:
    assert by_name(examine()[1])["gloo"].state is State.OK


def test_a_group_that_adds_wrongly_is_broken() -> None:
    class Wrong:
        def __enter__(self) -> "Wrong":
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def run(self, *_: object) -> list[int]:
            return [3, 4]

    gloo = by_name(examine(lambda _: Wrong())[1])["gloo"]
    assert (gloo.state, gloo.value) == (State.BROKEN, "1 + 2 gave [3, 4]")


def test_a_package_that_is_there_but_fails_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "package_version", lambda _: "1.0")
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # its import raises
    found = by_name(examine(no_team)[1])["matplotlib"]

    assert found.state is State.BROKEN
    assert found.value.startswith("1.0, but its import fails: ")


def test_a_missing_kernel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine_facts.kernels,
        "capabilities",
        lambda: {"torch_cpu": "ok", "torch_cudnn": "no aten::x"},
    )
    found = by_name(examine(no_team)[1])

    assert found["kernel torch_cudnn"].state is State.MISSING
    assert found["kernel torch_cudnn"].value == "no aten::x"
    assert found["kernel torch_cudnn"].serves == "attention on CUDA"


def test_cards_are_listed_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="Card X", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(machine_facts.kernels, "capabilities", dict)
    monkeypatch.setattr(machine_facts.dist, "is_nccl_available", lambda: True)
    found = by_name(examine(no_team)[1])

    assert found["CUDA"].state is State.OK
    assert found["CUDA"].value.endswith("Card X 80 GiB, Card X 80 GiB")
    assert (found["NCCL"].state, found["NCCL"].value) == (State.OK, "2.27.3")


def test_without_cards_cuda_and_nccl_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = by_name(examine(no_team)[1])

    assert found["CUDA"].state is State.MISSING
    assert found["NCCL"].state is State.MISSING
