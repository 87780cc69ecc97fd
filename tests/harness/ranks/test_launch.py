"""Ranks that torchrun started: the same records as ranks that we start, and what goes wrong."""

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from harness import cli
from harness.base.json_fields import JsonObject
from harness.commands.parts.machine_facts import Finding, State
from harness.errors import MeasurementError
from harness.ranks import launch, meeting
from harness.ranks.box import Box
from harness.ranks.job import Failure, Member
from harness.ranks.wire import pack, pack_call, unpack
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
    # The rank that was given up comes back when all is over.
    assert "rank 1: rank 0 is gone" in done.stderr, done.stderr
    assert done.returncode != 0
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_jobs_run_in_a_group_of_just_their_ranks(outcomes: dict[str, Any]) -> None:
    assert outcomes["add"] == ["ok", [[11, 2, 1]] * 2]
    assert outcomes["alone"] == ["ok", [[7, 1, 2]]]
    assert outcomes["again"] == ["ok", [[13, 2, 1]] * 2]
    assert outcomes["keywords"] == [[10, 2, 1]] * 2


def test_ranks_of_one_node_meet_where_no_other_machine_reaches_them(
    outcomes: dict[str, Any],
) -> None:
    assert outcomes["listens"] == ["127.0.0.1", "refused"]


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


SECRET = b"of this launch"


@dataclass
class Opens:
    """What runs code when it is unpickled: it makes a file."""

    path: str

    def __reduce__(self) -> object:
        return open, (self.path, "w")


def test_messages_come_out_of_the_box_as_they_went_in_and_leave_nothing() -> None:
    store = HashStore()
    box = Box(store, SECRET)
    value = b"\0\xff" * 5_000_000
    assert box.take("a") is None
    assert box.waited("a", deadline=0.0) is None
    for data in (value, b""):
        box.put("a", data)
        assert box.waited("a", keep=True) == data
        assert box.take("a") == data
        assert box.take("a") is None
        assert store.num_keys() == 0


def test_who_reaches_the_store_cannot_make_a_rank_run_anything(tmp_path: Path) -> None:
    """Neither a pickle nor a well-formed order is heeded without the launch's secret."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    ours = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
    foreign = TCPStore("127.0.0.1", port, is_master=False)
    mark = tmp_path / "mark"
    job: list[int] = []

    def touch(member: Member, number: int) -> None:
        del member
        job.append(number)

    order = launch.RankOrder(
        "touch", pack_call(touch, (7,), {}), cp=2, backend="gloo", timeout_s=1.0
    )
    attacks = [
        lambda: (
            foreign.set("order/0/0", pickle.dumps(Opens(str(mark)))),
            foreign.set("order/0", "1"),
        ),
        lambda: Box(foreign, b"guessed").put("order/0", pack(launch.RankOrder, order)),
        lambda: foreign.set("order/0", "99999999999999 " + "0" * 64),
        lambda: foreign.set("order/0", b"\xff\xfe"),
    ]
    box = Box(ours, SECRET)
    for attack in attacks:
        attack()
        assert box.take("order/0") is None
    # A message of the launch in another's place is none either.
    box.put("order/1", pack(launch.RankOrder, order))
    for part in ("", "/0"):
        foreign.set(f"order/0{part}", foreign.get(f"order/1{part}"))
    assert box.take("order/0") is None

    box.put("order/0", pack(launch.RankOrder, order))  # the driver's own comes through
    assert unpack(launch.RankOrder, box.take("order/0") or b"") == order
    assert not mark.exists()
    assert job == []


def test_a_rank_does_only_the_jobs_of_its_launch() -> None:
    met = meeting.Met(HashStore(), SECRET, rank=0, world=1, local_rank=0, local_world=1)
    rank = launch.Rank(met, {"known": lambda _: None})
    rank._group = 3
    answer = rank.perform(launch.RankOrder("os.system", b"", cp=1, group=3))
    assert answer.kind is Failure.ERROR
    assert answer.reason == "job (os.system) must be one of known"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_only_a_whole_set_of_variables_is_a_launch(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert meeting.launched()
    monkeypatch.delenv(missing)
    assert not meeting.launched()


@pytest.mark.parametrize("verb", ["list", "doctor", "sweep --dry-run"])
def test_verbs_that_measure_nothing_join_no_launch(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variables that somebody left in the environment are no reason to wait for others."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # RFC 5737: nobody is there
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(meeting, "meet", lambda: pytest.fail("it waits for the others"))
    monkeypatch.setattr(
        "harness.commands.parts.machine_facts._gloo", lambda _: Finding("gloo", State.OK, "", "")
    )
    assert cli.main(verb.split()) == 0
    assert capsys.readouterr().out


def met(local_rank: int | None = 3, local_world: int | None = 8) -> meeting.Met:
    return meeting.Met(HashStore(), SECRET, 1, 8, local_rank, local_world)


@pytest.mark.parametrize(
    ("cards", "wanted", "local_world", "backend"),
    [
        (0, None, 8, "gloo"),
        (8, None, 8, "nccl"),
        (8, None, 4, "nccl"),
        (1, None, 8, "nccl"),  # each process sees its own
        (8, "gloo", 8, "gloo"),
        (4, None, 8, None),
        (0, "nccl", 8, None),
        (4, None, None, None),  # eight in the world, as no launcher says how many are here
    ],
)
def test_a_launch_uses_the_cards_or_says_why_not(
    cards: int,
    wanted: str | None,
    local_world: int | None,
    backend: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    here = met(local_world=local_world)
    if backend is None:
        with pytest.raises(MeasurementError, match=r"--transport gloo"):
            launch.backend_of(here, wanted)
    else:
        assert launch.backend_of(here, wanted) == backend


def test_a_process_takes_the_card_that_its_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert launch.own_card(met()) == 3
    for lacking in (None, 8):
        with pytest.raises(MeasurementError, match="set LOCAL_RANK"):
            launch.own_card(met(local_rank=lacking))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch.own_card(met()) == 0


class Recorded(launch.Rank):
    """A rank that says when it leaves its group and when it answers."""

    def __init__(self, met: meeting.Met, done: list[str]) -> None:
        super().__init__(met, {})
        self.done = done
        self._group = 1

    def leave(self) -> None:
        self.done.append(f"{self.rank} leaves")
        self._group = None


def test_all_ranks_leave_a_group_together_and_those_a_new_one_lacks_leave_the_old() -> None:
    """With NCCL, who leaves waits for the others of its node: none may leave before it is told."""
    store, done = HashStore(), list[str]()
    first, other = (
        Recorded(meeting.Met(store, SECRET, rank, 2, rank, 2), done) for rank in range(2)
    )
    first.box.put("order/0", pack(launch.RankOrder, launch.RankOrder("job", cp=1, group=1)))
    first.box.put("order/1", pack(launch.RankOrder, launch.RankOrder("job", cp=1, group=2)))
    driver = launch.Launch(first)
    driver._orders = 2
    thread = threading.Thread(target=other.serve)
    thread.start()
    driver.dismiss()
    thread.join()
    assert done[0] == "1 leaves"  # at the second order: it is not in that group
    assert sorted(done[1:]) == ["0 leaves", "1 leaves"]
