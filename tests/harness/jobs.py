"""Jobs for worker processes that go wrong in every way."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from harness.base.time_limit import OverTime, time_limit
from harness.ranks.team import Member


def ranks(member: Member, base: int) -> int:
    return 10 * base + member.rank


def pid(member: Member) -> int:
    del member
    return os.getpid()


def fail(member: Member, rank: int) -> None:
    if member.rank == rank:
        raise KeyError("the missing shard")
    dist.barrier()


def leave(member: Member, rank: int, status: int) -> None:
    if member.rank == rank:
        sys.exit(status)
    dist.barrier()


def die(member: Member, rank: int, number: int) -> None:
    if member.rank == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


def hang(member: Member, rank: int) -> None:
    if member.rank == rank:
        time.sleep(600)


def grow(member: Member, rank: int) -> None:
    """Take memory without end, touching all of it."""
    kept = []
    while member.rank == rank:
        kept.append(b"x" * 2**24)
        time.sleep(0.002)


def unsendable(member: Member) -> int:
    del member
    return lambda: None  # type: ignore[return-value]


def square(number: int) -> int:
    return number * number


def square_or_die(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def square_or_raise(number: int) -> int:
    if number == 5:
        raise ValueError("five")
    return number * number


def stay(path: str) -> int:
    """Say who works, then work for long."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)
    return 0


def size(data: bytes) -> int:
    return len(data)


def chatter(number: int) -> int:
    """Print by Python, and by a program that has the same stdout."""
    sys.stdout.write(f"print {number}\n")
    sys.stdout.flush()
    subprocess.run(["echo", f"echo {number}"], check=True)
    return number


class OddError(Exception):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "unpicklable":
            self.lock = threading.Lock()

    def __str__(self) -> str:
        if self.kind == "unprintable":
            raise RuntimeError("no text")
        return self.kind


def raise_odd(kind: str) -> int:
    raise OddError(kind)


def say(member: Member, kind: str) -> int:
    """Fail on rank 1 with a text that is hard to show, or print and go on."""
    if member.rank == 0:
        return chatter(member.rank)
    match kind:
        case "print":
            return chatter(member.rank)
        case "empty":
            raise ValueError
        case "blank":
            raise ValueError("\n \n")
        case "huge":
            raise ValueError("x" * 50_000_000)
        case "escape":
            raise ValueError("\x1b]0;title\x07 \x9b2J \u202e half \ud800 of it")
        case _:
            raise OddError(kind)


def stop_amid_answer(member: Member, rank: int) -> None:
    """Stop one rank after it has sent the first bytes of an answer."""
    if member.rank == rank:
        write_to_sockets((1000).to_bytes(8, "big") + b"half of it")
        os.kill(os.getpid(), signal.SIGSTOP)


def spoil_pipe(member: Member, rank: int) -> None:
    """Begin no message where an answer is expected, and say nothing more."""
    if member.rank == rank:
        write_to_sockets(b"\xff" * 64)
        time.sleep(600)


def write_to_sockets(data: bytes) -> None:
    """Write to every socket that this process has, and so to its parent too."""
    for number in range(1024):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, data)


def endless_if_odd(number: int) -> int:
    """Return its number, or minus it where the work never ends and has a limit of time."""
    try:
        with time_limit(0.2):
            while number % 2:
                time.sleep(0.01)
    except OverTime:
        return -number
    return number
