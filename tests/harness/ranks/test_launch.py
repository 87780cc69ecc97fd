"""Ranks that torchrun started: the same records as ranks that we start, and what goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from harness import cli
from harness.base.json_fields import JsonObject
from harness.ranks import launch
from harness.records.store import read_records

ROOT = Path(__file__).parents[3]
SWEEP = (
    *("sweep", "--mode", "measure", "--strategies", "ring,ulysses", "--patterns", "causal"),
    *("--cp", "1,2,4", "--seqlen", "64", "--heads", "2/2", "--head-dim", "16"),
    *("--direction", "forward,backward", "--iterations", "3", "--warmup", "1"),
)
TIMED = ("time_s", "samples_s", "p20_s", "p80_s", "tflops_per_gpu", "exposed_comm_s")


def torchrun(processes: int, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(processes), *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def timeless(entry: JsonObject) -> dict[str, Any]:
    """A record without what a clock or the launcher's own variables put into it."""
    rest = {name: value for name, value in entry.items() if name not in (*TIMED, "recorded_at")}
    environment = rest["environment"]
    assert isinstance(environment, dict)
    rest["environment"] = {k: v for k, v in environment.items() if k not in ("variables", "dirty")}
    return rest


def test_a_launched_sweep_gives_the_records_of_a_sweep_that_starts_its_own_ranks(
    tmp_path: Path,
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    done = torchrun(2, "-m", "harness", *SWEEP, "-o", str(theirs), "--json")
    assert done.returncode == 0, done.stderr
    assert cli.main([*SWEEP, "--cp", "1,2", "-o", str(ours)]) == 0

    launched, spawned = read_records(theirs), read_records(ours)
    assert json.loads(done.stdout) == launched  # rank 1 prints nothing
    within = [entry for entry in launched if entry["cp"] != 4]
    assert [entry["status"] for entry in within] == ["ok"] * 8
    assert list(map(timeless, within)) == list(map(timeless, spawned))
    for entry in within:
        samples = entry["samples_s"]
        assert isinstance(samples, list)
        assert len(samples) == 3
        assert min(samples) > 0

    beyond = [entry for entry in launched if entry["cp"] == 4]
    assert len(beyond) == 4
    for entry in beyond:
        assert entry["status"] == "skipped"
        assert "4 ranks are more than the 2" in str(entry["reason"])
        assert entry["time_s"] is None


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    done = torchrun(2, "-m", "tests.harness.launched")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_jobs_run_in_a_group_of_just_their_ranks(outcomes: dict[str, Any]) -> None:
    assert outcomes["add"] == ["ok", [[11, 2, 1]] * 2]
    assert outcomes["alone"] == ["ok", [[7, 1, 2]]]
    assert outcomes["again"] == ["ok", [[13, 2, 1]] * 2]
    assert outcomes["keywords"] == [[10, 2, 1]] * 2


def test_an_answer_may_be_larger_than_the_store_takes_at_once(outcomes: dict[str, Any]) -> None:
    assert outcomes["large"] == [True, True]


def test_the_rank_that_failed_is_named_not_those_that_waited_for_it(
    outcomes: dict[str, Any],
) -> None:
    assert outcomes["fail"] == ["error", 1, "rank 1 has had enough", True]
    kind, rank, reason, _ = outcomes["unsendable"]
    assert (kind, rank) == ("error", 1)
    assert reason.startswith("answer cannot be sent")


def test_a_transfer_that_hangs_is_a_timeout_and_the_next_job_runs(outcomes: dict[str, Any]) -> None:
    assert outcomes["stall"][:2] == ["timeout", 0]
    assert outcomes["after"] == ["ok", [[3, 2, 1]] * 2]
    assert outcomes["alive"] is True


def test_a_rank_that_stays_away_is_given_up_and_the_others_go_on(outcomes: dict[str, Any]) -> None:
    assert outcomes["vanish"][:3] == ["timeout", 1, "no answer from rank 1 within 3 s"]
    alive, both, alone = outcomes["lost"]
    assert alive is False
    assert both[:3] == ["error", 1, "rank 1 did not come back from an earlier cell"]
    assert alone == ["ok", [[3, 1, 2]]]


def test_a_crew_that_is_closed_or_too_large_is_refused(outcomes: dict[str, Any]) -> None:
    assert outcomes["closed"] is False
    assert outcomes["use of closed"] == "this crew is closed; ask the launch for another"
    assert outcomes["too many"] == "cp (3) must not exceed the launch's 2 processes"


def test_a_wrong_call_ends_all_ranks() -> None:
    done = torchrun(2, "-m", "harness", "sweep", "--cp", "none")

    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert said.count("`python -m harness sweep --help` shows the flags") == 1
    assert done.stdout == ""


def test_values_come_out_of_the_box_as_they_went_in_and_leave_nothing() -> None:
    store = HashStore()
    box = launch.Box(store)
    value = {"bytes": b"\0\xff" * 5_000_000, "none": None}
    assert not box.has("a")
    assert box.waited("a", deadline=0.0) is False
    box.put("a", value)

    assert box.waited("a")
    assert box.take("a", keep=True) == value
    assert box.take("a") == value
    assert not box.has("a")
    assert store.num_keys() == 0


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_only_a_whole_set_of_variables_is_a_launch(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert launch.launched()
    monkeypatch.delenv(missing)
    assert not launch.launched()
