"""A program for torchrun: jobs that succeed, fail and hang on two ranks; prints what came of each.

Not a test by itself: `test_launch` runs it.
"""

import json
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from harness.errors import MeasurementError
from harness.ranks import launch, meeting
from harness.ranks.team import Member, WorkerError

TIMEOUT_S = 3.0


def add(member: Member, more: int, *, times: int = 1) -> tuple[int, int, int]:
    """Sum ranks over the group of the job."""
    number = torch.tensor([member.rank + more])
    dist.all_reduce(number)
    return int(number) * times, dist.get_world_size(), torch.get_num_threads()


def large(member: Member, size: int) -> bytes:
    """Answer with more than the store takes at once."""
    return bytes([member.rank]) * size


def fail(member: Member) -> None:
    """Raise on rank 1 while rank 0 waits for it."""
    if member.rank == 1:
        raise ValueError("rank 1 has had enough\nof this")
    dist.barrier()


def unsendable(member: Member) -> int:
    """Answer with what is not of the declared type."""
    return (lambda: None) if member.rank else 0  # type: ignore[return-value]


def stall(member: Member) -> None:
    """Keep rank 0 waiting in a transfer for longer than it may take."""
    if member.rank == 1:
        time.sleep(TIMEOUT_S + 1)
        return
    dist.barrier()


def vanish(member: Member) -> None:
    """Stay away on rank 1 beyond the timeout and the grace."""
    if member.rank == 1:
        time.sleep(TIMEOUT_S + 5)


def reach(port: int) -> str:
    """Whether a port listens on the address by which other machines would call this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737; no packet is sent
            address = str(probe.getsockname()[0])
        except OSError:  # no way out of this machine, so no way in
            address = "127.0.0.2"
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return "refused"
    return "connected"


JOBS = {job.__name__: job for job in (add, large, fail, unsendable, stall, vanish)}


def outcome(crew: launch.Launched, *call: object) -> list[object]:
    job, *args = call
    try:
        return ["ok", crew.run(job, TIMEOUT_S, *args)]
    except WorkerError as error:
        return [error.kind.value, error.rank, error.reason, "Traceback" in error.detail]


def main() -> None:
    """As rank 0, give the jobs and print their outcomes."""
    met = meeting.meet()
    me = launch.Rank(met, JOBS)
    if me.rank:
        sys.exit(me.serve())
    ranks = launch.Launch(me, grace_s=2.0)
    crew, alone = ranks.crew(2), ranks.crew(1, threads=2)
    found: dict[str, object] = {
        "add": outcome(crew, add, 5),
        "alone": outcome(alone, add, 7),
        "again": outcome(crew, add, 6),
        "fail": outcome(crew, fail),
        "unsendable": outcome(crew, unsendable),
        "stall": outcome(crew, stall),
        "after": outcome(crew, add, 1),
        "keywords": crew.run(add, TIMEOUT_S, 0, times=10),
    }
    store: Any = met.store
    found["listens"] = [store.host, reach(store.port)]
    size = 9 * 2**20 + 1
    answers = crew.run(large, TIMEOUT_S, size)
    found["large"] = [answer == bytes([rank]) * size for rank, answer in enumerate(answers)]
    found["alive"] = crew.alive
    found["vanish"] = outcome(crew, vanish)
    found["lost"] = [crew.alive, outcome(crew, add, 1), outcome(alone, add, 3)]
    alone.close()
    found["closed"] = alone.alive
    for name, wrong in (("use of closed", alone.run), ("too many", lambda *_: ranks.crew(3))):
        try:
            wrong(add, TIMEOUT_S, 1)
        except MeasurementError as error:
            found[name] = str(error)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    ranks.dismiss()


if __name__ == "__main__":
    main()
